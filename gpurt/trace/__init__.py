"""Trace: spans of a run, their analysis, and what `gpurt trace` shows."""
