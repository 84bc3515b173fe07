"""route on cuda for steps of more than 16 rows: rows choose, then all pairs are grouped by expert.

    route_choose   logits -> chosen [rows, T, 2]: each pair's expert, ascending, and weight (bits)
    route_group    chosen -> routes, as route.py draws it

A row chooses by the code of smaller steps, 16 rows a task: coords = (0, 0, first row, last). One
task groups, since whoever decides how many slots a step has is one task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpurt.body import Arg, Body, Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops.regions import part

if TYPE_CHECKING:
    from gpurt.graph import Operator
    from gpurt.planner.lower import Lowering

ROWS_MAX = 16  # of a task that chooses
_PAIRS_MAX = 8192  # kPairsMax of device/bodies/route_rows.cuh
_PARAMS = (
    *("experts", "top_k", "kind", "factor", "norm_topk", "forced_count", "forced_slots"),
    *("first", "own"),
)


def widen(op: Operator, lowering: Lowering) -> None:
    """The two operators in place of `op`. Raises: GraphError for more pairs than they take."""
    rows, top_k = op.args["logits"].shape[0], int(op.params["top_k"])
    if rows * top_k > _PAIRS_MAX:
        msg = (
            f"{rows} rows of {top_k} experts, the CUDA body takes {_PAIRS_MAX} pairs - at {op.path}"
        )
        raise GraphError(f"{msg} - build the graph with rows={_PAIRS_MAX // top_k} or fewer")
    chosen = lowering.activation(op, "chosen", [rows, 2 * top_k], "u32")
    lowering.add(op, "choose", ROUTE_CHOOSE, {**op.args, "chosen": chosen}, op.params)
    lowering.add(op, "group", ROUTE_GROUP, {**op.args, "chosen": chosen}, op.params)


def tile_choose(op: Operator, target: Target) -> list[Tile]:
    """Sixteen rows a task."""
    del target
    args, rows = op.args, op.args["logits"].shape[0]
    tiles = []
    for first in range(0, rows, ROWS_MAX):
        last = min(first + ROWS_MAX, rows)
        reads = [part(args["logits"], 0, first, last)]
        reads += [args[name] for name in ("bias", "forced") if name in args]
        write = part(args["chosen"], 0, first, last)
        cost = 4 * int(op.params["experts"]) * (last - first)
        tiles.append(Tile((0, 0, first, last), tuple(reads), (write,), None, cost))
    return tiles


def tile_group(op: Operator, target: Target) -> list[Tile]:
    """One task."""
    del target
    args = op.args
    rows, width = args["chosen"].shape
    return [Tile((0, 0, 0, 0), (args["chosen"],), (args["routes"],), None, 16 * rows * width)]


ROUTE_CHOOSE = Body(
    name="route_choose",
    args=(
        Arg("logits", "r"),
        Arg("bias", "r", optional=True),
        Arg("chosen", "w"),
        Arg("forced", "r", optional=True),
    ),
    params=_PARAMS,
    tile=tile_choose,
    ranks=True,
)
ROUTE_GROUP = Body(
    name="route_group",
    args=(Arg("chosen", "r"), Arg("routes", "w")),
    params=_PARAMS,
    tile=tile_group,
)
