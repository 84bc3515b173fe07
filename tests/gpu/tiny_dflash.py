"""A DFlash 2 drafter of two layers for tiny_muse, random weights, sizes that CUDA bodies take."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.buffer import DTYPES
from gpurt.graph import Graph
from gpurt.graphs.dflash import DFlashConfig, DraftModel
from gpurt.graphs.ops.dtypes import to_bf16, to_float32
from gpurt.loaders.model import WeightSource
from tests.gpu.tiny_muse import CONFIG, tiny_muse

# Layer 0 slides and sees both ways, 1 is full and causal.
DRAFT = DFlashConfig(
    hidden=CONFIG.hidden,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate=320,
    vocab=CONFIG.vocab,
    context=512,
    eps=1e-5,
    theta=10000.0,
    windows=(20, 0),
    causal=(False, True),
    taps=(0, 2),
    block=16,
    mask_token=7,
    input_scale=1.5,
    output_multiplier=1.5,
    softcap=15.0,
    conv_taps=2,
    conv_group=16,
    selector_rank=32,
    selector_top_k=16,
)


def tiny_dflash(config: DFlashConfig | None = None) -> DraftModel:
    """The drafter."""
    config = config or DRAFT
    weights = {
        name: _source(name, shape, 5000 + number)
        for number, (name, shape) in enumerate(config.tensors().items())
    }
    return DraftModel(config, weights)


def drafted_muse(proposals: int = 15, model: DraftModel | None = None, **options: Any) -> Graph:
    """tiny_muse with it."""
    return tiny_muse(
        draft="dflash", proposals=proposals, draft_model=model or tiny_dflash(), **options
    )


def _source(name: str, shape: tuple[int, ...], seed: int) -> WeightSource:
    return WeightSource(name, DTYPES["f32"], shape, lambda: _values(name, shape, seed))


def _values(name: str, shape: tuple[int, ...], seed: int) -> NDArray[Any]:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        values = 1 + 0.2 * values
    elif name.endswith("base_kernel"):
        values *= 0.4
        values[:, 0] += 1
    else:
        values *= 1.4 / np.sqrt(shape[-1])
    return to_float32(to_bf16(values), DTYPES["bf16"])
