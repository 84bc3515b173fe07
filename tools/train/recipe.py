"""Recipes: sizes and settings of a target and its drafter, and the configs that follow.

`nano` is the release; `small`, with a fifth of the parameters, answers in three minutes what the
goal needs; `tiny` proves the whole way on a CPU. All have Muse Spark's true architecture: sliding
and global layers, a latent mixture of experts, residual gates, and scales that follow its config's
own rules (output_multiplier is 1 / sqrt(hidden / 256)).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpurt.graphs.dflash import DFlashConfig
from gpurt.graphs.muse_spark_config import MuseSparkConfig
from gpurt.loaders.hf_dflash import config_from_json as draft_from_json
from gpurt.loaders.hf_muse_spark import config_from_json
from tools.train.text import CHANNELS, MASK, PAD, SPECIAL

_QK_SCALE = 5.4730064863875  # Muse Spark's own
_SOFTCAP = 20.0
_FILE = "recipe.json"
_THETA = 10000.0  # contexts are short


@dataclass(frozen=True)
class Recipe:
    """Everything that two runs must share to give the same weights on the same machine."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    moe_hidden: int
    moe_intermediate: int
    vocab: int = 1536
    context: int = 1024
    window: int = 128
    # data, as in `dialogue.chat`
    talk: float = 0.1
    stories: tuple[str, ...] = ()
    # the drafter
    draft_layers: int = 2
    draft_intermediate: int = 512
    draft_taps: tuple[int, ...] = ()
    block: int = 16
    selector_rank: int = 64
    selector_top_k: int = 16
    # training of the target: batches of `rows` packed rows of `length` tokens
    seed: int = 1
    rows: int = 128
    length: int = 512
    steps: int = 12_000
    warmup: float = 0.01  # parts of all steps
    decay: float = 0.4  # the end, in which the rate falls to zero
    quantised: float = 0.25  # the end, in which experts are NVFP4
    matrix_rate: float = 0.02  # Muon
    vector_rate: float = 0.01  # AdamW: gains, gates, router
    embedding_rate: float = 0.05
    head_rate: float = 0.005
    weight_decay: float = 0.05
    bias_rate: float = 1e-3  # of the router's selection bias
    # training of the drafter: batches of `draft_rows` chats of up to `draft_length` tokens
    draft_steps: int = 6_000
    draft_rows: int = 256
    draft_length: int = 192
    draft_anchors: int = 6  # a chat
    draft_rate: float = 0.01
    draft_slot_decay: float = 8.0  # slot j weighs exp(-(j - 1) / this)

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target that the drafter reads."""
        return self.draft_taps or (1, self.layers // 2, self.layers - 2)


RECIPES = {
    "nano": Recipe("nano", 256, 8, 4, 1, 64, 16, 4, 128, 128),
    "small": Recipe("small", 128, 6, 2, 1, 64, 16, 4, 64, 64, draft_intermediate=256, steps=4_000),
    "tiny": Recipe(
        "tiny",
        hidden=64,
        layers=4,
        heads=2,
        kv_heads=1,
        head_dim=32,
        experts=4,
        top_k=2,
        moe_hidden=32,
        moe_intermediate=32,
        vocab=512,
        context=512,
        window=64,
        draft_layers=1,
        draft_intermediate=128,
        draft_taps=(1, 2),
        selector_rank=16,
        rows=8,
        length=256,
        steps=800,
        talk=0.2,
        stories=("few_more", "few_less"),
        draft_steps=300,
        draft_rows=16,
        draft_anchors=4,
    ),
}


def hf_config(recipe: Recipe) -> dict[str, Any]:
    """The target's config.json, as transformers and gpurt read it; ModelOpt's words for NVFP4."""
    ids = {name: SPECIAL.index(name) for name in SPECIAL}
    layers = recipe.layers
    text = {
        "model_type": "muse_spark_text",
        "vocab_size": recipe.vocab,
        "hidden_size": recipe.hidden,
        "intermediate_size": 2 * recipe.hidden,  # of dense layers: there are none
        "num_hidden_layers": layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "max_position_embeddings": recipe.context,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "rope_parameters": {"rope_type": "default", "rope_theta": _THETA},
        "sliding_window": recipe.window,
        "qk_scale_factor": _QK_SCALE,
        "output_multiplier": (256 / recipe.hidden) ** 0.5,
        "final_logit_softcapping": _SOFTCAP,
        "moe_hidden_size": recipe.moe_hidden,
        "moe_intermediate_size": recipe.moe_intermediate,
        "num_local_experts": recipe.experts,
        "num_experts_per_tok": recipe.top_k,
        "num_shared_experts": 0,
        "routed_scaling_factor": 1.0,
        "residual_gate_temperature": 0.3,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": [
            "sliding_attention" if (layers - 1 - i) % 4 else "full_attention" for i in range(layers)
        ],
        "layer_rope_theta": [_THETA if (layers - 1 - i) % 4 else 0.0 for i in range(layers)],
        "mlp_layer_types": ["sparse"] * layers,
        "bos_token_id": ids[CHANNELS.start],
        "eos_token_id": ids[CHANNELS.eot],
        "pad_token_id": ids[PAD],
    }
    # As in the release: only experts, and not those of the first and the last layer.
    exclude = [f"model.language_model.layers.{i}.mlp.experts*" for i in (0, layers - 1)]
    return {
        "architectures": ["MuseSparkForConditionalGeneration"],
        "model_type": "muse_spark",
        "text_config": text,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "exclude_modules": ["lm_head", "*self_attn*", "*pre_expert*", "*gate*", *exclude],
        },
    }


def target_config(recipe: Recipe) -> MuseSparkConfig:
    """The target as gpurt reads it while nothing is quantised."""
    return config_from_json(hf_config(recipe), f"recipe {recipe.name}", {})


def quantised_layers(recipe: Recipe) -> range:
    """Layers whose experts the release stores in NVFP4: all but the first and the last."""
    return range(1, recipe.layers - 1)


def draft_config(recipe: Recipe) -> DFlashConfig:
    """The drafter: full attention over the context, bidirectional in its block."""
    return draft_from_json(draft_hf_config(recipe), f"drafter of recipe {recipe.name}")


def draft_hf_config(recipe: Recipe) -> dict[str, Any]:
    """The drafter's config.json, as the `dflash` package reads it."""
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "hidden_size": recipe.hidden,
        "num_hidden_layers": recipe.draft_layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "intermediate_size": recipe.draft_intermediate,
        "vocab_size": recipe.vocab,
        "max_position_embeddings": recipe.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": _THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": _THETA},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * recipe.draft_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "is_causal": False,
        "num_target_layers": recipe.layers,
        "block_size": recipe.block,
        "dflash_config": {
            "target_layer_ids": list(recipe.taps),
            "mask_token_id": SPECIAL.index(MASK),
            "block_size": recipe.block,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": recipe.selector_rank,
            "selector_top_k": recipe.selector_top_k,
            "output_multiplier": (256 / recipe.hidden) ** 0.5,
            "final_logit_softcapping": _SOFTCAP,
        },
    }


def parameters_in_use(config: MuseSparkConfig) -> tuple[int, int]:
    """Parameters in all, and those in products with one token."""
    total = active = 0
    for name, shape in config.tensors().items():
        count = 1
        for extent in shape:
            count *= extent
        total += count
        if name.endswith(("gate_up_proj", "down_proj")):
            active += count * config.top_k // config.experts
        elif len(shape) > 1 and not name.endswith("embed_tokens.weight"):
            active += count
    return total, active


def training_flops(config: MuseSparkConfig, length: int) -> float:
    """Of a token, forward and backward: 6 a parameter in use, and attention over what is there."""
    _, active = parameters_in_use(config)
    attention = 12 * config.layers * config.heads * config.head_dim * length / 2
    return 6 * active + attention


def write_recipe(recipe: Recipe, run: Path) -> None:
    """Into a run's folder."""
    (run / _FILE).write_text(json.dumps(asdict(recipe), indent=1) + "\n", encoding="utf-8")


def read_recipe(run: Path) -> Recipe | None:
    """The recipe of a run or a release; None if there is none."""
    path = run / _FILE
    if not path.exists():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    for name in ("draft_taps", "stories"):
        values[name] = tuple(values[name])
    return Recipe(**values)
