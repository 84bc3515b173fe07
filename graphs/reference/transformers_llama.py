"""A Llama of ours as transformers' LlamaForCausalLM: the independent peer of benches and checks."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers import LlamaConfig as PeerConfig

from gpurt.graphs.llama import LlamaConfig
from gpurt.graphs.reference.llama import dequantised

if TYPE_CHECKING:
    from gpurt.loaders.model import WeightSource


def config_values(config: LlamaConfig) -> dict[str, Any]:
    """What transformers' config of the same model says, its rotary base and scaling included."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_context,
        }
    return {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tied,
    }


def peer_model(config: LlamaConfig, weights: Mapping[str, torch.Tensor]) -> LlamaForCausalLM:
    """The model with these weights, in float32. Raises: ValueError for a tensor it has not."""
    model = LlamaForCausalLM(PeerConfig(**config_values(config))).float().eval()
    found = model.load_state_dict(dict(weights), strict=False)
    if found.unexpected_keys:
        raise ValueError(f"transformers' Llama has no {found.unexpected_keys}")
    return model


class Llama:
    """Greedy decoding with transformers' own cache, on a CPU."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: Mapping[str, WeightSource],
        *,
        threads: int,
        dtype: str = "float32",
    ) -> None:
        """threads: of torch, for the whole process."""
        torch.set_num_threads(threads)
        self.model = peer_model(config, dequantised(weights)).to(getattr(torch, dtype))
        known = inspect.signature(self.model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"

    def decode(self, ids: Sequence[int], tokens: int) -> float:
        """Tokens a second after the first one."""
        cache = {self._cache_argument: DynamicCache(config=self.model.config)}
        with torch.inference_mode():
            token = torch.tensor([list(ids)])
            for made in range(tokens):
                logits = self.model(token, use_cache=True, **cache).logits
                token = logits[:, -1:].argmax(-1)
                if made == 0:
                    began = time.perf_counter()
        return (tokens - 1) / (time.perf_counter() - began)
