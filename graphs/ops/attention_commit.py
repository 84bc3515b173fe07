"""attention_commit: what a step committed of a tree of proposals, moved to its positions.

Rows of a tree write their keys and values behind each other, row i of a block at the anchor's
position + i, since several of them have one position (device/row_path.hpp). Behind `sample`, of the
rows that the target agrees with the one of depth d goes to the anchor's position + d. What other
rows left is not read before it is written again. A chain lies where it belongs already: a task that
finds no more does nothing. Runs for every cache that attention writes, before anybody reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operator

_COST_BYTES = 4096


def attention_commit(graph: Graph, op: Operator) -> Operator:
    """Add the moves in the caches that the attention operator `op` writes."""
    caches = {name: op.args[name] for name in ("k_cache", "v_cache", "page_table")}
    head_dim = int(op.params["head_dim"])
    return graph.op(
        ATTENTION_COMMIT,
        {"sampled": graph.sampled, **caches},
        name="attention_commit",
        kv_heads=op.params["kv_heads"],
        head_bytes=op.args["k_cache"].buffer.dtype.row_bytes(head_dim),
        page=op.params["page"],
        pages_per_slot=op.params["pages_per_slot"],
    )


def commit_paths(graph: Graph) -> None:
    """Add the moves in all caches that the graph's attention has so far."""
    for op in list(graph.operators):
        if op.body.name == "attention":
            attention_commit(graph, op)


def tile_attention_commit(op: Operator, target: Target) -> list[Tile]:
    """One task."""
    del target
    caches = op.args["k_cache"], op.args["v_cache"]
    reads = (op.args["sampled"], *caches, op.args["page_table"])
    return [Tile((0, 0, 0, 0), reads, caches, cost_bytes=_COST_BYTES)]


def attention_commit_reference(
    op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows
) -> None:
    """Nothing: a StepRows is of chains."""


ATTENTION_COMMIT = Body(
    name="attention_commit",
    args=(
        Arg("sampled", "r"),
        Arg("k_cache", "rw"),
        Arg("v_cache", "rw"),
        Arg("page_table", "r"),
    ),
    params=("kv_heads", "head_bytes", "page", "pages_per_slot"),
    tile=tile_attention_commit,
    reference=attention_commit_reference,
)
