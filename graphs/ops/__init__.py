"""Operators: reference, tiling and cost of each built-in body, a file a body."""
