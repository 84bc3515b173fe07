"""Made-up weights: any model's graph at its true size, without a checkpoint.

Every matrix of one shape has the same content, made once from a seed: it is packed once and lies
in memory as often as the model has it. Numbers are such that activations keep their size: a
matrix has a standard deviation of K^-0.5. Rows are windows of one run of numbers, so that a
gigabyte is made in a second and no two rows are equal.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.buffer import DTYPES, DType, bf16, e4m3, f32
from gpurt.graph import Graph
from gpurt.graphs.ops.dtypes import to_bf16, to_storage
from gpurt.loaders.model import ModelConfig, WeightSource

_MATRICES = ("w", "table")  # arguments of the bodies that read them
# Each row begins this far behind the one before.
_ROW_SHIFT = 64
# Scales of nvfp4 blocks: e4m3 from 0.25 to 0.94, never zero and never NaN.
_SCALE_FIRST, _SCALE_COUNT = 0x28, 16
_E2M1_RMS = 2.9  # of random codes
_SCALE_RMS = 0.55  # of the block scales above


def weights(config: ModelConfig) -> dict[str, WeightSource]:
    """A weight for every tensor of a config: the same numbers for the same name."""
    dtypes = config.tensor_dtypes()
    return {
        name: _source(name, shape, dtypes.get(name)) for name, shape in config.tensors().items()
    }


def share_matrices(graph: Graph) -> None:
    """Give all matrices of one shape and dtype one source, which makes their content when asked."""
    sources: dict[tuple[tuple[int, ...], str], Callable[[], NDArray[Any]]] = {}
    for op in graph.operators:
        for name in _MATRICES:
            if name not in op.args or op.args[name].buffer.role != "weight":
                continue  # a table of rows is no matrix
            buffer = op.args[name].buffer
            key = buffer.shape, buffer.dtype.name
            source = sources.setdefault(key, partial(matrix, buffer.shape, buffer.dtype))
            graph.refill(buffer, source)


def matrix(shape: tuple[int, ...], dtype: DType) -> NDArray[Any]:
    """A made-up matrix as it is stored: the same for the same shape and dtype; read-only."""
    name = f"{dtype.name} {shape}"
    if dtype.name == "nvfp4":
        return _nvfp4(name, shape, dtype)
    numbers = _normal(name, shape)
    return _rows(numbers if dtype is f32 else to_storage(numbers, dtype), shape)


def nvfp4_scale(k: int) -> float:
    """The second-level scale with which a made-up nvfp4 matrix has a deviation of k^-0.5."""
    return 1 / (_E2M1_RMS * _SCALE_RMS * math.sqrt(k))


# ---- helpers ---------------------------------------------------------------------------------
def _source(name: str, shape: tuple[int, ...], stored: str | None) -> WeightSource:
    if stored == "u8":
        return WeightSource(name, DTYPES["u8"], shape, lambda: _rows(_codes(name, shape), shape))
    if stored == "e4m3":
        return WeightSource(name, e4m3, shape, lambda: _rows(_scales(name, shape), shape))
    if name.endswith("_weight_scale_2"):
        second = nvfp4_scale(4096)
        return WeightSource(name, f32, shape, lambda: np.full(shape, second, np.float32))
    if len(shape) == 1:
        return WeightSource(name, f32, shape, lambda: _rows(_normal(name, shape), shape))
    return WeightSource(name, bf16, shape, lambda: _rows(to_bf16(_normal(name, shape)), shape))


def _nvfp4(name: str, shape: tuple[int, ...], dtype: DType) -> NDArray[np.uint8]:
    blocks = math.prod(shape) // dtype.block
    # One expert's worth of blocks, repeated with a shift: random bits all the same.
    out = np.empty((blocks, dtype.block_bytes), np.uint8)
    part = min(blocks, 1 << 20)
    codes = _codes(name, (part, dtype.block_bytes), shift=dtype.block_bytes)
    codes = codes[: part * dtype.block_bytes].reshape(part, dtype.block_bytes)
    codes[:, -1] = codes[:, -1] % _SCALE_COUNT + np.uint8(_SCALE_FIRST)
    for begin in range(0, blocks, part):
        out[begin : begin + part] = np.roll(codes, begin // part, axis=0)[: blocks - begin]
    return out.reshape(*shape[:-1], -1)


def _normal(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    spread = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
    return _generator(name).standard_normal(_run(shape), np.float32) * np.float32(spread)


def _codes(name: str, shape: tuple[int, ...], shift: int = _ROW_SHIFT) -> NDArray[np.uint8]:
    return _generator(name).integers(0, 256, _run(shape, shift), np.uint8)


def _scales(name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return _codes(name, shape) % np.uint8(_SCALE_COUNT) + np.uint8(_SCALE_FIRST)


def _run(shape: tuple[int, ...], shift: int = _ROW_SHIFT) -> int:
    """Numbers that all rows of a matrix need."""
    return shape[-1] + (math.prod(shape[:-1]) - 1) * shift


def _rows(run: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """`shape`, its rows windows of `run`, without a copy."""
    strides, step = [run.itemsize], _ROW_SHIFT * run.itemsize
    for extent in reversed(shape[:-1]):
        strides.insert(0, step)
        step *= extent
    return np.lib.stride_tricks.as_strided(run, shape, strides, writeable=False)


def _generator(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))
