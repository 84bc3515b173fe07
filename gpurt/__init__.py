"""gpurt: a whole LLM request as one task graph that lives on the device.

Importing gpurt never starts CUDA and loads neither torch nor a model.
`gpurt/graphs` is a link to the top-level folder graphs/; a wheel carries the folder itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpurt.body import Target, body
from gpurt.buffer import bf16, f16, f32, i32, q4_1, q8_0, u8, u32
from gpurt.errors import GpurtError
from gpurt.graph import Graph

if TYPE_CHECKING:
    from gpurt.plan import Plan
    from gpurt.request import Request, Result, Stats
    from gpurt.runtime import Runtime
    from gpurt.trace import Trace

__version__ = "0.1.0"

__all__ = [
    "GpurtError",
    "Graph",
    "Plan",
    "Request",
    "Result",
    "Runtime",
    "Stats",
    "Target",
    "Trace",
    "bf16",
    "body",
    "f16",
    "f32",
    "i32",
    "q4_1",
    "q8_0",
    "u8",
    "u32",
]

# Loaded when first used: they need msgpack, threads or the native module.
_LAZY = {
    "Plan": "gpurt.plan",
    "Request": "gpurt.request",
    "Result": "gpurt.request",
    "Runtime": "gpurt.runtime",
    "Stats": "gpurt.request",
    "Trace": "gpurt.trace",
}


def __getattr__(name: str) -> Any:
    """The classes of `_LAZY`."""
    if name not in _LAZY:
        raise AttributeError(f"module 'gpurt' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
