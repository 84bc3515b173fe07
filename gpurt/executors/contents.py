"""Contents: the bytes that a buffer starts with, from whatever its `source` is. Pure numpy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.arrays import as_array
from gpurt.buffer import DTYPES, Buffer
from gpurt.errors import GpurtError, GraphError
from gpurt.executors.packed_cache import PackedFile
from gpurt.graph import Graph
from gpurt.plan import Plan, PlanBuffer


def source_array(buffer: Buffer) -> NDArray[Any] | None:
    """The source as a C-contiguous array in the buffer's storage dtype; None without a source.

    A view of the caller's memory where layout and dtype allow. Block formats are uint8 arrays of
    stored bytes. Raises: GraphError if it does not fit the buffer.
    """
    source = buffer.source
    if source is None:
        return None
    if callable(source) and not hasattr(source, "__dlpack__"):
        source = source()
    try:
        array = as_array(source)
    except GpurtError as error:
        raise GraphError(f"{buffer} cannot be filled: {error}") from error
    if array.dtype != buffer.dtype.storage:
        array = _convert(buffer, array)
    array = np.ascontiguousarray(array)
    if array.nbytes != buffer.size_bytes:
        what = f"the source of {buffer} has shape {list(array.shape)}, {array.nbytes} bytes"
        raise GraphError(f"{what} - at {buffer.name} - it needs {buffer.size_bytes} bytes")
    return array


def packed_array(planned: PlanBuffer, array: NDArray[Any]) -> NDArray[np.uint8]:
    """A weight's stored bytes in the layout that the plan asks for, as uint8 [size_bytes]."""
    if not planned.packing:
        return array.reshape(-1).view(np.uint8)
    from gpurt.graphs.ops.packing import pack

    return pack(planned.packing, array, planned.shape, DTYPES[planned.dtype])


def contents_of(plan: Plan, graph: Graph) -> PackedContents:
    """The content of all buffers of a plan that begin with one, from the graph's cache if it has
    one.
    """
    sources = {buffer.name: buffer for buffer in graph.buffers}
    filled = [b for b in plan.buffers if b.memory != "step" and (b.source or b.name) in sources]
    weights = [b for b in filled if b.memory == "weight"]
    file = None if graph.packed is None else graph.packed.open(plan, weights)
    return PackedContents(filled, sources, file)


class PackedContents:
    """The packed content of a plan's buffers, one after another. Buffers that share one source and
    one packing are read and packed once, and their bytes kept until the last of them was taken.
    With a file of packed weights, weights that a function makes come from it, or go into it.
    Where copies are cheap, `first` says which buffer to copy instead.
    """

    def __init__(
        self,
        planned: Sequence[PlanBuffer],
        sources: Mapping[str, Buffer],
        file: PackedFile | None = None,
    ) -> None:
        """planned: what will be taken. sources: the graph's buffers by name."""
        self._sources, self._file = sources, file
        self.mapped: set[str] = set()  # taken from the file, where they lie
        self._left = Counter(self._key(p) for p in planned)
        self._kept: dict[tuple[int, str, int], NDArray[np.uint8]] = {}
        self._taken: dict[tuple[int, str, int], PlanBuffer] = {}

    def first(self, planned: PlanBuffer) -> PlanBuffer | None:
        """A buffer that was taken before and has the same bytes, to be copied instead of taking
        this one. None: take it.
        """
        key = self._key(planned)
        taken = None if self._file is not None else self._taken.get(key)
        if taken is not None:
            self._left[key] -= 1
            self._kept.pop(key, None)  # whoever copies one, copies all
        return taken

    def take(self, planned: PlanBuffer) -> NDArray[np.uint8] | None:
        """The bytes of one buffer; None without a source. Raises: as `source_array`."""
        buffer = self._sources[planned.source or planned.name]
        file = self._file if planned.memory == "weight" and callable(buffer.source) else None
        found = file.take(planned.name) if file is not None else None
        if found is not None:
            self.mapped.add(planned.name)
            return found
        key = self._key(planned)
        self._left[key] -= 1
        self._taken[key] = planned
        data = self._kept.pop(key, None)
        if data is None:
            array = source_array(buffer)
            data = None if array is None else packed_array(planned, array)
        if data is not None and self._left[key] > 0:
            self._kept[key] = data
        if data is not None and file is not None:
            file.put(planned.name, data)
        return data

    def close(self) -> None:
        """All was taken."""
        if self._file is not None:
            self._file.close()

    def _key(self, planned: PlanBuffer) -> tuple[int, str, int]:
        # A buffer without a source shares with nobody: None is one object.
        buffer = self._sources[planned.source or planned.name]
        shared = buffer if buffer.source is None else buffer.source
        return id(shared), planned.packing, planned.size_bytes


def _convert(buffer: Buffer, array: NDArray[Any]) -> NDArray[Any]:
    storage = buffer.dtype.storage
    if buffer.dtype.name == "bf16" and array.dtype.kind == "f":
        from gpurt.graphs.ops.dtypes import to_bf16

        return to_bf16(array.astype(np.float32))
    if buffer.dtype.block > 1 or not np.can_cast(array.dtype, storage, "same_kind"):
        what = f"the source of {buffer} has dtype {array.dtype}"
        raise GraphError(f"{what} - at {buffer.name} - convert it to {storage}")
    return array.astype(storage)
