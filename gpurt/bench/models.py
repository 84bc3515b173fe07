"""Models of the cases: their graphs as the command line builds them, and the same in small."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gpurt.bench import made_up, shapes
from gpurt.errors import ModelError
from gpurt.graph import Graph
from gpurt.graphs.dflash import DFlashConfig
from gpurt.graphs.llama import LlamaConfig
from gpurt.graphs.muse_spark_config import MuseSparkConfig
from gpurt.graphs.qwen3_moe import Qwen3MoeConfig
from gpurt.loaders.model import ModelConfig
from gpurt.serving import BUILDERS


def model_graph(
    config: ModelConfig,
    *,
    rows: int,
    context: int,
    weights: Callable[[], Any] | None = None,
    host: bool = False,
    **options: Any,
) -> Graph:
    """A model's graph as `gpurt run` builds it; with made-up matrices unless `weights` reads some.

    host: for CPU threads: weights as stored, f32 cache.
    """
    builder = importlib.import_module(f"gpurt.graphs.{BUILDERS[config.architecture]}")
    read = weights() if weights is not None else None
    dtypes = {"kv_dtype": "f32"} if host else {"kv_dtype": "bf16", "weight_dtype": "bf16"}
    graph: Graph = builder.build(
        config, read or made_up.weights(config), rows=rows, context=context, **dtypes, **options
    )
    if read is None:
        made_up.share_matrices(graph)
    return graph


def small_model(config: LlamaConfig) -> LlamaConfig:
    """The same kind of model at a test's size; heads keep theirs, which bodies depend on."""
    small = replace(
        shapes.llama_layers(config, 2),
        hidden=128,
        heads=2 * config.heads // config.kv_heads,
        kv_heads=2,
        intermediate=192,
        vocab=512,
    )
    if isinstance(small, Qwen3MoeConfig):
        return replace(small, experts=8, top_k=2, moe_intermediate=32)
    return small


def small_muse(config: MuseSparkConfig) -> MuseSparkConfig:
    """Four layers: bf16 or nvfp4 experts, with a window or without."""
    kept = shapes.muse_layers(config, 0, 4)
    return replace(
        kept,
        hidden=128,
        heads=16,
        kv_heads=2,
        vocab=512,
        intermediate=128,
        experts=12,
        top_k=3,
        moe_hidden=64,
        moe_intermediate=64,
    )


def small_draft(config: DFlashConfig, target: MuseSparkConfig) -> DFlashConfig:
    """Two layers for a small target, with blocks of four; its heads keep their group and size."""
    return replace(
        config,
        hidden=target.hidden,
        layers=2,
        heads=2 * config.heads // config.kv_heads,
        kv_heads=2,
        intermediate=128,
        vocab=target.vocab,
        windows=config.windows[:2],
        causal=config.causal[:2],
        taps=(1, target.layers - 1),
        block=4,
        mask_token=7,
        selector_rank=32,
    )


def smollm2() -> Any:
    """SmolLM2's weights from its GGUF. Raises: ModelError if it cannot be had."""
    from gpurt.loaders import load_model

    return load_model("smollm2").weights


def smollm2_if_there() -> Any:
    """The same, or None where the file is not on this machine: speed does not depend on it."""
    from gpurt.loaders.smollm2 import smollm2_path

    try:
        smollm2_path(fetch=False)
    except ModelError:
        return None
    return smollm2()
