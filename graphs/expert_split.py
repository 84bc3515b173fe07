"""How ranks share a layer's experts, and what each way moves in a step.

    width    every rank has a part of every expert's inner width: all have the same work; each pair
             of a row and an expert is summed over ranks, [rows * top_k, M], before its norm
    expert   every rank has whole experts: only a row's sum over them goes over links, [rows, M];
             a step waits for the rank whose experts were chosen most
    auto     the one whose bytes take less time, for a step of all the graph's rows

Weights are those that the busiest rank reads, for experts drawn at random, as a balanced router
draws them: the mean of DRAWS steps from a fixed seed. Sums of the two differ in their order, so
bits do, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from gpurt.errors import GraphError
from gpurt.graphs.collectives import all_reduce_bytes

SPLITS = ("width", "expert", "auto")
DRAWS = 64
# Bytes from memory in the time of one over links: 4.2 TB/s and 450 GB/s each way on an H200.
LINK_FACTOR = 9


@dataclass(frozen=True)
class Moved:
    """Bytes of one layer in a step: weights that the busiest rank reads, and what a rank sends."""

    weights: int
    links: int

    def cost(self) -> int:
        """Both as bytes of memory."""
        return self.weights + LINK_FACTOR * self.links

    def __str__(self) -> str:
        """As in `12.3 MB of weights, 0.50 MB sent`."""
        return f"{self.weights / 1e6:.3g} MB of weights, {self.links / 1e6:.3g} MB sent"


@cache
def busiest_live(experts: int, top_k: int, rows: int, ranks: int) -> float:
    """Experts that a step needs of the rank that has most of them; one rank: of all."""
    rng, total = np.random.default_rng(0), 0
    for _ in range(DRAWS):
        scores = rng.random((rows, experts), np.float32)
        live = np.zeros(experts, bool)
        live[np.argpartition(scores, top_k - 1, axis=1)[:, :top_k]] = True
        total += int(live.reshape(ranks, -1).sum(axis=1).max())
    return total / DRAWS


def moved(
    split: str, ranks: int, *, rows: int, experts: int, top_k: int, width: int, expert_bytes: int
) -> Moved:
    """What a split moves. width: M. expert_bytes: the weights of one expert."""
    if split == "width":
        live = busiest_live(experts, top_k, rows, 1) / ranks
        return Moved(round(live * expert_bytes), all_reduce_bytes(4 * rows * top_k * width, ranks))
    live = busiest_live(experts, top_k, rows, ranks)
    return Moved(round(live * expert_bytes), all_reduce_bytes(4 * rows * width, ranks))


def choose(
    wanted: str, ranks: int, where: str, *, experts: int, inner: int, **sizes: int
) -> tuple[str, str]:
    """(the split, a line that says what both move). inner: of an expert's width; sizes: as `moved`.

    Raises: GraphError for an unknown split, and for one that the model has no equal parts for.
    """
    if wanted not in SPLITS:
        raise GraphError(f"expert_split is {wanted!r} - at {where} - use one of {list(SPLITS)}")
    if ranks == 1:
        return "width", ""
    fits = {"width": inner % ranks == 0, "expert": experts % ranks == 0}
    able = [s for s in fits if fits[s]] if wanted == "auto" else [wanted]
    if not all(fits[s] for s in able) or not able:
        msg = f"{experts} experts of inner width {inner} have no {ranks} equal shares"
        raise GraphError(f"{msg} by {wanted} - at {where} - use a tp_size that divides them")
    both = {s: moved(s, ranks, experts=experts, **sizes) for s in able}
    chosen = min(both, key=lambda s: both[s].cost())
    shown = "; ".join(f"by {s} {m}" for s, m in both.items())
    rows = sizes["rows"]
    return chosen, f"experts: split by {chosen}; a layer and step of {rows} rows: {shown}"
