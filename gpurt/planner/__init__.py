"""Planner: lowers a Graph to a checked Plan for one target."""
