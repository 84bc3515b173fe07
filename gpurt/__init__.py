"""gpurt: a whole LLM request as one task graph that lives on the device.

Importing gpurt never starts CUDA and loads neither torch nor a model.
"""

from pathlib import Path

# In a checkout the top-level folder graphs/ serves as gpurt.graphs; a wheel carries it inside.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "graphs" / "ops").is_dir() and not (Path(__file__).parent / "graphs").is_dir():
    import importlib.util as _util
    import sys as _sys

    _spec = _util.spec_from_file_location(
        "gpurt.graphs",
        _checkout / "graphs" / "__init__.py",
        submodule_search_locations=[str(_checkout / "graphs")],
    )
    if _spec is not None and _spec.loader is not None:
        _module = _util.module_from_spec(_spec)
        _sys.modules["gpurt.graphs"] = _module
        _spec.loader.exec_module(_module)

__version__ = "0.1.0"
