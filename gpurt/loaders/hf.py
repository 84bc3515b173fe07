"""A local Hugging Face folder: config.json, safetensors, tokenizer. And configs of dense Llamas.

Configs of other families lie in a file each: hf_qwen3_moe.py, hf_muse_spark.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpurt.channels import ChannelFormat
from gpurt.errors import ModelError
from gpurt.graphs.llama import LlamaConfig, RopeScaling
from gpurt.loaders.model import (
    Model,
    ModelConfig,
    WeightSource,
    check_heads,
    check_tensors,
    id_list,
    integer,
    need,
    number,
    only_setting,
)
from gpurt.loaders.safetensors_file import read_folder
from gpurt.progress import Progress
from gpurt.tokenizer import chat_format, tokenizer_from_json

_MODEL_TYPES = ("llama", "qwen3")
_MOE_TYPES = ("qwen3_moe", "muse_spark")
_CONFIG = "config.json"
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "quantization_config": None,
}


def load_folder(folder: Path, progress: Progress | None = None) -> Model:
    """Open a model folder. Tensors are memory-mapped and read when a plan is loaded.

    progress: called as (what, done, total) over the shards.
    Raises: ModelError if a file is missing, truncated or damaged, if the architecture is unknown,
    or if a tensor contradicts the config.
    """
    if not folder.is_dir():
        raise ModelError(f"no such folder - at {folder} - give the path of a model folder")
    values = read_json(folder / _CONFIG)
    at = str(folder / _CONFIG)
    need(
        values.get("model_type") in (*_MODEL_TYPES, *_MOE_TYPES),
        f"model_type {values.get('model_type')!r} is unknown",
        at,
        f"gpurt runs {', '.join((*_MODEL_TYPES, *_MOE_TYPES))} models",
    )
    config, found, notices = _family(values, at, folder, progress)
    weights = check_tensors(found, config, str(folder))
    tokenizer, template = None, None
    if (folder / "tokenizer.json").exists():
        tokenizer = tokenizer_from_json(folder / "tokenizer.json")
        template = _template(folder)
    stop = id_list(_optional_json(folder / "generation_config.json").get("eos_token_id"))
    stop = stop or id_list((values.get("text_config") or values).get("eos_token_id"))
    chat = chat_format(tokenizer, template) if tokenizer is not None else None
    if tokenizer is not None and isinstance(chat, ChannelFormat):
        end = tokenizer.id_of(chat.eot)
        stop = tuple(dict.fromkeys((*stop, *([] if end is None else [end]))))
    return Model(
        name=folder.resolve().name,
        path=str(folder),
        config=config,
        weights=weights,
        tokenizer=tokenizer,
        chat=chat,
        stop_ids=stop,
        notices=tuple(notices),
    )


def _family(
    values: dict[str, Any], at: str, folder: Path, progress: Progress | None
) -> tuple[ModelConfig, dict[str, WeightSource], list[str]]:
    """The config, the tensors of what gpurt runs, and what it leaves out."""
    from gpurt.loaders import hf_muse_spark, hf_qwen3_moe

    if values["model_type"] == "muse_spark":
        found, notices = hf_muse_spark.text_tensors(read_folder(folder, progress))
        return hf_muse_spark.config_from_json(values, at, found), found, notices
    if values["model_type"] == "qwen3_moe":
        return hf_qwen3_moe.config_from_json(values, at), read_folder(folder, progress), []
    return config_from_json(values, at), read_folder(folder, progress), []


def config_from_json(values: dict[str, Any], path: str) -> LlamaConfig:
    """A LlamaConfig from a parsed config.json. Raises: ModelError naming the key at fault."""
    model_type = values.get("model_type")
    only_setting(values, _ONLY, path)
    sliding = [kind for kind in values.get("layer_types") or [] if kind != "full_attention"]
    need(not sliding, f"layer_types has {sliding[:1]}", path, "gpurt runs full attention")
    hidden = integer(values, "hidden_size", path)
    heads = integer(values, "num_attention_heads", path)
    kv_heads = integer(values, "num_key_value_heads", path, heads)
    # transformers' own defaults: llama divides, qwen3 says 128
    head_dim = integer(values, "head_dim", path, 128 if model_type == "qwen3" else hidden // heads)
    check_heads(heads, kv_heads, head_dim, path)
    theta, scaling = rope_of(values, path)
    return LlamaConfig(
        architecture=str(model_type),
        hidden=hidden,
        layers=integer(values, "num_hidden_layers", path),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=integer(values, "intermediate_size", path),
        vocab=integer(values, "vocab_size", path),
        eps=number(values, "rms_norm_eps", path, 1e-6),
        rope_theta=theta,
        context=integer(values, "max_position_embeddings", path, 2048),
        tied=bool(values.get("tie_word_embeddings", False)),
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        rope_scaling=scaling,
    )


def rope_of(values: dict[str, Any], path: str) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    need(isinstance(rope, dict), f"rope settings are {rope!r}", path, "they must be an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    need(
        kind in ("default", "llama3"),
        f"rope scaling {kind!r} is not supported",
        path,
        "gpurt runs models with rope type default or llama3",
    )
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    need(
        partial == 1,
        f"partial_rotary_factor is {partial!r}",
        path,
        "gpurt rotates whole heads",
    )
    theta = number(rope if "rope_theta" in rope else values, "rope_theta", path, 10000.0)
    if kind == "default":
        return theta, None
    scaling = RopeScaling(
        factor=number(rope, "factor", path),
        low_freq_factor=number(rope, "low_freq_factor", path),
        high_freq_factor=number(rope, "high_freq_factor", path),
        original_context=integer(rope, "original_max_position_embeddings", path),
    )
    return theta, scaling


def _template(folder: Path) -> str | None:
    """The chat template: a file of its own, or a key of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = _optional_json(folder / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises: ModelError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        msg = f"{path.name} is missing"
        raise ModelError(f"{msg} - at {path.parent} - give the path of a model folder") from error
    except (OSError, ValueError) as error:
        msg = f"cannot read {path.name}: {error}"
        raise ModelError(f"{msg} - at {path} - get the file again") from error
    if not isinstance(values, dict):
        msg = f"{path.name} holds no object"
        raise ModelError(f"{msg} - at {path} - get the file again")
    return values
