"""Tiny random DFlash checkpoints, and models of the `dflash` package with the same weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from gpurt.graphs.dflash import DFlashConfig
from gpurt.graphs.reference.dflash import DFlash

# Sizes that no power of two divides; the hidden size and vocabulary of helpers/muse.py.
BASE = DFlashConfig(
    hidden=48,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=12,
    intermediate=56,
    vocab=211,
    context=512,
    eps=1e-5,
    theta=10000.0,
    windows=(0, 0, 0),
    causal=(False, False, False),
    taps=(0, 2, 4),
    block=16,
    mask_token=200,
    output_multiplier=0.2,
    softcap=20.0,
    conv_taps=2,
    conv_group=16,
    selector_rank=10,
    selector_top_k=16,
)
# Configs that reach every branch: windows below context and block, causal layers, mixes of both,
# one layer, one tap, DFlash 1, odd blocks, more taps of a convolution, one candidate.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding": {"windows": (7, 7, 7)},
    "window-within-block": {"windows": (0, 3, 0), "block": 9},
    "window-1": {"windows": (1, 1, 0), "block": 4},
    "mixed-causal": {"windows": (7, 0, 7), "causal": (True, False, True)},
    "all-causal": {"causal": (True, True, True), "block": 5},
    "one-layer": {"layers": 1, "windows": (5,), "causal": (False,), "taps": (2,), "block": 2},
    "three-conv-taps": {"conv_taps": 3, "conv_group": 8, "block": 7},
    "one-candidate": {"selector_top_k": 1, "block": 8},
    "many-heads": {"kv_heads": 4, "head_dim": 8, "softcap": 0.0, "input_scale": 1.7},
    "dflash-1": {"conv_taps": 0, "conv_group": 1, "selector_rank": 0, "selector_top_k": 1},
}


def make_dflash(seed: int = 0, **changes: Any) -> DFlash:
    """Plain torch with random weights, gains, kernels and codebooks, so wide that they show."""
    torch.manual_seed(seed)
    model = DFlash(dataclasses.replace(BASE, **changes)).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.copy_(1 + 0.3 * torch.randn_like(tensor))
            elif "codebook" in name:
                tensor.copy_(torch.randn_like(tensor))
            elif "base_kernel" in name:
                tensor.copy_(tensor + 0.4 * torch.randn_like(tensor))
            else:
                tensor.copy_(0.2 * torch.randn_like(tensor))
    return model


def config_values(config: DFlashConfig, target_layers: int = 5) -> dict[str, Any]:
    """What config.json of a checkpoint says. Causality of single layers follows from layer_types,
    as in checkpoints without `is_causal`, unless all layers agree.
    """
    own: dict[str, Any] = {
        "target_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token,
        "block_size": config.block,
        "input_embedding_scale": config.input_scale,
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.softcap or None,
    }
    if config.selector_rank:
        own |= {
            "selector_rank": config.selector_rank,
            "selector_top_k": config.selector_top_k,
            "conv_kernel_size": config.conv_taps,
            "conv_group_size": config.conv_group,
        }
    kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
    values: dict[str, Any] = {
        "architectures": ["DFlash2DraftModel" if config.selector_rank else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_target_layers": target_layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.theta},
        "layer_types": kinds,
        "sliding_window": max(config.windows) or None,
        "use_sliding_window": any(config.windows),
        "attention_bias": False,
        "hidden_act": "silu",
        "dflash_config": own,
    }
    if len(set(config.causal)) == 1:
        values["is_causal"] = config.causal[0]
    return values


def package_model(model: DFlash) -> Any:
    """The `dflash` package's model with the same weights, float32, eval mode."""
    import dflash

    values = config_values(model.config)
    made = Qwen3Config(**values)
    made._attn_implementation = "sdpa"
    theirs = getattr(dflash, values["architectures"][0])(made).eval()
    state = {
        f"{name}.weight" if name.endswith("codebook") else name: tensor
        for name, tensor in model.state_dict().items()
    }
    theirs.load_state_dict(state)
    return theirs


def save_dflash(model: DFlash, folder: Path, dtype: str = "float32") -> Path:
    """Write a drafter's folder, tensors by their released names."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: w.to(getattr(torch, dtype)) for name, w in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_values(model.config)))
    return folder
