"""Loaders: checkpoints in, a `Model` out. Tensors are read lazily, when a plan is loaded."""

from __future__ import annotations

from pathlib import Path

from gpurt.errors import ModelError
from gpurt.loaders.model import Model, WeightSource
from gpurt.progress import Progress

__all__ = ["DEFAULT_MODEL", "Model", "Progress", "WeightSource", "load_model"]

# What the command line runs unless told otherwise: it lies in the package.
DEFAULT_MODEL = "nano"


def load_model(name: str | Path, progress: Progress | None = None) -> Model:
    """A model by name or path: "nano", "smollm2", a .gguf file, or a Hugging Face folder.

    progress: called as (what is going on, units done, units in total).
    Raises: ModelError, in one line, if it is missing, truncated, of an unknown architecture, or
    contradicts its own config.
    """
    from gpurt.loaders.gguf import load_gguf
    from gpurt.loaders.hf import load_folder
    from gpurt.loaders.nano import NANO, nano_path
    from gpurt.loaders.smollm2 import smollm2_path

    path = Path(name)
    if str(name).lower() == NANO:  # a folder of that name is ./nano, and so for smollm2
        return load_folder(nano_path(), progress)
    if str(name).lower() == "smollm2":
        return load_gguf(smollm2_path(progress), progress)
    if path.is_dir():
        return load_folder(path, progress)
    if path.suffix == ".gguf" or path.is_file():
        return load_gguf(path, progress)
    msg = f"no model {str(name)!r}"
    hint = "use nano, smollm2, a .gguf file or a Hugging Face folder"
    raise ModelError(f"{msg} - at {path} - {hint}")
