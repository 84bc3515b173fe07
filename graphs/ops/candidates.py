"""candidates: the largest values of each sample row and where they stand, chunk by chunk.

The columns are cut in chunks; of each chunk the `count` largest go to scores and ids, in falling
order, equal ones by column. Where a chunk has fewer, the rest is -infinity at column 0. NaN is no
value. So whoever wants the best of a whole row merges a few numbers a chunk. Ids count from
`first`, the number of column 0: a rank has some of a row's columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops.regions import columns, part, region_of, required

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator

CHUNK = 8192
COUNT_MAX = 32  # the CUDA body keeps one a lane


def candidates(
    graph: Graph,
    x: Operand,
    scores: Operand,
    ids: Operand,
    *,
    count: int,
    chunk: int = CHUNK,
    first: int = 0,
    name: str = "candidates",
) -> Operator:
    """Add the choice of candidates. x: [rows, n] f32, row j of sample row j.

    scores: [rows, chunks * count] f32, ids: the same u32. Raises: GraphError if they do not fit.
    """
    n = region_of(x).shape[-1]
    width = chunk_count(n, chunk) * count
    found = [region_of(operand).shape[-1] for operand in (scores, ids)]
    if found != [width, width] or not 1 <= count <= COUNT_MAX:
        msg = f"scores and ids of {found} columns for {count} of each {chunk} of {n}"
        need = f"give both {width}, and 1 to {COUNT_MAX} candidates"
        raise GraphError(f"{msg} - at {graph.name}.{name} - {need}")
    return graph.op(
        CANDIDATES,
        {"x": x, "scores": scores, "ids": ids},
        name=name,
        n=n,
        count=count,
        chunk=chunk,
        first=first,
    )


def chunk_count(n: int, chunk: int = CHUNK) -> int:
    """Chunks of a row of n columns."""
    return -(-n // chunk)


def tile_candidates(op: Operator, target: Target) -> list[Tile]:
    """One task a chunk, for all rows; on cuda for each. coords = (begin, end, chunk, row)."""
    n, count, chunk = (int(op.params[name]) for name in ("n", "count", "chunk"))
    rows = op.args["x"].shape[0]
    blocks = [(0, rows)] if target.kind == "host" else [(row, row + 1) for row in range(rows)]
    tiles = []
    for index, (low, high) in product(range(chunk_count(n, chunk)), blocks):
        begin, end = index * chunk, min((index + 1) * chunk, n)
        out = (index * count, (index + 1) * count)
        reads = (columns(part(op.args["x"], 0, low, high), begin, end),)
        writes = tuple(
            columns(part(op.args[name], 0, low, high), *out) for name in ("scores", "ids")
        )
        cost_bytes = 4 * (end - begin) * (high - low)
        tiles.append(Tile((begin, end, index, low), reads, writes, cost_bytes=cost_bytes))
    return tiles


def candidates_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """The contract above."""
    rows = len(step.sample_rows)
    n, count, chunk, first = (int(value) for value in op.params.values())
    x = required(op, arrays, "x")[:rows]
    scores, ids = required(op, arrays, "scores"), required(op, arrays, "ids")
    scores[:rows], ids[:rows] = -np.inf, first
    for index in range(chunk_count(n, chunk)):
        of_chunk = x[:, index * chunk : (index + 1) * chunk]
        for row in range(rows):
            values = np.where(np.isnan(of_chunk[row]), -np.inf, of_chunk[row])
            best = np.argsort(-values, kind="stable")[:count]
            best = best[values[best] > -np.inf]
            to = slice(index * count, index * count + len(best))
            scores[row, to], ids[row, to] = values[best], first + index * chunk + best


CANDIDATES = Body(
    name="candidates",
    args=(Arg("x", "r"), Arg("scores", "w"), Arg("ids", "w")),
    params=("n", "count", "chunk", "first"),
    tile=tile_candidates,
    reference=candidates_reference,
)
