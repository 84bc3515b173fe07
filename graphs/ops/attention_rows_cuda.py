"""attention on cuda for steps of more than 16 rows: keys and values first, then attention.

    attention.kv    the step's keys and values -> caches
    attention       queries, caches -> out, or the sums of all spans (attention.py, `partials`)

In smaller steps every task writes what it reads, to save a hop; of many rows that would be most of
its work. Both are body `attention_rows`: coords = (kv head, 0, 1 with spans, rows as
begin | end << 16). Sums are those of attention.py, bit by bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpurt.body import Arg, Body, Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops.regions import columns, part

if TYPE_CHECKING:
    from gpurt.graph import Operator
    from gpurt.planner.lower import Lowering

ROWS_MAX = 16  # of a step whose rows device/bodies/attention.cuh takes at once
_ROWS_LIMIT = 0xFFFF
_WRITTEN_ROWS = 8  # a task's: one round of vectors of 128 for its team
_COST_POSITIONS = 256  # as attention.py counts them


def widen(op: Operator, lowering: Lowering) -> None:
    """The two operators in place of `op`; one if it only writes the cache. Raises: GraphError for
    more rows than a coordinate says.
    """
    rows = op.args["kv"].shape[0]
    if rows > _ROWS_LIMIT:
        msg = f"{rows} rows a step, the CUDA body takes {_ROWS_LIMIT} - at {op.path}"
        raise GraphError(f"{msg} - build the graph with rows={_ROWS_LIMIT} or fewer")
    of_kv = {name: region for name, region in op.args.items() if name not in _OF_QUERIES}
    lowering.add(op, "kv", ATTENTION_KV, of_kv, op.params)
    if "q" in op.args:
        lowering.add(op, "rows", ATTENTION_ROWS, {**op.args, "kv": None}, op.params)


def tile_kv(op: Operator, target: Target) -> list[Tile]:
    """Rows of a kv head. Where they lie is known only as the task runs: it declares its part of the
    pages in their place.
    """
    args, (kv_heads, head_dim) = op.args, _heads(op)
    rows, pages = args["kv"].shape[0], args["k_cache"].shape[0]
    count = min(-(-rows // _WRITTEN_ROWS), max(1, target.workers // kv_heads), pages)
    tiles = []
    for head in range(kv_heads):
        low, high = head * head_dim, (head + 1) * head_dim
        for index, own in enumerate(shares(rows, count)):
            of_rows, width = part(args["kv"], 0, *own), kv_heads * head_dim
            reads = [columns(of_rows, low, high), columns(of_rows, width + low, width + high)]
            reads += [args[name] for name in ("page_table", "rope", "qk_norm") if name in args]
            writes = tuple(
                part(part(args[name], 1, head, head + 1), 0, *shares(pages, count)[index])
                for name in ("k_cache", "v_cache")
            )
            cost = 16 * head_dim * (own[1] - own[0])
            coords = (head, 0, int(op.params["spans"] != 0), packed(own))
            tiles.append(Tile(coords, tuple(reads), writes, None, cost))
    return tiles


def tile_rows(op: Operator, target: Target) -> list[Tile]:
    """Rows of a kv head, with all of its query heads."""
    args, (kv_heads, head_dim) = op.args, _heads(op)
    rows, group = args["q"].shape[0], int(op.params["heads"]) // kv_heads
    count = min(rows, max(1, target.workers // kv_heads, -(-rows // ROWS_MAX)))
    has_spans = "partials" in args
    tiles = []
    # The last rows see most: a worker with two tasks has one of those, then one of the others.
    of_rows = shares(rows, count)
    early = count // 2 if count * kv_heads > target.workers else 0
    for own in [*reversed(of_rows[early:]), *of_rows[:early]]:
        for head in range(kv_heads):
            first, last = head * group * head_dim, (head + 1) * group * head_dim
            shared = [part(args[name], 1, head, head + 1) for name in ("k_cache", "v_cache")]
            shared += [args[name] for name in ("page_table", "rope", "qk_norm") if name in args]
            of_q, reads = part(args["q"], 0, *own), list(shared)
            for half in range(2 if op.params["gated"] else 1):
                base = half * kv_heads * group * head_dim
                reads.append(columns(of_q, base + first, base + last))
            if has_spans:
                write = part(part(args["partials"], 0, *own), 1, head, head + 1)
            else:
                write = columns(part(args["out"], 0, *own), first, last)
            cost = 2 * head_dim * (own[1] - own[0]) * _COST_POSITIONS
            coords = (head, 0, int(has_spans), packed(own))
            tiles.append(Tile(coords, tuple(reads), (write,), None, cost))
    return tiles


def shares(size: int, count: int) -> list[tuple[int, int]]:
    """[0, size) in so many parts."""
    return [(size * i // count, size * (i + 1) // count) for i in range(count)]


def packed(rows: tuple[int, int]) -> int:
    """A range of rows in one coordinate."""
    return rows[0] | rows[1] << 16


def _heads(op: Operator) -> tuple[int, int]:
    return int(op.params["kv_heads"]), int(op.params["head_dim"])


_OF_QUERIES = ("q", "out", "partials")
# Of attention's record, in whichever form.
PARAMS = (
    *("heads", "kv_heads", "head_dim", "page", "pages_per_slot", "scale", "eps", "cache_dtype"),
    *("window", "rope", "qk_norm_kind", "gated", "out_eps", "block", "spans", "splits"),
)
ATTENTION_ROWS = Body(
    name="attention_rows",
    args=(
        Arg("q", "r", optional=True),
        Arg("kv", "r", optional=True),
        Arg("k_cache", "r"),
        Arg("v_cache", "r"),
        Arg("page_table", "r"),
        Arg("rope", "r", optional=True),
        Arg("qk_norm", "r", optional=True),
        Arg("out", "w", optional=True),
        Arg("partials", "w", optional=True),
    ),
    params=PARAMS,
    tile=tile_rows,
    payload=True,
    ring=True,
)
ATTENTION_KV = replace(
    ATTENTION_ROWS,
    args=tuple(replace(a, access="w") if "cache" in a.name else a for a in ATTENTION_ROWS.args),
    tile=tile_kv,
)
