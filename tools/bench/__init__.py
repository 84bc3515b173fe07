"""Benches: a line a case beside its ceiling, JSON last."""
