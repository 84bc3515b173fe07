"""Export: a run's weights as a release: `python -m tools.train.export RUN FOLDER`.

FOLDER becomes what gpurt's loader reads: config.json, model.safetensors in ModelOpt's NVFP4 layout,
tokenizer.json, generation_config.json, and draft/ in the `dflash` package's layout. The model card
(README.md) is written by evaluate.py, which has the figures. At most 16 MB together.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpurt.graphs.muse_spark_config import PREFIX
from tools.train.quantise import packed
from tools.train.recipe import (
    Recipe,
    draft_config,
    draft_hf_config,
    hf_config,
    quantised_layers,
    read_recipe,
    target_config,
)
from tools.train.text import CHANNELS, SPECIAL

SIZE_MAX_BYTES = 16_000_000
DRAFT = "draft"
_FLOAT32 = ("mlp.gate.weight", "e_score_correction_bias", "residual_gate.gate")


def export(run: Path, folder: Path, *, plain: bool = False) -> int:
    """Write the release. Returns its size in bytes. Raises: ValueError for that being too much.

    plain: experts in bf16 like the rest. Larger than a release may be: to go on from, and to see
    what NVFP4 costs.
    """
    recipe = read_recipe(run)
    if recipe is None or not (run / "target.pt").exists():
        msg = f"no checkpoint of a target - at {run}"
        raise ValueError(f"{msg} - train one: python -m tools.train.target {run}")
    folder.mkdir(parents=True, exist_ok=True)
    weights = _weights(run / "target.pt")
    config = hf_config(recipe)
    if plain:
        del config["quantization_config"]
    tensors = target_tensors(recipe, weights, quantised=() if plain else quantised_layers(recipe))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _write_json(folder / "config.json", config)
    stop = {"eos_token_id": [SPECIAL.index(CHANNELS.eot)], "do_sample": False}
    _write_json(folder / "generation_config.json", stop)
    shutil.copyfile(run / "tokenizer.json", folder / "tokenizer.json")
    shutil.copyfile(run / "recipe.json", folder / "recipe.json")
    if (run / "draft.pt").exists():
        export_draft(run, folder / DRAFT, recipe)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > SIZE_MAX_BYTES and not plain:
        msg = f"the release has {size:,} bytes - at {folder}"
        raise ValueError(f"{msg} - {SIZE_MAX_BYTES:,} is the most: take a smaller recipe")
    return size


def export_draft(run: Path, folder: Path, recipe: Recipe) -> None:
    """Write the drafter's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    found = _weights(run / "draft.pt")
    tensors = {}
    for name, shape in draft_config(recipe).tensors().items():
        _check(name, found, shape)
        tensors[name] = found[name].to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _write_json(folder / "config.json", draft_hf_config(recipe))


def target_tensors(
    recipe: Recipe, weights: Mapping[str, torch.Tensor], *, quantised: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Every tensor as it is stored: experts of `quantised` layers in NVFP4, router, router bias and
    residual gates in float32, the rest in bf16.
    """
    inner = tuple(f"{PREFIX}.layers.{i}.mlp.experts." for i in quantised)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in target_config(recipe).tensors().items():
        _check(name, weights, shape)
        w = weights[name].detach().cpu()
        half = name.rsplit(".", 1)[-1]
        if name.startswith(inner) and half in ("gate_up_proj", "down_proj"):
            stored = packed(w, 2 if half == "gate_up_proj" else 1)
            second = stored.second if half == "gate_up_proj" else stored.second[:, 0]
            tensors[name] = stored.codes.contiguous()
            tensors[f"{name}_weight_scale"] = stored.scales.contiguous()
            tensors[f"{name}_weight_scale_2"] = second.contiguous()
            tensors[f"{name}_input_scale"] = torch.ones_like(second)  # W4A16: nobody reads it
        else:
            kind = torch.float32 if name.endswith(_FLOAT32) else torch.bfloat16
            tensors[name] = w.to(kind).contiguous()
    return tensors


def _weights(path: Path) -> dict[str, torch.Tensor]:
    state = torch.load(path, map_location="cpu", weights_only=True)["job"]["model"]
    return {name.replace("/", "."): tensor for name, tensor in state.items()}


def _check(name: str, found: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
    if name not in found or tuple(found[name].shape) != shape:
        seen = list(found[name].shape) if name in found else "missing"
        msg = f"tensor {name} is {seen}, the recipe asks for {list(shape)}"
        raise ValueError(f"{msg} - at the checkpoint - recipe and checkpoint are of different runs")


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bf16", action="store_true", help="nothing in NVFP4: larger")
    options = parser.parse_args(arguments)
    size = export(options.run, options.folder, plain=options.bf16)
    print(f"wrote {options.folder}: {size:,} bytes, a release has {SIZE_MAX_BYTES:,} at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
