"""Direct: operators that store their results where a `publish` would copy them, on every rank.

A publish moves what one operator made, a hop of its own. Where nobody else reads that, the operator
stores to all ranks itself, and the publish is left out, as an operator of a form that was not
chosen. Bits are the same: who stores does not add. Only for bodies on cuda that can
(`Body.published`): the host's publish costs a copy, no hop.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from gpurt.body import Target
from gpurt.graph import Graph, Operator

_COLUMNS = 8  # rows of parts are made of whole pairs of granules, wherever they lie
_BY_WORD = ("collect",)  # bodies that store a word at a time where they are not


def directed(graph: Graph, target: Target, left_out: set[int]) -> tuple[Graph, set[int]]:
    """The graph with such operators, a twin, and the indices of those left out, publishes too."""
    if target.kind != "cuda":
        return graph, left_out
    readers: dict[int, list[Operator]] = {}
    writers: dict[int, list[Operator]] = {}
    for op in graph.operators:
        if op.index not in left_out:
            for region in op.reads:
                readers.setdefault(region.buffer.index, []).append(op)
            for region in op.writes:
                writers.setdefault(region.buffer.index, []).append(op)
    made: dict[int, Operator] = {}
    dropped: set[int] = set()
    for op in graph.operators:
        if op.index in left_out or op.body.name != "publish":
            continue
        part = op.args["part"].buffer.index
        if writers.get(part, ())[1:] or readers[part] != [op] or part not in writers:
            continue
        (maker,) = writers[part]
        if _may_publish(maker, op):
            made[maker.index] = _publishing(maker, op)
            dropped.add(op.index)
    if not made:
        return graph, left_out
    twin = copy.copy(graph)
    twin.operators = [made.get(op.index, op) for op in graph.operators]
    return twin, left_out | dropped


def _may_publish(maker: Operator, publish: Operator) -> bool:
    region, width = publish.args["part"], int(publish.params["width"])
    per_row = region.buffer.per_row or 1
    same_rows = maker.rows == publish.rows and int(publish.params["per_row"]) == per_row
    return (
        maker.body.published is not None
        and same_rows
        and bool(maker.params.get("sampled")) == bool(publish.params["sampled"])
        and region.bounds == region.buffer.whole.bounds
        and region.buffer.role == "activation"
        and region.buffer.dtype.name == "f32"
        and (maker.body.name in _BY_WORD or width % _COLUMNS == 0)
        and maker.body.published(maker, width if publish.params["scatter"] else 0)
    )


def _publishing(maker: Operator, publish: Operator) -> Operator:
    slots, width = publish.args["slots"], int(publish.params["width"])
    stride = int(publish.params["stride"])
    beside = bool(publish.params["beside"])
    params = {
        "y_ranks": int(publish.params["ranks"]),
        "y_stride": stride,
        "y_part": width if beside else stride * slots.buffer.shape[-2],
        "y_share": width if publish.params["scatter"] else 0,
    }
    writes = tuple(slots if r == maker.args["y"] else r for r in maker.writes)
    return replace(
        maker, args={**maker.args, "y": slots}, params={**maker.params, **params}, writes=writes
    )
