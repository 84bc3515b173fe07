"""Tiny random checkpoints in Hugging Face's layout, and transformers models of any loaded Model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from gpurt.graphs.ops.dtypes import to_float32
from gpurt.graphs.reference.transformers_llama import config_values
from gpurt.loaders import Model

# Wide weights, so that random logits differ by more than rounding; odd sizes, so that a tile or
# page boundary falls inside every axis.
BASE: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def make_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model with random weights (norms too), float32, eval mode."""
    config_class, model_class = CLASSES[model_type]
    torch.manual_seed(seed)
    model = model_class(config_class(**(BASE | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    return model


def save_model(model: Any, folder: Path, dtype: str = "float32", shard: str = "1GB") -> Any:
    """Write a folder as save_pretrained does. Returns the model read back in float32: `.to` would
    leave the rotary frequencies rounded to `dtype`.
    """
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


def transformers_model(model: Model) -> Any:
    """A transformers float32 model with the dequantised weights of a loaded Model."""
    config = model.config
    config_class, model_class = CLASSES[config.architecture]
    reference = model_class(config_class(**config_values(config))).eval()
    state = {
        name: torch.from_numpy(to_float32(np.asarray(source.load()), source.dtype))
        for name, source in model.weights.items()
    }
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected
    assert [name for name in missing if name != "lm_head.weight" or not config.tied] == []
    reference.tie_weights()
    return reference
