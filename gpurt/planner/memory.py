"""Memory: every buffer's place in the arena of its kind, and the packing of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpurt.body import Target
from gpurt.errors import GraphError
from gpurt.graph import Graph, Operator
from gpurt.plan import TWO_SETS, Memory, PlanBuffer, align_up


class BufferMap:
    """Which PlanBuffer an argument of an operator uses.

    The graph's buffers keep their indices; a weight that operators want in several packings gets a
    further PlanBuffer for each packing after the first.
    """

    def __init__(self, graph: Graph, target: Target) -> None:
        """Ask every body for the packing of its weights. Raises: GraphError."""
        self._graph = graph
        self.packings = [""] * len(graph.buffers)
        self.sources = list(range(len(graph.buffers)))
        self.stream_ends = [0] * len(graph.buffers)
        self._index: dict[tuple[int, str], int] = {}
        for op in graph.operators:
            for arg, region in op.args.items():
                if region.buffer.role == "weight":
                    self._place(op, arg, target)

    def of(self, op: Operator, arg: str, target: Target) -> int:
        """Index of the PlanBuffer bound to `arg`."""
        buffer = op.args[arg].buffer
        if buffer.role != "weight":
            return buffer.index
        return self._index[(buffer.index, _packing(op, arg, target))]

    def stream(self, index: int, end_bytes: int) -> None:
        """A task streams up to this byte: the packed buffer is at least as large."""
        self.stream_ends[index] = max(self.stream_ends[index], end_bytes)

    def _place(self, op: Operator, arg: str, target: Target) -> None:
        region, packing = op.args[arg], _packing(op, arg, target)
        if packing and region.bounds != region.buffer.whole.bounds:
            msg = f"{op.body.name} packs {region} as {packing}, a part of a weight"
            raise GraphError(f"{msg} - at {op.path} - make it a weight of its own")
        key = (region.buffer.index, packing)
        if key in self._index:
            return
        if any(index == region.buffer.index for index, _ in self._index):
            self._index[key] = len(self.packings)
            self.packings.append(packing)
            self.sources.append(region.buffer.index)
            self.stream_ends.append(0)
        else:
            self._index[key] = region.buffer.index
            self.packings[region.buffer.index] = packing

    def plan_buffers(
        self, payload: set[int], unused: set[int], packed_bytes: Mapping[int, int]
    ) -> tuple[PlanBuffer, ...]:
        """All buffers with their offsets. unused: indices of the graph's that have no memory.
        packed_bytes: sizes that packers state, by index.
        """
        buffers = self._graph.buffers
        ends: dict[Memory, int] = {}
        result = []
        for index, source in enumerate(self.sources):
            buffer, packing = buffers[source], self.packings[index]
            memory = "none" if source in unused else self._memory(source, payload)
            size = max(packed_bytes.get(index, buffer.size_bytes), self.stream_ends[index])
            offset = ends.get(memory, 0)
            ends[memory] = align_up(offset + size)
            name = buffer.name if index < len(buffers) else f"{buffer.name}@{packing or 'plain'}"
            result.append(
                PlanBuffer(
                    name,
                    buffer.shape,
                    buffer.dtype.name,
                    buffer.role,
                    packing,
                    size,
                    memory,
                    offset,
                    buffer.name,
                )
            )
        return tuple(result)

    def _memory(self, source: int, payload: set[int]) -> Memory:
        buffer = self._graph.buffers[source]
        if buffer is self._graph.sampled:
            return "step"
        if source in payload:
            return "symmetric_payload" if buffer.role == "symmetric" else "payload"
        return buffer.role


def payload_set_bytes(buffers: Sequence[PlanBuffer]) -> int:
    """Bytes between the two sets of payload buffers, and of symmetric ones."""
    ends = [b.offset_bytes + b.size_bytes for b in buffers if b.memory in TWO_SETS]
    return align_up(max(ends, default=0))


def _packing(op: Operator, arg: str, target: Target) -> str:
    return "" if op.body.packing is None else op.body.packing(op, arg, target)
