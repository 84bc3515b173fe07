"""How a graph's weights are read from a checkpoint: stacked, interleaved, converted, folded.

What is read is a function: a plan's weights are read one by one, when it is loaded. Knows no model
and no file format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.buffer import DType, f32
from gpurt.errors import GraphError
from gpurt.graphs.ops.dtypes import to_float32, to_storage
from gpurt.graphs.parts import each_part

if TYPE_CHECKING:
    from gpurt.buffer import Buffer
    from gpurt.graph import Graph
    from gpurt.loaders.model import WeightSource

Load = Callable[[], NDArray[Any]]
# One block of 16 elements. As one word, codes are copied five times as fast as byte by byte.
_NVFP4_BLOCK = np.dtype([("codes", "<u8"), ("scale", "u1")])


def converted(source: WeightSource, dtype: DType) -> NDArray[Any]:
    """A tensor as `dtype`; a view of the file where it is stored so."""
    stored = source.load()
    if source.dtype.name == dtype.name:
        return stored
    return to_storage(to_float32(stored, source.dtype), dtype)


def cut(source: WeightSource, axis: int, index: int, count: int) -> WeightSource:
    """Part `index` of `count` equal ones of a tensor along an axis, still read lazily.

    Raises: GraphError if the parts would not be equal.
    """
    size = source.shape[axis]
    dtype = source.dtype
    block = dtype.block if axis == len(source.shape) - 1 else 1
    if size % (count * block):
        msg = f"axis {axis} of {source.name} {list(source.shape)} has no {count} equal parts"
        msg += f" of whole blocks of {block}" if block > 1 else ""
        raise GraphError(f"{msg} - at tp_size - use a divisor of {size // block}")
    width = size // count
    stored = width // block * dtype.block_bytes if block > 1 else width
    part = (slice(None),) * axis + (slice(index * stored, (index + 1) * stored),)
    shape = (*source.shape[:axis], width, *source.shape[axis + 1 :])
    return replace(source, shape=shape, load=lambda: source.load()[part])


def head_part(heads: int, rank: int, ranks: int) -> tuple[int, int]:
    """(index, count): which of how many equal parts of the K/V heads a rank has. With more ranks
    than heads neighbours have the same one, that of their query heads. One number must divide the
    other.
    """
    count = min(heads, ranks)
    return rank * count // ranks, count


def cut_halves(source: WeightSource, index: int, count: int) -> WeightSource:
    """[E, 2 N, K]: part `index` of `count` of the first N rows, then of the second N.

    Raises: GraphError if N has no `count` equal parts.
    """
    experts, rows, k = source.shape
    if rows % (2 * count):
        msg = f"rows of {source.name} {list(source.shape)} have no two times {count} equal parts"
        raise GraphError(f"{msg} - at tp_size - use a divisor of {rows // 2}")
    width = rows // 2 // count

    def load() -> NDArray[Any]:
        halves = source.load().reshape(experts, 2, rows // 2, -1)
        part = halves[:, :, index * width : (index + 1) * width]
        return part.reshape(experts, 2 * width, -1)

    return replace(source, shape=(experts, 2 * width, k), load=load)


def stack(sources: Sequence[WeightSource], dtype: DType, *, interleaved: bool = False) -> Load:
    """Matrices one after another, or row by row in turn."""

    def load() -> NDArray[Any]:
        parts = [converted(source, dtype) for source in sources]
        if len(parts) == 1:
            return parts[0]
        if interleaved:
            return np.stack(parts, axis=1).reshape(-1, parts[0].shape[1])
        return np.concatenate(parts)

    return load


def stacked(
    graph: Graph,
    name: str,
    sources: Sequence[WeightSource],
    dtype: DType | None,
    *,
    interleaved: bool = False,
) -> Buffer:
    """A weight of matrices as `stack` has them. dtype None: as stored; mixed ones are all read as
    float32: exact.
    """
    kinds = {source.dtype.name for source in sources}
    kind = dtype or (sources[0].dtype if len(kinds) == 1 else f32)
    shape = [sum(source.shape[0] for source in sources), sources[0].shape[1]]
    return graph.weight(name, shape, kind, stack(sources, kind, interleaved=interleaved))


def stack_experts(experts: Sequence[Sequence[WeightSource]], dtype: DType) -> Load:
    """[E, N, K] from one list of matrices an expert, whose rows are taken in turn."""

    def load() -> NDArray[Any]:
        turns, (rows, k) = len(experts[0]), experts[0][0].shape
        out = np.empty((len(experts), rows * turns, k), dtype.storage)

        def fill(expert: int) -> None:
            for turn, part in enumerate(experts[expert]):
                out[expert, turn::turns] = converted(part, dtype)

        each_part(len(experts), fill)
        return out

    return load


def expert_rows(source: WeightSource, dtype: DType, *, halves: bool) -> Load:
    """[E, N, K] as `dtype`. halves: the first half of an expert's rows and the second are taken
    row by row in turn: gate and up, as swiglu wants them.
    """
    if not halves:
        return lambda: converted(source, dtype)

    def load() -> NDArray[Any]:
        stored = source.load()
        same = source.dtype.name == dtype.name
        out = np.empty(stored.shape, dtype.storage)

        def fill(expert: int) -> None:
            rows = stored[expert]
            part = rows if same else to_storage(to_float32(rows, source.dtype), dtype)
            out[expert, 0::2], out[expert, 1::2] = np.split(part, 2)

        each_part(len(stored), fill)
        return out

    return load


def nvfp4_rows(codes: WeightSource, scales: WeightSource, *, halves: bool) -> Load:
    """[E, N, K] in nvfp4 blocks from ModelOpt's codes [E, N, K/2] and scales [E, N, K/16]."""

    def load() -> NDArray[Any]:
        stored, blocks = codes.load(), scales.load()
        experts, rows, count = blocks.shape
        out = np.empty((experts, rows, count), _NVFP4_BLOCK)
        turns = [slice(0, None, 2), slice(1, None, 2)] if halves else [slice(None)]

        def fill(expert: int) -> None:
            code_parts = np.split(stored[expert].view("<u8"), len(turns))
            scale_parts = np.split(blocks[expert], len(turns))
            for turn, code_part, scale_part in zip(turns, code_parts, scale_parts, strict=True):
                out["codes"][expert, turn] = code_part
                out["scale"][expert, turn] = scale_part

        each_part(experts, fill)
        return out.view(np.uint8).reshape(experts, rows, -1)

    return load


def pair_of_scales(source: WeightSource) -> Load:
    """[E, 2] f32 from [E, 2], or from [E] twice."""

    def load() -> NDArray[Any]:
        stored = converted(source, f32)
        return stored if stored.ndim == 2 else np.stack([stored, stored], axis=1)

    return load


def one_plus(source: WeightSource) -> Load:
    """A gain that the checkpoint stores around zero."""
    return lambda: (1 + converted(source, f32)).astype(np.float32)


def rotary_table(frequencies: NDArray[np.float32], context: int) -> NDArray[np.float32]:
    """[context, D]: cosines of D/2 angles, then their sines. Source: RoFormer, 2104.09864."""
    angles = np.arange(context, dtype=np.float32)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def rotary_frequencies(theta: float, head_dim: int) -> NDArray[np.float32]:
    """theta^(-2i/D) for i < D/2."""
    half = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.asarray(1.0 / np.float32(theta) ** half, np.float32)
