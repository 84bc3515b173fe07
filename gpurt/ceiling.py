"""Ceilings: the bandwidth that each device of this machine was measured to reach.

`gpurt bench` and `gpurt doctor --bandwidth` measure it; traces quote it. One JSON file in the cache
folder, {"device, N workers": GB/s}; without that folder nothing is kept, and nothing quoted.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

FILE = "bandwidth.json"


def remember(device_name: str, workers: int, gigabytes_per_s: float) -> None:
    """Keep a measurement; the newest one counts."""
    known = _read()
    known[_key(device_name, workers)] = round(gigabytes_per_s, 2)
    path = _path()
    fresh = path.with_name(f"{FILE}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError:
        return


def recall(device_name: str, workers: int) -> float:
    """GB/s, 0 if it was never measured."""
    return _read().get(_key(device_name, workers), 0.0)


# ---- helpers ---------------------------------------------------------------------------------
def _key(device_name: str, workers: int) -> str:
    return f"{device_name}, {workers} workers"


def _path() -> Path:
    from gpurt.doctor import cache_folder

    return cache_folder() / FILE


def _read() -> dict[str, float]:
    try:
        known = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {str(k): float(v) for k, v in known.items() if isinstance(v, int | float)}
