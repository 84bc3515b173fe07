"""Waits: from what a tile must follow to the few groups it waits for.

Transitive reduction: going back in time, a producer that must have ended before something already
waited for has ended is not waited for. What precedes a group is remembered for the last
REACH_GROUPS groups, so memory is bounded; a forgotten one costs at most a wait too many.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpurt.plan import WAITS_PER_TASK
from gpurt.planner.draft import Draft, DraftOp, DraftTask, Group, bits_of
from gpurt.planner.hazards import Needs

REACH_GROUPS = 8192

_Parts = tuple[tuple[DraftOp, int], ...]  # (producer, its tiles), latest first


class Waits:
    """Turns the needs of one operator after another into waits."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._reach: dict[tuple[int, int], int] = {}

    def waits(self, op: DraftOp, needs: Sequence[Needs]) -> list[tuple[Group, ...]]:
        """The groups each tile waits for, WAITS_PER_TASK at most; may append `noop` joins."""
        by_need: dict[_Parts, tuple[Group, ...]] = {}
        by_parts: dict[_Parts, tuple[Group, ...]] = {}
        joins = _Joins(self._draft, op)
        result = []
        for need in needs:
            key = tuple(sorted(need.items(), key=lambda item: -item[0].begin))
            if key not in by_need:
                parts = self._reduce(key)
                if len(parts) > WAITS_PER_TASK:
                    whole = self._reduce(tuple((p, p.all_tiles) for p, _ in key))
                    parts = whole if len(whole) <= WAITS_PER_TASK else parts
                if parts not in by_parts:
                    by_parts[parts] = joins.at_most(tuple(p.group(t) for p, t in parts))
                by_need[key] = by_parts[parts]
            result.append(by_need[key])
        return result

    def reaches(self, op: DraftOp, needs: Needs) -> bool:
        """Whether all of `needs` has ended when the one task of `op` has."""
        known = self._reached(op, op.all_tiles)
        return all(tiles << p.begin & ~known == 0 for p, tiles in needs.items())

    def _reduce(self, parts: _Parts) -> _Parts:
        known, kept = 0, []
        for producer, tiles in parts:
            bits = tiles << producer.begin
            if bits & known == bits:
                continue
            kept.append((producer, tiles))
            known |= self._reached(producer, tiles)
        return tuple(kept)

    def _reached(self, producer: DraftOp, tiles: int) -> int:
        """Bitset of tasks that have ended when all of `tiles` have, those among them."""
        key = (producer.index, tiles)
        known = self._reach.get(key)
        if known is not None:
            return known
        first = producer.begin
        if tiles == producer.all_tiles:
            tasks = self._draft.tasks[first : producer.end]
        else:
            tasks = [self._draft.tasks[first + i] for i in bits_of(tiles)]
        known = tiles << first
        # Tiles with equal needs share one tuple of waits.
        for waits in {id(task.waits): task.waits for task in tasks}.values():
            for group in waits:
                before = self._reach.get((group.op.index, group.tiles))
                known |= group.tiles << group.op.begin if before is None else before
        if len(self._reach) >= REACH_GROUPS:
            del self._reach[next(iter(self._reach))]
        self._reach[key] = known
        return known


class _Joins:
    """Generated `noop` tasks in front of an operator; each waits for four groups."""

    def __init__(self, draft: Draft, op: DraftOp) -> None:
        self._draft, self._for = draft, op
        self._op: DraftOp | None = None
        self._made: dict[tuple[int, ...], Group] = {}

    def at_most(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        """`groups`, or joins of them: WAITS_PER_TASK at most."""
        while len(groups) > WAITS_PER_TASK:
            head, rest = groups[:WAITS_PER_TASK], groups[WAITS_PER_TASK:]
            groups = (*rest, self._join(head))
        return groups

    def _join(self, groups: tuple[Group, ...]) -> Group:
        key = tuple(id(g) for g in groups)
        if key not in self._made:
            op = self._op or self._start()
            self._draft.tasks.append(DraftTask(op, (0, 0, 0, 0), waits=groups))
            op.end += 1
            op.signal_counts.append(0)
            self._made[key] = op.group(1 << (op.end - op.begin - 1))
        return self._made[key]

    def _start(self) -> DraftOp:
        joined = self._for
        self._op = DraftOp(
            self._draft.next_generated(),
            f"{joined.name}.join",
            "noop",
            f"{joined.path}.join",
            joined.layer,
            joined.policy,
        )
        self._draft.append(self._op, [])
        return self._op
