"""Shapes: the configs of the released models that the cases stand for. No weights are needed."""

from __future__ import annotations

from dataclasses import replace

from gpurt.graphs.dflash import DFlashConfig, default_taps
from gpurt.graphs.llama import LlamaConfig, RopeScaling
from gpurt.graphs.muse_spark_config import MuseSparkConfig
from gpurt.graphs.qwen3_moe import Qwen3MoeConfig

SMOLLM2_135M = LlamaConfig(
    architecture="llama",
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    vocab=49152,
    eps=1e-5,
    rope_theta=100000.0,
    context=8192,
    tied=True,
)
LLAMA_1B = LlamaConfig(
    architecture="llama",
    hidden=2048,
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    intermediate=8192,
    vocab=128256,
    eps=1e-5,
    rope_theta=500000.0,
    context=131072,
    tied=True,
    rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
)
LLAMA_8B = replace(
    LLAMA_1B,
    hidden=4096,
    layers=32,
    head_dim=128,
    intermediate=14336,
    tied=False,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
)
QWEN3_06B = LlamaConfig(
    architecture="qwen3",
    hidden=1024,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate=3072,
    vocab=151936,
    eps=1e-6,
    rope_theta=1000000.0,
    context=40960,
    tied=True,
    qk_norm=True,
)
QWEN3_30B_A3B = Qwen3MoeConfig(
    architecture="qwen3_moe",
    hidden=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    intermediate=6144,
    vocab=151936,
    eps=1e-6,
    rope_theta=1000000.0,
    context=40960,
    tied=False,
    qk_norm=True,
    experts=128,
    top_k=8,
    moe_intermediate=768,
    norm_topk=True,
    sparse=(True,) * 48,
)

_LAYERS = 62
# Three layers slide, the fourth is global; the last one is global.
_LOCAL = tuple((_LAYERS - 1 - layer) % 4 != 0 for layer in range(_LAYERS))
MUSE_SPARK = MuseSparkConfig(
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
MUSE_RANKS = 8  # the slice is one rank of TP8
# A DFlash 2 drafter of the report's size, blocks of 16 and an MLP of 16384; no such checkpoint is
# public. The token of a mask and the angles' base are guesses that cost nothing.
MUSE_DRAFT = DFlashConfig(
    hidden=8192,
    layers=5,
    heads=64,
    kv_heads=8,
    head_dim=128,
    intermediate=16384,
    vocab=202048,
    context=1048576,
    eps=1e-5,
    theta=500000.0,
    windows=(2048,) * 5,
    causal=(False,) * 5,
    taps=default_taps(_LAYERS, 5),
    block=16,
    mask_token=201818,
    output_multiplier=MUSE_SPARK.output_multiplier,
    softcap=MUSE_SPARK.softcap,
    conv_taps=2,
    conv_group=16,
    selector_rank=256,
    selector_top_k=16,
)


def llama_layers(config: LlamaConfig, count: int) -> LlamaConfig:
    """`config` cut to its first layers."""
    if isinstance(config, Qwen3MoeConfig):
        return replace(config, layers=count, sparse=config.sparse[:count])
    return replace(config, layers=count)


def muse_layers(config: MuseSparkConfig, first: int, count: int) -> MuseSparkConfig:
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
