"""Routes made by hand: which experts each row goes to, without a router."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpurt.graphs.ops.route import RoutesLayout

UNWRITTEN = 0xFFFFFFFF  # every word of `routes` that no step has written; NaN as a weight


def routes_of(
    layout: RoutesLayout,
    chosen_BT: NDArray[np.integer],
    weights_BT: NDArray[np.float32] | None = None,
) -> NDArray[np.uint32]:
    """`routes` of a step. chosen: experts of each row, ascending. weights: default 1, 2, 3 ..."""
    rows, top_k = chosen_BT.shape
    assert top_k == layout.top_k
    assert rows <= layout.rows
    if weights_BT is None:
        weights_BT = 1 + np.arange(rows * top_k, dtype=np.float32).reshape(rows, top_k)
    routes = np.full(layout.words, UNWRITTEN, np.uint32)
    experts = np.unique(chosen_BT)
    routes[0], routes[1] = len(experts), rows * top_k
    for slot, expert in enumerate(experts):
        users = [p for p in range(rows * top_k) if chosen_BT.flat[p] == expert]
        at = layout.slot(slot)
        routes[at], routes[at + 1] = expert, len(users)
        for number, pair in enumerate(users):
            routes[at + 2 + 2 * number : at + 4 + 2 * number] = pair // top_k, pair
            routes[layout.pair(pair)] = slot
            weight = np.float32(weights_BT.flat[pair])
            routes[layout.pair(pair) + 1] = weight.view(np.uint32)
    return routes


def choices(pattern: str, rows: int, experts: int, top_k: int) -> NDArray[np.int64]:
    """Experts of each row by pattern: one (all rows the same), spread (all different, as far as
    experts reach), random.
    """
    rng = np.random.default_rng(rows * 1000 + experts)
    if pattern == "one":
        chosen = np.tile(np.arange(top_k) + (experts - top_k) // 2, (rows, 1))
    elif pattern == "spread":
        chosen = (np.arange(rows * top_k) % experts).reshape(rows, top_k)
    else:
        chosen = np.stack([rng.permutation(experts)[:top_k] for _ in range(rows)])
    return np.sort(chosen, axis=1).astype(np.int64)
