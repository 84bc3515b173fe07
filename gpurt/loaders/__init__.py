"""Loaders: checkpoints (GGUF, HF folders) to weights by name."""
