"""A Llama of two layers with random weights: all built-in bodies, steps of some 50 us."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Target
from gpurt.buffer import DTYPES
from gpurt.graph import Graph
from gpurt.graphs.llama import LlamaConfig, build
from gpurt.graphs.ops.dtypes import to_bf16, to_float32

CONFIG = LlamaConfig(
    architecture="llama",
    hidden=256,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=64,
    intermediate=512,
    vocab=2048,
    eps=1e-5,
    rope_theta=10000.0,
    context=512,
    tied=True,
)


class Weights:
    """A WeightSource: normal values that bf16 holds exactly."""

    def __init__(self, shape: tuple[int, ...], seed: int) -> None:
        self.shape, self.dtype, self.seed = shape, DTYPES["f32"], seed

    def load(self) -> NDArray[Any]:
        values = np.random.default_rng(self.seed).standard_normal(self.shape).astype(np.float32)
        if len(self.shape) == 1:
            return to_float32(to_bf16(1 + 0.1 * values), DTYPES["bf16"])
        return to_float32(to_bf16(1.4 * values / np.sqrt(self.shape[-1])), DTYPES["bf16"])


def tiny_llama(rows: int = 16, slots: int = 1, context: int = 256, **changes: Any) -> Graph:
    """The graph in bf16; the same weights for the same shapes. changes: fields of the config."""
    from dataclasses import replace

    config = replace(CONFIG, **{"context": max(CONFIG.context, context), **changes})
    weights = {name: Weights(shape, i) for i, (name, shape) in enumerate(config.tensors().items())}
    return build(
        config,
        weights,  # type: ignore[arg-type]
        rows=rows,
        slots=slots,
        context=context,
        kv_dtype="bf16",
        weight_dtype="bf16",
    )


@cache
def device_target() -> Target:
    """This machine's GPU, all SMs, teams of 16."""
    from gpurt.doctor import probe_cuda

    probe = probe_cuda(0)
    return Target("cuda", probe.sm_count, 16, probe.arch, probe.smem_bytes, probe.l2_bytes)
