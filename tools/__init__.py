"""Benches, fixtures and other tools of the people who work on gpurt."""
