"""sample: one token for every sample row, from its logits and its request's sampling values.

Temperature 0 takes the largest logit, the lowest index among equals. Otherwise: logits divided by
temperature, softmax, the top_k largest kept (0: all), then the fewest of the largest whose sum
reaches top_p, then the inverse of their running sum, in order of falling probability (equal ones
by index), at one uniform number. That number depends on (seed, position) alone, so a request's
tokens do not depend on what else the step carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.graphs.ops.regions import part, required

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator

_MASK = (1 << 64) - 1
_TASKS_CUDA = 16


def sample(graph: Graph, logits: Operand, *, name: str = "sample") -> Operator:
    """Add sampling. logits: [rows, vocab] f32, row j of sample row j. Writes graph.sampled."""
    return graph.op(
        SAMPLE, {"logits": logits, "sampled": graph.sampled}, name=name, vocab=graph.vocab
    )


def tile_sample(op: Operator, target: Target) -> list[Tile]:
    """One task; on cuda a task a row, up to as many as rows of a decode step: rows of a proposal
    are all sampled, and of a large vocabulary each is a megabyte for one SM.
    """
    logits, sampled = op.args["logits"], op.args["sampled"]
    cost_bytes = 4 * int(op.params["vocab"])
    if target.kind != "cuda":
        return [Tile((0, 0, 0, 0), (logits,), (sampled,), cost_bytes=cost_bytes)]
    rows = logits.shape[0]
    block = -(-rows // _TASKS_CUDA)
    return [
        Tile(
            (low, min(low + block, rows), 0, 0),
            (part(logits, 0, low, min(low + block, rows)),),
            (part(sampled, 0, low, min(low + block, rows)),),
            cost_bytes=cost_bytes,
        )
        for low in range(0, rows, block)
    ]


def sample_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """Greedy sampling: a StepRows carries no temperature. `sample_row` has the rest."""
    logits, sampled = required(op, arrays, "logits"), required(op, arrays, "sampled")
    for row in range(len(step.sample_rows)):
        sampled[row] = np.argmax(logits[row])


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) of a request's seed and a token's position: splitmix64, 24 bits.

    position: of the row whose logits are sampled.
    """
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 40) / float(1 << 24)


def sample_row(
    logits: NDArray[np.float32],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    position: int = 0,
) -> int:
    """One row's token, in float64: the oracle of the bodies, up to rounding at a boundary."""
    if temperature == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    if top_k:
        order = order[:top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    if top_p < 1:
        running = np.cumsum(weights)
        keep = int(np.searchsorted(running, top_p * running[-1])) + 1
        order, weights = order[:keep], weights[:keep]
    running = np.cumsum(weights)
    pick = int(np.searchsorted(running, uniform(seed, position) * running[-1], side="right"))
    return int(order[min(pick, len(order) - 1)])


SAMPLE = Body(
    name="sample",
    args=(Arg("logits", "r"), Arg("sampled", "w")),
    params=("vocab",),
    tile=tile_sample,
    reference=sample_reference,
    ranks=True,
    payload=True,
)
