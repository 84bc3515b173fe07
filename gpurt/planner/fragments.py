"""Fragments: activations that lie in the order in which matvecs read them.

Rows side by side are what a graph means. A warp of a matvec of 16 rows reads some columns of eight
rows at a time, and from lines of L2 of which it takes all an SM gets 1.7 times the bytes (H200). So
where all operators that touch an activation can (`Body.fragments`), it lies that way
(device/bodies/fragments.cuh). Values are the same, and so are bits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

from gpurt.body import Target
from gpurt.buffer import Buffer
from gpurt.graph import Graph, Operator

TILE_ROWS = 8  # of a step in one mma
_ROWS = (TILE_ROWS, 2 * TILE_ROWS)  # of a buffer that may: whole tiles, as many as a warp takes
_CHUNK = 64  # columns


def ordered(graph: Graph, target: Target, left_out: set[int]) -> Graph:
    """The graph with their operators' parameters, a twin; `graph` itself if there are none."""
    if target.kind != "cuda":
        return graph
    uses: dict[int, list[tuple[Operator, str]]] = {}
    for op in graph.operators:
        if op.index not in left_out:
            for name, buffer in _touched(op):
                uses.setdefault(buffer, []).append((op, name))
    params: dict[int, dict[str, int]] = {}
    for number, found in uses.items():
        if _may(graph.buffers[number]) and all(_knows(op, name) for op, name in found):
            tiles = graph.buffers[number].shape[0] // TILE_ROWS
            for op, name in found:
                params.setdefault(op.index, {})[f"{name}_fragments"] = tiles
    if not params:
        return graph
    twin = copy.copy(graph)
    twin.operators = [
        replace(op, params={**op.params, **params[op.index]}) if op.index in params else op
        for op in graph.operators
    ]
    return twin


def _touched(op: Operator) -> Iterator[tuple[str, int]]:
    """An operator's arguments and their buffers; what no argument names is one without a name."""
    for name, region in op.args.items():
        yield name, region.buffer.index
    named = {region.buffer.index for region in op.args.values()}
    for region in (*op.reads, *op.writes):
        if region.buffer.index not in named:
            yield "", region.buffer.index


def _may(buffer: Buffer) -> bool:
    return (
        buffer.role == "activation"
        and len(buffer.shape) == 2
        and buffer.shape[0] in _ROWS
        and buffer.shape[1] % _CHUNK == 0
    )


def _knows(op: Operator, name: str) -> bool:
    region = op.args.get(name)
    return (
        region is not None
        and region.bounds == region.buffer.whole.bounds
        and op.body.fragments is not None
        and op.body.fragments(op, name)
    )
