"""Many like parts of one array, worked on by several threads: numpy's copies and the packers let
others run meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_THREADS = 16  # each may hold a part in another dtype


def each_part(count: int, work: Callable[[int], None]) -> None:
    """work(0) to work(count - 1), in any order, some at once. Raises: what one of them raises."""
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(work, range(count)))
