"""embed: x[r] = table[token[r]]. One task; the rows and their tokens come from the StepState.

eps > 0   x[r] = v * rsqrt(mean(v^2) + eps): the RMS norm without weights of the looked-up row
scale     x[r] is multiplied by it last
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops.dtypes import dtype_code
from gpurt.graphs.ops.regions import part, region_of, required

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator

_ROWS_CUDA = 16  # of a task: device/bodies/embed.cuh


def embed(
    graph: Graph,
    table: Operand,
    x: Operand,
    *,
    eps: float = 0.0,
    scale: float = 1.0,
    name: str = "embed",
) -> Operator:
    """Add the embedding of a step's tokens.

    table: [vocab, hidden], any float or block dtype. x: [rows, hidden] f32, written. eps: above 0
    to norm each row.
    """
    table_VH = region_of(table)
    return graph.op(
        EMBED,
        {"table": table, "x": x},
        name=name,
        hidden=table_VH.shape[-1],
        table_dtype=dtype_code(table_VH.buffer.dtype),
        eps=float(eps),
        scale=float(scale),
    )


def tile_embed(op: Operator, target: Target) -> list[Tile]:
    """One task: a step reads at most `rows` rows of the table. On cuda one for 16 rows of many,
    coords = (0, 0, first row, last).

    Raises: GraphError on cuda for a table in nvfp4.
    """
    table, x = op.args["table"], op.args["x"]
    if target.kind == "cuda" and table.buffer.dtype.name == "nvfp4":
        msg = f"a table in nvfp4, which the CUDA body does not read - at {op.path}"
        raise GraphError(f'{msg} - keep the embedding in bf16, or use device="host"')
    row_bytes = table.buffer.dtype.row_bytes(table.shape[-1]) + 4 * x.shape[-1]
    rows = x.shape[0]
    if target.kind != "cuda" or rows <= _ROWS_CUDA:
        return [Tile((0, 0, 0, 0), (table,), (x,), cost_bytes=row_bytes)]
    tiles = []
    for first in range(0, rows, _ROWS_CUDA):
        last = min(first + _ROWS_CUDA, rows)
        size = row_bytes * (last - first)
        tiles.append(
            Tile((0, 0, first, last), (table,), (part(x, 0, first, last),), cost_bytes=size)
        )
    return tiles


def embed_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """Each token's row, normed if eps > 0."""
    table, x = required(op, arrays, "table"), required(op, arrays, "x")
    rows = table[step.token].astype(np.float32)
    eps = np.float32(op.params["eps"])
    if eps > 0:
        rows = rows / np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True) + eps)
    x[: len(step.token)] = rows * np.float32(op.params["scale"])


EMBED = Body(
    name="embed",
    args=(Arg("table", "r"), Arg("x", "w")),
    params=("hidden", "table_dtype", "eps", "scale"),
    tile=tile_embed,
    reference=embed_reference,
    payload=True,
)
