"""embed: x[r] = table[token[r]]. One task; the rows and their tokens come from the StepState."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.graphs.ops.dtypes import dtype_code
from gpurt.graphs.ops.regions import region_of, required

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator


def embed(graph: Graph, table: Operand, x: Operand, *, name: str = "embed") -> Operator:
    """Add the embedding of a step's tokens.

    table: [vocab, hidden], any float or block dtype. x: [rows, hidden] f32, written.
    """
    table_VH = region_of(table)
    return graph.op(
        EMBED,
        {"table": table, "x": x},
        name=name,
        hidden=table_VH.shape[-1],
        table_dtype=dtype_code(table_VH.buffer.dtype),
    )


def tile_embed(op: Operator, target: Target) -> list[Tile]:
    """One task: a step reads at most `rows` rows of the table."""
    del target
    table, x = op.args["table"], op.args["x"]
    row_bytes = table.buffer.dtype.row_bytes(table.shape[-1]) + 4 * x.shape[-1]
    return [Tile((0, 0, 0, 0), (table,), (x,), cost_bytes=row_bytes)]


def embed_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """Copy each token's row."""
    table, x = required(op, arrays, "table"), required(op, arrays, "x")
    x[: len(step.token)] = table[step.token]


EMBED = Body(
    name="embed",
    args=(Arg("table", "r"), Arg("x", "w")),
    params=("hidden", "table_dtype"),
    tile=tile_embed,
    reference=embed_reference,
    payload=True,
)
