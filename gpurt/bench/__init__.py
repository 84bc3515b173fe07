"""Bench: cases that measure gpurt on this machine beside its floor and its peers."""
