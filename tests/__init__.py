"""Tests: tidy, unit, sim and models run without a GPU; gpu needs one."""
