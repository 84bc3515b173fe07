"""gpurt: a whole LLM request as one task graph that lives on the device.

Importing gpurt never starts CUDA and loads neither torch nor a model.
`gpurt/graphs` is a link to the top-level folder graphs/; a wheel carries the folder itself.
"""

__version__ = "0.1.0"
