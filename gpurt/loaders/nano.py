"""muse-spark-nano: the model that gpurt carries in itself, made by tools/train.

It lies in the package, at models/nano, its drafter in draft/ beneath it; a checkout in which it was
not trained yet has neither.
"""

from __future__ import annotations

from pathlib import Path

from gpurt.errors import ModelError

NANO = "nano"
_FOLDER = Path(__file__).resolve().parent.parent / "models" / NANO


def nano_path(folder: Path = _FOLDER) -> Path:
    """The folder of nano. Raises: ModelError if it is not there."""
    if not (folder / "config.json").exists():
        msg = "nano is not trained yet in this checkout"
        raise ModelError(f"{msg} - at {folder} - run tools/train/run.sh, or use --model smollm2")
    return folder
