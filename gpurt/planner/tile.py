"""Tile: cuts an operator into draft tasks for a target. The only place that asks a body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpurt.body import Target, Tile
from gpurt.buffer import Region
from gpurt.errors import GraphError
from gpurt.graph import Operator
from gpurt.plan import (
    ADDRS_PER_TASK,
    PARAMS_PER_TASK,
    TASK_OWN_ROWS,
    TASK_PAYLOAD_IN,
    TASK_PAYLOAD_OUT,
    TASK_RING,
    PlanRegion,
    Policy,
)
from gpurt.planner import cost
from gpurt.planner.draft import DraftOp, DraftTask
from gpurt.planner.memory import BufferMap
from gpurt.wire import ADDR_SAMPLE_ROWS, row_table_rows, sample_rows_offset_bytes


def cut(op: Operator, target: Target) -> list[Tile]:
    """The body's tiles, or one that is the whole operator. Raises: GraphError if there is none."""
    if op.body.tile is None:
        return [Tile((0, 0, 0, 0), op.reads, op.writes)]
    tiles = op.body.tile(op, target)
    if op.rows is not None:
        tiles = [replace(tile, reads=(*tile.reads, op.rows)) for tile in tiles]
    if not tiles:
        msg = f"{op.body.name} gives 0 tiles for {target.kind}"
        raise GraphError(f"{msg} - at {op.path} - its tiler must return one or more")
    for kind, parts, wholes in (
        ("reads", {id(p): p for tile in tiles for p in tile.reads}, op.reads),
        ("writes", {id(p): p for tile in tiles for p in tile.writes}, op.writes),
    ):
        stray = next((p for p in parts.values() if not any(w.covers(p) for w in wholes)), None)
        if stray is not None:
            msg = f"a tile of {op.body.name} {kind} {stray}, which the operator does not"
            raise GraphError(f"{msg} - at {op.path} - declare it as an argument")
    return tiles


def draft_op(
    op: Operator, policy: Policy, target: Target, buffers: BufferMap, payload: set[int]
) -> DraftOp:
    """The operator without its tasks. Raises: GraphError if a record cannot hold it."""
    names = list(op.args) if op.body.is_user or not op.body.args else [a.name for a in op.body.args]
    room = ADDRS_PER_TASK if op.rows is None else ADDR_SAMPLE_ROWS
    while op.rows is not None and names and names[-1] not in op.args:
        names.pop()  # it would lie where the table does
    for what, count, limit in (
        ("arguments", len(names), room),
        ("parameters", len(op.params), PARAMS_PER_TASK),
    ):
        if count > limit:
            msg = f"{op.body.name} has {count} {what}, a task record holds {limit}"
            raise GraphError(f"{msg} - at {op.path} - join some of them or use two operators")
    addr: list[tuple[int, int] | None] = []
    mask = 0
    for position, name in enumerate(names):
        region = op.args.get(name)
        if region is None:
            addr.append(None)
            continue
        addr.append((buffers.of(op, name, target), region.offset_bytes))
        is_symmetric = region.buffer.role == "symmetric"
        writes = region in op.writes
        publishes = op.body.publishes or bool(op.params.get("y_ranks"))
        if is_symmetric and not (publishes if writes else op.body.ranks):
            msg = f"{op.body.name} {'writes' if writes else 'reads'} {region}, which is symmetric"
            raise GraphError(f"{msg} - at {op.path} - it cannot: see graphs/collectives.py")
        mask |= (is_symmetric or region.buffer.index in payload) << position
    flags = TASK_PAYLOAD_IN * any(r.buffer.index in payload for r in op.reads)
    flags |= TASK_PAYLOAD_OUT * any(r.buffer.index in payload for r in op.writes)
    flags |= TASK_RING * op.body.ring
    if op.rows is not None:
        flags |= TASK_OWN_ROWS
        table = op.rows.buffer
        addr += [None] * (room - len(addr))
        addr += [
            (table.index, sample_rows_offset_bytes(row_table_rows(table.shape[0]))),
            (table.index, 0),
        ]
    variant = op.body.variant
    return DraftOp(
        op.index,
        op.name,
        op.body.name if variant is None else variant(op, target),
        op.path,
        op.layer,
        policy,
        tuple(addr),
        tuple(op.params.values()),
        flags,
        mask,
        ranks=any(
            r.buffer.role == "symmetric" and r.buffer.index not in payload for r in op.writes
        ),
    )


def draft_tasks(
    op: Operator, drafted: DraftOp, tiles: Sequence[Tile], target: Target, buffers: BufferMap
) -> list[DraftTask]:
    """The tasks of `drafted`, without waits."""
    seen: dict[int, PlanRegion] = {}  # by identity: tiles share regions
    at = {
        region.buffer.index: buffers.of(op, name, target)
        for name, region in op.args.items()
        if region.buffer.role == "weight"
    }

    def plan_regions(regions: Sequence[Region]) -> tuple[PlanRegion, ...]:
        result = []
        for region in regions:
            known = seen.get(id(region))
            if known is None:
                index = region.buffer.index
                known = seen[id(region)] = (at.get(index, index), region.bounds)
            result.append(known)
        return tuple(result)

    tasks = []
    for tile in tiles:
        stream = None
        if tile.stream is not None:
            index = buffers.of(op, tile.stream.arg, target)
            stream = (index, tile.stream.offset_bytes, tile.stream.size_bytes)
            buffers.stream(index, tile.stream.offset_bytes + tile.stream.size_bytes)
        size_bytes = cost.tile_bytes(tile)
        tasks.append(
            DraftTask(
                drafted,
                tile.coords,
                plan_regions(tile.reads),
                plan_regions(tile.writes),
                stream=stream,
                cost_bytes=size_bytes,
                cost_ns=cost.task_ns(size_bytes, target),
            )
        )
    return tasks
