"""draft_walk: a path, or a tree, through the candidates of a block's slots: the proposals.

Slot by slot, the first after the block's anchor:

  candidates   the top_k best of all that its row of scores and ids holds, equal ones by id
  S(c)         score of c, plus sum over r of predecessor[p, r] * hidden[r] * successor[c, r], where
               p is the token chosen before; without codebooks the score alone
  choice       greedy: the largest S, the first of equal ones. Else as `sample` draws a token from
               logits S: the request's temperature, top_k and top_p, and the same uniform number
               that will draw the target's token of that position
  end          where no S is a finite number: the proposals end there

A tree, of a greedy request: its first node is the anchor, and a node's children are the candidates
of the slot behind it, with p the node's token. A child's probability is the softmax of S over them,
a path's the product of its nodes'. `nodes` times the likeliest child that is no node yet becomes
one, the first found of equal ones: the tree has the likeliest paths, and every node stands behind
its parent. A sampled request keeps the chain.

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


_RANK_MULTIPLE = 8  # columns that a lane loads at once


def draft_walk(
    graph: Graph,
    scores: Operand,
    ids: Operand,
    proposals: Buffer,
    *,
    top_k: int,
    selector: tuple[Operand, Operand, Operand] | None = None,
    nodes: int = 0,
    name: str = "draft_walk",
) -> Operator:
    """Add the walk, over the table of the drafter's rows.

    scores, ids: [rows, n], as `candidates` makes them. selector: hidden [rows, rank] f32, row j of
    sample row j, and the codebooks of predecessors and successors, [vocab, rank] of one float
    dtype. nodes: of a tree, whose parents go to graph.parents; 0: a chain.
    Raises: GraphError if these do not fit together, and for top_k not from 1 to 32.
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
            "parents": graph.parents if nodes else None,
        },
        name=name,
        n=region_of(scores).shape[-1],
        top_k=top_k,
        rank=widths.pop() if widths else 0,
        dtype=dtype_code(dtypes.pop()) if dtypes else 0,
        nodes=nodes,
    )


def tile_draft_walk(op: Operator, target: Target) -> list[Tile]:
    """One task a slot. Raises: GraphError for a rank that the CUDA body does not take."""
    args = op.args
    if target.kind == "cuda" and int(op.params["rank"]) % _RANK_MULTIPLE:
        msg = f"a selector of rank {op.params['rank']}, the CUDA body takes multiples of"
        raise GraphError(f'{msg} {_RANK_MULTIPLE} - at {op.path} - pad it, or use device="host"')
    made = [args[name] for name in ("proposals", "parents") if name in args]
    reads = tuple(args[name] for name in args if args[name] not in made)
    rank, top_k = int(op.params["rank"]), int(op.params["top_k"])
    cost_bytes = 4 * int(op.params["n"]) + 4 * rank * top_k
    return [
        Tile(
            (slot, 0, 0, 0),
            reads,
            tuple(part(region, 0, slot, slot + 1) for region in made),
            cost_bytes=cost_bytes,
        )
        for slot in range(args["proposals"].shape[0])
    ]


def draft_walk_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """Greedy: a StepRows carries no temperature."""
    proposals, nodes = required(op, arrays, "proposals"), int(op.params["nodes"])
    slots = step.slot[step.sample_rows]
    for slot in np.unique(slots):
        own = np.flatnonzero(slots == slot)
        anchor = int(step.token[step.sample_rows[own[0]] - 1])
        if nodes:
            path, parents = _tree(op, arrays, own, anchor, nodes)
            required(op, arrays, "parents")[slot, : len(path)] = parents
        else:
            path = _chain(op, arrays, own, anchor)
        proposals[slot, 0] = len(path)
        proposals[slot, 1 : 1 + len(path)] = path


def _values(
    op: Operator, arrays: Mapping[str, NDArray[Any]], row: int, before: int
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """A row's candidates with a finite S, and S."""
    scores, ids = required(op, arrays, "scores")[row], required(op, arrays, "ids")[row]
    hidden, successor = array_of(op, arrays, "hidden"), array_of(op, arrays, "successor")
    predecessor = array_of(op, arrays, "predecessor")
    order = np.lexsort((ids, -scores))[: int(op.params["top_k"])]
    order = order[scores[order] > -np.inf]
    chosen, value = ids[order].astype(np.int64), scores[order]
    if hidden is not None and predecessor is not None and successor is not None:
        value = value + successor[chosen] @ (predecessor[before] * hidden[row])
    finite = np.isfinite(value)
    return chosen[finite], value[finite]


def _chain(
    op: Operator, arrays: Mapping[str, NDArray[Any]], own: NDArray[np.int64], before: int
) -> list[int]:
    path: list[int] = []
    for row in own:
        chosen, value = _values(op, arrays, int(row), before)
        if not len(chosen):
            break
        before = int(chosen[np.argmax(value)])
        path.append(before)
    return path


def _tree(
    op: Operator,
    arrays: Mapping[str, NDArray[Any]],
    own: NDArray[np.int64],
    anchor: int,
    nodes: int,
) -> tuple[list[int], list[int]]:
    """Tokens of the nodes behind the anchor, and each one's parent."""
    tree = [(0.0, -1, anchor, 0)]  # logarithm of the path's probability, parent, token, depth
    children: list[tuple[float, int, int, int]] = []
    while len(tree) <= nodes:
        path, _, token, depth = tree[-1]
        if depth < len(own):
            chosen, value = _values(op, arrays, int(own[depth]), token)
            if len(chosen):
                shares = value - value.max() - np.log(np.exp(value - value.max()).sum())
                node = len(tree) - 1
                children += [
                    (path + float(share), node, int(child), depth + 1)
                    for share, child in zip(shares, chosen, strict=True)
                ]
        if not children:
            break
        best = max(children, key=lambda child: child[0])
        children.remove(best)
        tree.append(best)
    return [node[2] for node in tree[1:]], [node[1] for node in tree[1:]]


DRAFT_WALK = Body(
    name="draft_walk",
    args=(
        Arg("scores", "r"),
        Arg("ids", "r"),
        Arg("hidden", "r", optional=True),
        Arg("predecessor", "r", optional=True),
        Arg("successor", "r", optional=True),
        Arg("proposals", "w"),
        Arg("parents", "w", optional=True),
    ),
    params=("n", "top_k", "rank", "dtype", "nodes"),
    tile=tile_draft_walk,
    reference=draft_walk_reference,
    ranks=True,
)
