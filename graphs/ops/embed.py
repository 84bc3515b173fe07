"""embed: x[r] = table[token[r]]. The rows and their tokens come from the StepState.

eps > 0   x[r] = v * rsqrt(mean(v^2) + eps): the RMS norm without weights of the looked-up row
scale     x[r] is multiplied by it last
normed    R(x) * norm, optional: normed.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.buffer import bf16
from gpurt.errors import GraphError
from gpurt.graphs.ops.dtypes import dtype_code
from gpurt.graphs.ops.normed import normed_code, rms_normed
from gpurt.graphs.ops.regions import part, region_of, required

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator


def embed(
    graph: Graph,
    table: Operand,
    x: Operand,
    *,
    eps: float = 0.0,
    scale: float = 1.0,
    norm: Operand | None = None,
    normed: Operand | None = None,
    norm_eps: float = 0.0,
    name: str = "embed",
) -> Operator:
    """Add the embedding of a step's tokens.

    table: [vocab, hidden], any float or block dtype. x: [rows, hidden] f32, written. eps: above 0
    to norm each row. norm: [hidden] f32. normed: [rows, hidden] f32 or bf16, with norm_eps.
    Raises: GraphError if one of norm and normed is absent, or for another dtype.
    """
    table_VH = region_of(table)
    return graph.op(
        EMBED,
        {"table": table, "x": x, "norm": norm, "normed": normed},
        name=name,
        hidden=table_VH.shape[-1],
        table_dtype=dtype_code(table_VH.buffer.dtype),
        eps=float(eps),
        scale=float(scale),
        norm_eps=float(norm_eps),
        normed_dtype=normed_code(norm, normed, f"at {graph.name}.{name}"),
        normed_fragments=0,
    )


def tile_embed(op: Operator, target: Target) -> list[Tile]:
    """One task: a step reads at most `rows` rows of the table. On cuda one a row, coords = (0, 0,
    row, row + 1).

    Raises: GraphError on cuda for a table in nvfp4.
    """
    table, x = op.args["table"], op.args["x"]
    if target.kind == "cuda" and table.buffer.dtype.name == "nvfp4":
        msg = f"a table in nvfp4, which the CUDA body does not read - at {op.path}"
        raise GraphError(f'{msg} - keep the embedding in bf16, or use device="host"')
    reads = tuple(op.args[name] for name in ("table", "norm") if name in op.args)
    made = [op.args[name] for name in ("x", "normed") if name in op.args]
    size = table.buffer.dtype.row_bytes(table.shape[-1]) + 4 * len(made) * x.shape[-1]
    if target.kind != "cuda":
        return [Tile((0, 0, 0, 0), reads, tuple(made), cost_bytes=size)]
    return [
        Tile(
            (0, 0, row, row + 1),
            reads,
            tuple(part(region, 0, row, row + 1) for region in made),
            cost_bytes=size,
        )
        for row in range(x.shape[0])
    ]


def fragments_embed(op: Operator, arg: str) -> bool:
    """Whether its tasks write that argument in any order: as floats normed is nobody's operand."""
    return arg == "normed" and op.params["normed_dtype"] == dtype_code(bf16)


def embed_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """Each token's row, normed if eps > 0."""
    table, x = required(op, arrays, "table"), required(op, arrays, "x")
    rows = table[step.token].astype(np.float32)
    if op.params["eps"] > 0:
        rows = rms_normed(rows, op.params["eps"])
    x[: len(step.token)] = rows * np.float32(op.params["scale"])
    if "normed" in op.args:
        normed = rms_normed(x[: len(step.token)], op.params["norm_eps"])
        required(op, arrays, "normed")[: len(step.token)] = normed * required(op, arrays, "norm")


EMBED = Body(
    name="embed",
    args=(
        Arg("table", "r"),
        Arg("x", "w", payload=True),
        Arg("norm", "r", optional=True),
        Arg("normed", "w", optional=True),
    ),
    params=(
        *("hidden", "table_dtype", "eps", "scale"),
        *("norm_eps", "normed_dtype", "normed_fragments"),
    ),
    tile=tile_embed,
    reference=embed_reference,
    fragments=fragments_embed,
)
