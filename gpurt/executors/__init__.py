"""Executors: run a Plan on CPU threads or on a GPU, behind one protocol."""
