"""Muse Spark at its released size, with made-up weights: read lazily, one tensor at a time.

For benches and for checks at full width. Codes are random bits; scales are such that activations
keep the size that the real ones have: matrices have a standard deviation of K^-0.5.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.buffer import DTYPES, bf16, e4m3, f32
from gpurt.graphs.muse_spark import MuseSparkConfig
from gpurt.graphs.ops.dtypes import to_bf16
from gpurt.loaders.model import WeightSource

_LAYERS = 62
_LOCAL = tuple((_LAYERS - 1 - layer) % 4 != 0 for layer in range(_LAYERS))
# A tensor's rows are windows of one run of numbers, each this far behind the one before: a whole
# layer's experts are made in a second, and no two rows are equal.
_ROW_SHIFT = 64
_E2M1_RMS = 2.9  # of random codes
_SCALE_RMS = 0.55  # of the block scales below

RELEASED = MuseSparkConfig(
    hidden=8192,
    layers=_LAYERS,
    heads=128,
    kv_heads=16,
    head_dim=64,
    vocab=202048,
    context=1048576,
    eps=1e-5,
    post_eps=1e-8,
    thetas=tuple(500000.0 if local else 0.0 for local in _LOCAL),
    windows=tuple(2048 if local else 0 for local in _LOCAL),
    sparse=(True,) * _LAYERS,
    qk_scale=5.4730064863875,
    output_multiplier=0.1767766952966369,
    softcap=20.0,
    gate_temperature=0.3,
    intermediate=16384,
    experts=256,
    top_k=8,
    moe_hidden=4096,
    moe_intermediate=4096,
    quantised=frozenset(range(1, _LAYERS - 1)),  # the checkpoint keeps the ends in bf16
)


def layers_of(config: MuseSparkConfig, first: int, count: int) -> MuseSparkConfig:
    """`config` cut to some of its layers, numbered from 0 again."""
    kept = range(first, first + count)
    return replace(
        config,
        layers=count,
        thetas=tuple(config.thetas[i] for i in kept),
        windows=tuple(config.windows[i] for i in kept),
        sparse=tuple(config.sparse[i] for i in kept),
        quantised=frozenset(i - first for i in kept if i in config.quantised),
    )


def made_up(config: MuseSparkConfig) -> dict[str, WeightSource]:
    """A weight for every tensor of a config: the same numbers for the same name."""
    dtypes = config.tensor_dtypes()
    return {
        name: _source(name, shape, dtypes.get(name)) for name, shape in config.tensors().items()
    }


def _source(name: str, shape: tuple[int, ...], stored: str | None) -> WeightSource:
    if stored == "u8":
        return WeightSource(name, DTYPES["u8"], shape, lambda: _rows(_codes(name, shape), shape))
    if stored == "e4m3":
        # 0x28 to 0x37: from 0.25 to 0.94, never zero and never NaN
        return WeightSource(
            name, e4m3, shape, lambda: _rows(_codes(name, shape) % 16 + np.uint8(0x28), shape)
        )
    if name.endswith("_weight_scale_2"):
        second = 1 / (_E2M1_RMS * _SCALE_RMS * 4096**0.5)
        return WeightSource(name, f32, shape, lambda: np.full(shape, second, np.float32))
    if len(shape) == 1 or name.endswith("mlp.gate.weight"):
        return WeightSource(name, f32, shape, lambda: _rows(_normal(name, shape), shape))
    return WeightSource(name, bf16, shape, lambda: _rows(to_bf16(_normal(name, shape)), shape))


def _normal(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    spread = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
    numbers = _generator(name).standard_normal(_run(shape), np.float32)
    return numbers * np.float32(spread)


def _codes(name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return _generator(name).integers(0, 256, _run(shape), np.uint8)


def _run(shape: tuple[int, ...]) -> int:
    """Numbers that all rows of a tensor need."""
    return shape[-1] + (math.prod(shape[:-1]) - 1) * _ROW_SHIFT


def _rows(run: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    rows = np.lib.stride_tricks.as_strided(
        run,
        (math.prod(shape[:-1]), shape[-1]),
        (_ROW_SHIFT * run.itemsize, run.itemsize),
        writeable=False,
    )
    return rows.reshape(shape) if len(shape) < 3 else _split(rows, shape)


def _split(rows: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """[E, N, K] of [E * N, K] without a copy, which a reshape of overlapping rows may be."""
    experts, n, k = shape
    step, item = rows.strides
    return np.lib.stride_tricks.as_strided(
        rows, (experts, n, k), (n * step, step, item), writeable=False
    )


def _generator(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))
