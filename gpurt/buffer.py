"""Buffer: memory with a shape, a dtype and a role; Region: a box of a Buffer. Host only, no GPU.

Roles: `weight` is never written while the kernel is resident, so it may be fetched early;
`activation` lives inside a step; `state` outlives a step (KV cache, inputs, sampler); `symmetric`
lives inside a step, too, and every rank has one, which all ranks write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from gpurt.errors import GraphError

Role = Literal["weight", "activation", "state", "symmetric"]


@dataclass(frozen=True)
class DType:
    """An element type. Block formats store `block` elements along the last axis in `block_bytes`.

    `storage` is the numpy dtype of one stored unit: numpy has no bfloat16, so bf16 is kept as
    uint16 bit patterns, and block formats as uint8.
    """

    name: str
    block: int
    block_bytes: int
    storage: np.dtype[Any]

    def row_bytes(self, elements: int) -> int:
        """Bytes of one row of `elements`. Raises: GraphError if blocks do not divide it."""
        if elements % self.block:
            msg = f"a row of {elements} {self.name} elements is not a multiple of {self.block}"
            raise GraphError(f"{msg} - at dtype {self.name} - pad the row or use another dtype")
        return elements // self.block * self.block_bytes

    def __str__(self) -> str:
        """The short name, as in plans and errors."""
        return self.name


f32 = DType("f32", 1, 4, np.dtype(np.float32))
f16 = DType("f16", 1, 2, np.dtype(np.float16))
bf16 = DType("bf16", 1, 2, np.dtype(np.uint16))
i32 = DType("i32", 1, 4, np.dtype(np.int32))
u32 = DType("u32", 1, 4, np.dtype(np.uint32))
u8 = DType("u8", 1, 1, np.dtype(np.uint8))
q4_1 = DType("q4_1", 32, 20, np.dtype(np.uint8))  # GGUF: f16 scale, f16 minimum, 32 4-bit codes
q8_0 = DType("q8_0", 32, 34, np.dtype(np.uint8))  # GGUF: f16 scale, 32 int8 codes
# 16 e2m1 codes, the even element in the low nibble, then their e4m3 scale; a second-level scale is
# a buffer of its own
nvfp4 = DType("nvfp4", 16, 9, np.dtype(np.uint8))
# The scales of nvfp4 in checkpoints; of buffers, only caches of keys and values.
e4m3 = DType("e4m3", 1, 1, np.dtype(np.uint8))
DTYPES = {d.name: d for d in (f32, f16, bf16, i32, u32, u8, q4_1, q8_0, nvfp4, e4m3)}


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory of a Graph. Made by `Graph.weight/activation/state/input`, never directly.

    `source` (weights, and states that do not begin as zero) is an array, any object with
    `__dlpack__`, or a function that returns one; it is read once, when an executor loads the plan.
    per_row: if not 0, axis `row_axis` has this many elements for each row of a step.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    role: Role
    index: int
    source: Any | Callable[[], Any] = field(default=None, repr=False)
    per_row: int = 0

    @property
    def row_axis(self) -> int:
        """Which axis grows with the rows of a step: the one before columns."""
        return max(0, len(self.shape) - 2)

    @property
    def size_bytes(self) -> int:
        """Bytes when stored row-major without padding."""
        rows = int(np.prod(self.shape[:-1], dtype=np.int64)) if len(self.shape) > 1 else 1
        return rows * self.dtype.row_bytes(self.shape[-1])

    @property
    def whole(self) -> Region:
        """The Region that covers all of the buffer."""
        return Region(self, tuple((0, n) for n in self.shape))

    def __getitem__(self, key: slice | int | tuple[slice | int, ...]) -> Region:
        """`x[0:16]`, `x[:, 64:128]`: a Region. Raises: GraphError if it leaves the buffer."""
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > len(self.shape):
            msg = f"{self.name} has {len(self.shape)} axes, the region names {len(keys)}"
            raise GraphError(f"{msg} - at {self.name}{list(keys)} - name fewer axes")
        bounds = []
        for axis, size in enumerate(self.shape):
            part = keys[axis] if axis < len(keys) else slice(None)
            if isinstance(part, int):
                part = slice(part, part + 1)
            low = 0 if part.start is None else part.start
            high = size if part.stop is None else part.stop
            if part.step not in (None, 1) or not 0 <= low < high <= size:
                msg = f"{low}:{high} is no part of axis {axis}, which has {size} elements"
                raise GraphError(f"{msg} - at {self.name} - use 0 <= start < stop <= {size}")
            bounds.append((low, high))
        return Region(self, tuple(bounds))

    def __str__(self) -> str:
        """As in `x [16, 576] bf16 activation`."""
        return f"{self.name} {list(self.shape)} {self.dtype} {self.role}"


@dataclass(frozen=True)
class Region:
    """A box of a Buffer: one half-open range an axis."""

    buffer: Buffer
    bounds: tuple[tuple[int, int], ...]

    def overlaps(self, other: Region) -> bool:
        """Whether the two share an element."""
        return self.buffer is other.buffer and all(
            a < d and c < b for (a, b), (c, d) in zip(self.bounds, other.bounds, strict=True)
        )

    def covers(self, other: Region) -> bool:
        """Whether every element of `other` lies in this region."""
        return self.buffer is other.buffer and all(
            a <= c and d <= b for (a, b), (c, d) in zip(self.bounds, other.bounds, strict=True)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along each axis."""
        return tuple(b - a for a, b in self.bounds)

    @property
    def offset_bytes(self) -> int:
        """Bytes from the buffer's start to the region's first element (row-major)."""
        offset = 0
        for axis, (low, _) in enumerate(self.bounds):
            inner = self.buffer.shape[axis + 1 :]
            if inner:
                rows = int(np.prod(inner[:-1], dtype=np.int64))
                offset += low * rows * self.buffer.dtype.row_bytes(inner[-1])
            else:
                offset += self.buffer.dtype.row_bytes(low)
        return offset

    def __str__(self) -> str:
        """As in `x[0:16, 64:128]`."""
        return f"{self.buffer.name}[{', '.join(f'{a}:{b}' for a, b in self.bounds)}]"
