"""A Muse Spark of three layers with random weights, of sizes that the CUDA bodies take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.buffer import DTYPES, e4m3
from gpurt.graph import Graph
from gpurt.graphs.dflash import DraftModel
from gpurt.graphs.muse_spark import build
from gpurt.graphs.muse_spark_config import MuseSparkConfig
from gpurt.graphs.ops.dtypes import to_bf16, to_float32
from gpurt.loaders.model import WeightSource

# Layer 0 slides, rotates and has bf16 experts; 1 is global, does not rotate and has nvfp4 experts;
# 2 slides and is dense.
CONFIG = MuseSparkConfig(
    hidden=192,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=64,
    vocab=2048,
    context=512,
    eps=1e-5,
    post_eps=1e-5,
    thetas=(10000.0, 0.0, 10000.0),
    windows=(20, 0, 20),
    sparse=(True, True, False),
    qk_scale=1.3,
    output_multiplier=1.5,
    softcap=15.0,
    gate_temperature=1.0,
    intermediate=320,
    experts=13,
    top_k=3,
    moe_hidden=144,
    moe_intermediate=48,
    routed_factor=1.5,
    quantised=frozenset({1}),
)
PAGE = 16


def tiny_muse(
    rows: int = 16,
    slots: int = 1,
    context: int = 128,
    draw: int = 0,
    draft: str = "none",
    proposals: int = 15,
    draft_model: DraftModel | None = None,
    draft_tree: bool = False,
    routing: str = "natural",
    tp_size: int = 1,
    tp_rank: int = 0,
    **changes: Any,
) -> Graph:
    """The graph in bf16. changes: fields of the config. draw: another set of weights."""
    config = replace(CONFIG, **changes)
    dtypes = config.tensor_dtypes()
    weights = {
        name: _source(name, shape, dtypes.get(name, "bf16"), 1000 * draw + number)
        for number, (name, shape) in enumerate(config.tensors().items())
    }
    return build(
        config,
        weights,
        rows=rows,
        slots=slots,
        context=context,
        kv_dtype="bf16",
        weight_dtype="bf16",
        page=PAGE,
        draft=draft,
        proposals=proposals,
        draft_model=draft_model,
        draft_tree=draft_tree,
        routing=routing,
        tp_size=tp_size,
        tp_rank=tp_rank,
    )


def _source(name: str, shape: tuple[int, ...], dtype: str, seed: int) -> WeightSource:
    kind = e4m3 if dtype == "e4m3" else DTYPES["f32" if dtype == "bf16" else dtype]
    return WeightSource(name, kind, shape, lambda: _values(name, shape, dtype, seed))


def _values(name: str, shape: tuple[int, ...], dtype: str, seed: int) -> NDArray[Any]:
    rng = np.random.default_rng(seed)
    if dtype == "u8":
        return rng.integers(0, 256, shape).astype(np.uint8)
    if dtype == "e4m3":
        return rng.integers(0x18, 0x28, shape).astype(np.uint8)  # 0.06 to 0.23
    values = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("weight_scale_2"):
        return rng.uniform(0.4, 0.8, shape).astype(np.float32)
    if name.endswith("language_model.norm.weight"):
        values = 1 + 0.2 * values
    elif len(shape) == 1:
        values *= 0.2  # gains are 1 + w
    else:
        values *= 1.4 / np.sqrt(shape[-1])
    return to_float32(to_bf16(values), DTYPES["bf16"])
