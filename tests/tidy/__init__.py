"""Style that a machine can hold."""
