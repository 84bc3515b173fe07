"""Tiny random Muse Spark checkpoints, and transformers models of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

# Sizes that no power of two divides, so that tiles and pages end inside every axis.
TEXT: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "sliding_window": 6,
    "moe_hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 3,
    "bos_token_id": 1,
}
TOWERS: dict[str, Any] = {
    "vision_config": {
        "num_hidden_layers": 1,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_attention_heads": 2,
    },
    "audio_config": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
    "out_hidden_size": 96,
    "projector_hidden_size": 16,
}
# Configs that reach every branch: windows below the prompt, layer counts that 4 does not divide,
# dense and sparse mixes, odd expert counts, top-k 1 to 8.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-layer": {"num_hidden_layers": 1},
    "top-1": {"num_experts_per_tok": 1, "num_local_experts": 5, "num_hidden_layers": 2},
    "top-8-of-9": {"num_experts_per_tok": 8, "num_local_experts": 9, "num_hidden_layers": 3},
    "all-experts": {"num_experts_per_tok": 3, "num_local_experts": 3, "num_hidden_layers": 2},
    "dense-and-sparse": {
        "num_hidden_layers": 6,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse", "dense"],
    },
    "window-1": {"sliding_window": 1, "num_hidden_layers": 3},
    "window-of-pages": {"sliding_window": 19, "num_hidden_layers": 2, "num_key_value_heads": 4},
    "layers-by-hand": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "layer_rope_theta": [10000.0, 0.0, 10000.0],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_key_value_heads": 1,
    },
    "factors": {
        "num_hidden_layers": 2,
        "routed_scaling_factor": 2.5,
        "output_multiplier": 0.4,
        "final_logit_softcapping": 3.0,
        "qk_scale_factor": 1.7,
        "residual_gate_temperature": 0.05,
        "rms_norm_eps": 1e-3,
        "post_norm_eps": 1e-2,
    },
}


def make_muse(seed: int = 0, **changes: Any) -> Any:
    """A transformers text model with its head: random weights, gains, gates and router bias."""
    text = TEXT | changes
    audio = TOWERS["audio_config"] | {"out_hidden_size": text["hidden_size"]}
    config = transformers.MuseSparkConfig(text_config=text, **(TOWERS | {"audio_config": audio}))
    torch.manual_seed(seed)
    model = transformers.MuseSparkForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "language_model" not in name:
                continue
            if name.endswith("model.norm.weight"):
                tensor.copy_(1 + 0.3 * torch.randn_like(tensor))
            elif "norm" in name:
                tensor.copy_(0.3 * torch.randn_like(tensor))
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.5 * torch.randn_like(tensor))
            elif name.endswith("residual_gate.gate"):
                tensor.copy_(0.5 * torch.randn_like(tensor))
                tensor[:2] = torch.tensor([4.0, -4.0])  # alpha at its floor, and at 1
    return model


def save_muse(model: Any, folder: Path, dtype: str = "float32", shard: str = "1GB") -> Any:
    """Write a folder as save_pretrained does. Returns the model read back in float32."""
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


def quantise_folder(folder: Path, layers: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Turn the experts of some layers into ModelOpt's NVFP4, random codes and scales. Returns what
    they multiply out to, by the names that the layout replaced: written from the definition.
    """
    path, rng = folder / "model.safetensors", np.random.default_rng(seed)
    tensors, plain = load_file(path), {}
    for layer in layers:
        for half in ("gate_up_proj", "down_proj"):
            name = f"model.language_model.layers.{layer}.mlp.experts.{half}"
            experts, n, k = tensors[name].shape
            codes = rng.integers(0, 256, (experts, n, k // 2), np.uint8)
            # 0.02 to 0.5, so that outputs stay of the size of the others'
            block = torch.from_numpy(rng.uniform(0.02, 0.5, (experts, n, k // 16)))
            block = block.to(torch.float8_e4m3fn)
            pair = (experts, 2) if half == "gate_up_proj" else (experts,)
            second = torch.from_numpy(rng.uniform(0.5, 1.5, pair).astype(np.float32))
            tensors[name] = torch.from_numpy(codes)
            tensors[f"{name}_weight_scale"] = block
            tensors[f"{name}_weight_scale_2"] = second
            tensors[f"{name}_input_scale"] = torch.ones(pair)
            plain[name] = by_definition(codes, block.float().numpy(), second.numpy())
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_algo": "NVFP4", "quant_method": "modelopt"}
    (folder / "config.json").write_text(json.dumps(config))
    return plain


def by_definition(codes: Any, block: Any, second: Any) -> torch.Tensor:
    """e2m1(code) * block scale * second-level scale, element by element."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    experts, n, half = codes.shape
    out = np.empty((experts, n, 2 * half), np.float32)
    for e, row, k in np.ndindex(out.shape):
        byte = int(codes[e, row, k // 2])
        code = byte & 15 if k % 2 == 0 else byte >> 4
        value = -magnitudes[code & 7] if code & 8 else magnitudes[code]
        scale = second[e] if second.ndim == 1 else second[e, int(row >= n // 2)]
        out[e, row, k] = np.float32(np.float32(value) * block[e, row, k // 16]) * scale
    return torch.from_numpy(out)


def states_and_logits(model: Any, tokens: list[int]) -> tuple[list[Any], Any]:
    """The stream before every layer and after the last, [T, hidden] each, and all logits."""
    text, states = model.model.language_model, []
    hooks = [
        layer.register_forward_hook(lambda _, args, out: states.append((args[0], out)))
        for layer in text.layers
    ]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0]
    for hook in hooks:
        hook.remove()
    stream = [before[0] for before, _ in states] + [states[-1][1][0]]
    return [state.numpy() for state in stream], logits.numpy()


def choices(model: Any, prompt: list[int], seen: list[int]) -> tuple[list[int], list[float]]:
    """What transformers would say after the prompt and each beginning of `seen`, and the top-2
    margins: its greedy tokens up to the first that differs. One pass, without its cache, which
    keeps all keys of a layer whose window is 1.
    """
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *seen[:-1]]])
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(seen)).logits[0].float()
    best = logits.topk(2)
    margins = (best.values[:, 0] - best.values[:, 1]).tolist()
    return best.indices[:, 0].tolist(), margins
