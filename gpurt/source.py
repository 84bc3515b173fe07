"""Where the C++ and CUDA sources lie: NVRTC compiles them on the user's machine."""

from pathlib import Path


def source_dir() -> Path:
    """The folder that holds device/ and scheduler/: in a wheel, or the top of a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_source"
    return installed if installed.is_dir() else package.parent
