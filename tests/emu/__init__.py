"""The GPU's cold bodies on a CPU: the same CUDA sources, a fibre a thread."""
