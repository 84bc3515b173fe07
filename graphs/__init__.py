"""Models as Graphs: one file a model, one file a body in ops/. No CUDA here."""
