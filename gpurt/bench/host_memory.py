"""Peak of the host memory that this process holds, from a moment on. Linux; elsewhere it says 0."""

from __future__ import annotations

from pathlib import Path

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"  # see proc(5), clear_refs


def reset_peak() -> None:
    """Count from here on."""
    try:
        (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return  # the peak is then that of the whole process


def peak_bytes() -> int:
    """The most since then; pages of mapped files that were read count too."""
    try:
        lines = (_PROCESS / "status").read_text().splitlines()
    except OSError:
        return 0
    kilobytes = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(kilobytes[0]) * 1024 if kilobytes else 0
