"""draft_walk: a path through the candidates of a block's slots, and with it the proposals.

Slot by slot, the first after the block's anchor:

  candidates   the top_k best of all that its row of scores and ids holds, equal ones by id
  S(c)         score of c, plus sum over r of predecessor[p, r] * hidden[r] * successor[c, r], where
               p is the token chosen before; without codebooks the score alone
  choice       greedy: the largest S, the first of equal ones. Else as `sample` draws a token from
               logits S: the request's temperature, top_k and top_p, and the same uniform number
               that will draw the target's token of that position
  end          where no S is a finite number: the proposals end there

No probabilities are kept: acceptance needs none (device/acceptance.hpp).
Source: the `dflash` package's CandidateSelector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops.candidates import COUNT_MAX
from gpurt.graphs.ops.dtypes import dtype_code
from gpurt.graphs.ops.regions import array_of, part, region_of, required

if TYPE_CHECKING:
    from gpurt.buffer import Buffer
    from gpurt.graph import Graph, Operand, Operator


def draft_walk(
    graph: Graph,
    scores: Operand,
    ids: Operand,
    proposals: Buffer,
    *,
    top_k: int,
    selector: tuple[Operand, Operand, Operand] | None = None,
    name: str = "draft_walk",
) -> Operator:
    """Add the walk, over the table of the drafter's rows.

    scores, ids: [rows, n], as `candidates` makes them. selector: hidden [rows, rank] f32, row j of
    sample row j, and the codebooks of predecessors and successors, [vocab, rank] of one float
    dtype. Raises: GraphError if these do not fit together, and for top_k not from 1 to 32.
    """
    three = [region_of(operand) for operand in selector or ()]
    widths, dtypes = {r.shape[-1] for r in three}, {r.buffer.dtype for r in three[1:]}
    if len(widths) > 1 or len(dtypes) > 1:
        msg = f"a selector of widths {[r.shape[-1] for r in three]}"
        raise GraphError(f"{msg} - at {graph.name}.{name} - make hidden and both codebooks alike")
    if not 1 <= top_k <= COUNT_MAX:
        msg = f"top_k is {top_k} - at {graph.name}.{name}"
        raise GraphError(f"{msg} - use 1 to {COUNT_MAX}")
    return graph.op(
        DRAFT_WALK,
        {
            "scores": scores,
            "ids": ids,
            **dict(zip(("hidden", "predecessor", "successor"), three, strict=False)),
            "proposals": proposals,
        },
        name=name,
        n=region_of(scores).shape[-1],
        top_k=top_k,
        rank=widths.pop() if widths else 0,
        dtype=dtype_code(dtypes.pop()) if dtypes else 0,
    )


def tile_draft_walk(op: Operator, target: Target) -> list[Tile]:
    """One task a slot."""
    del target
    args = op.args
    reads = tuple(args[name] for name in args if name != "proposals")
    rank, top_k = int(op.params["rank"]), int(op.params["top_k"])
    cost_bytes = 4 * int(op.params["n"]) + 4 * rank * top_k
    return [
        Tile(
            (slot, 0, 0, 0),
            reads,
            (part(args["proposals"], 0, slot, slot + 1),),
            cost_bytes=cost_bytes,
        )
        for slot in range(args["proposals"].shape[0])
    ]


def draft_walk_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """Greedy: a StepRows carries no temperature."""
    scores, ids = required(op, arrays, "scores"), required(op, arrays, "ids")
    proposals, top_k = required(op, arrays, "proposals"), int(op.params["top_k"])
    hidden, successor = array_of(op, arrays, "hidden"), array_of(op, arrays, "successor")
    predecessor = array_of(op, arrays, "predecessor")
    slots = step.slot[step.sample_rows]
    for slot in np.unique(slots):
        own = np.flatnonzero(slots == slot)
        before, path = int(step.token[step.sample_rows[own[0]] - 1]), []
        for j in own:
            order = np.lexsort((ids[j], -scores[j]))[:top_k]
            order = order[scores[j][order] > -np.inf]
            chosen, value = ids[j][order].astype(np.int64), scores[j][order]
            if hidden is not None and predecessor is not None and successor is not None:
                value = value + successor[chosen] @ (predecessor[before] * hidden[j])
            value = np.where(np.isfinite(value), value, -np.inf)
            if not (value > -np.inf).any():
                break
            before = int(chosen[np.argmax(value)])
            path.append(before)
        proposals[slot, 0] = len(path)
        proposals[slot, 1 : 1 + len(path)] = path


DRAFT_WALK = Body(
    name="draft_walk",
    args=(
        Arg("scores", "r"),
        Arg("ids", "r"),
        Arg("hidden", "r", optional=True),
        Arg("predecessor", "r", optional=True),
        Arg("successor", "r", optional=True),
        Arg("proposals", "w"),
    ),
    params=("n", "top_k", "rank", "dtype"),
    tile=tile_draft_walk,
    reference=draft_walk_reference,
)
