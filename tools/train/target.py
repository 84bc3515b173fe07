"""Train the target: `python -m tools.train.target RUN --recipe nano --minutes 8`.

RUN is a folder; it holds the tokenizer, the recipe and everything needed to go on. See loop.py for
what stops a run and README.md for the order of commands.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from gpurt.graphs.muse_spark_config import PREFIX
from tools.train.data import Batch, Shape
from tools.train.dialogue import Exchange
from tools.train.loop import STOPPED_EXIT_CODE, Limits, save, train
from tools.train.model import EXPERTS, Inputs, Target, masks
from tools.train.optimiser import Optimiser, rate_scale
from tools.train.problem import make
from tools.train.recipe import (
    RECIPES,
    Recipe,
    parameters_in_use,
    quantised_layers,
    read_recipe,
    target_config,
    training_flops,
    write_recipe,
)
from tools.train.text import PROMPT_WEIGHT, Encoder, train_tokenizer

SETTINGS = "settings.json"  # how to compute here, as probe.py found; not what
_PROBES, _PROBES_CPU = 512, 32  # held-out problems


class TargetJob:
    """A target in training. See loop.Job."""

    name = "target"

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        device: str,
        *,
        experts: str = "dense",
        fused: bool = False,
    ) -> None:
        """fused: torch.compile."""
        self.recipe, self.device, self.steps = recipe, torch.device(device), recipe.steps
        tokenizer = folder / "tokenizer.json"
        self.shape = Shape(
            tokenizer,
            recipe.seed,
            recipe.rows,
            recipe.length,
            talk=recipe.talk,
            stories=recipe.stories,
        )
        self.encoder = Encoder(tokenizer)
        config = target_config(recipe)
        self.model = target_model(recipe, device, experts)
        if fused:
            self.model.compile()
        self.tokens_per_step = recipe.rows * recipe.length
        self.flops_per_step = self.tokens_per_step * training_flops(config, recipe.length)
        self.optimiser = _optimiser(self.model, recipe)

    def step(self, index: int, batch: Batch) -> dict[str, torch.Tensor]:
        """See loop.Job."""
        recipe, model = self.recipe, self.model
        if index >= recipe.steps * (1 - recipe.quantised):
            model.quantised = quantised_layers(recipe)
        inputs, document, reply = on_device(batch, model, self.device)
        logits, _, loads = model(inputs)
        losses = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), inputs.ids[:, 1:].flatten(), reduction="none"
        )
        goes_on = (document[:, 1:] == document[:, :-1]) & (document[:, 1:] > 0)
        said = (goes_on & reply[:, 1:]).flatten().float()
        weight = said + PROMPT_WEIGHT * (goes_on & ~reply[:, 1:]).flatten()
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()
        scale = rate_scale(index, recipe.steps, recipe.warmup, recipe.decay)
        self.optimiser.step(scale)
        self._balance(loads, recipe.bias_rate * scale)
        with torch.no_grad():
            reply_loss = (losses * said).sum() / said.sum()
            fullest = (loads.amax(1) / loads.mean(1)).mean()
        return {"loss": loss, "reply_loss": reply_loss, "fullest_expert": fullest}

    @torch.no_grad()
    def probe(self) -> dict[str, float]:
        """Held-out problems whose whole reply the model would write exactly, greedily."""
        right, count = 0, 0
        documents = probe_documents(self.encoder, self.recipe, self.device)
        for begin in range(0, len(documents), self.recipe.rows):
            batch = padded(documents[begin : begin + self.recipe.rows])
            inputs, document, reply = on_device(batch, self.model, self.device)
            best = self.model(inputs)[0].argmax(-1)
            wrong = (best[:, :-1] != inputs.ids[:, 1:]) & reply[:, 1:] & (document[:, 1:] > 0)
            right += int((~wrong.any(1)).sum())
            count += len(best)
        return {"held_out_exact": right / count}

    def state(self) -> dict[str, Any]:
        """See loop.Job."""
        return {"model": self.model.state_dict(), "optimiser": self.optimiser.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """See loop.Job."""
        self.model.load_state_dict(state["model"])
        self.optimiser.load(state["optimiser"])

    @torch.no_grad()
    def _balance(self, loads: torch.Tensor, rate: float) -> None:
        """Experts with less than their share become easier to choose. No loss is added for it.
        Source: arXiv 2408.15664.
        """
        tensors = self.model.tensors
        for layer, load in enumerate(loads):
            bias = tensors[f"{PREFIX}.layers.{layer}.mlp.gate.e_score_correction_bias"]
            bias.add_(rate * torch.sign(load.mean() - load))


def target_model(recipe: Recipe, device: str, experts: str = "dense") -> Target:
    """A target with its first weights, in bf16 products on a GPU."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = Target(target_config(recipe), seed=recipe.seed, experts=experts, dtype=dtype)
    return model.to(device)


def settings_of(run: Path) -> dict[str, Any]:
    """How to compute on this machine: what probe.py found, or what works everywhere."""
    path = run / SETTINGS
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {"experts": "dense", "compile": False} | found


def load_weights(model: Target, folder: Path) -> None:
    """Begin with the weights of a model folder, quantised or not."""
    from gpurt.graphs.reference.muse_spark import dequantised
    from gpurt.loaders import load_model

    found = dequantised(load_model(folder).weights)
    with torch.no_grad():
        for name, tensor in model.tensors.items():
            tensor.copy_(found[name])


def on_device(
    batch: Batch, model: Target, device: torch.device
) -> tuple[Inputs, torch.Tensor, torch.Tensor]:
    """A batch's inputs, its document numbers and which tokens are the model's own."""

    def there(array: Any) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(
            device, non_blocking=True
        )

    ids, document, position = (
        there(array).int() for array in (batch.ids, batch.document, batch.position)
    )
    seen = masks(document, position, model.config.windows, model.dtype)
    return Inputs(ids.long(), position, seen), document, there(batch.reply)


def probe_documents(encoder: Encoder, recipe: Recipe, device: torch.device) -> list[Any]:
    """Held-out problems as documents; few where they take long."""
    count = _PROBES if device.type == "cuda" else _PROBES_CPU
    problems = [make(seed, test=True, stories=recipe.stories) for seed in range(count)]
    return [encoder.document([Exchange(p.question, p.solution, p.reply)]) for p in problems]


def padded(documents: Sequence[Any]) -> Batch:
    """One document a row, rows as long as the longest."""
    longest = max(len(document.ids) for document in documents)
    shape = (len(documents), -(-longest // 8) * 8)
    batch = Batch(*(np.zeros(shape, kind) for kind in (np.uint16, np.uint16, np.uint16, np.bool_)))
    for row, document in enumerate(documents):
        size = len(document.ids)
        batch.ids[row, :size], batch.reply[row, :size] = document.ids, document.reply
        batch.document[row, :size], batch.position[row, :size] = 1, np.arange(size)
    return batch


def begin_run(folder: Path, recipe: Recipe) -> Recipe:
    """The run's folder with its tokenizer and recipe; a run that exists keeps the recipe it has."""
    folder.mkdir(parents=True, exist_ok=True)
    begun = read_recipe(folder)
    if begun is not None:
        return begun
    if not (folder / "tokenizer.json").exists():
        train_tokenizer(folder / "tokenizer.json", recipe.vocab)
    write_recipe(recipe, folder)
    return recipe


def _optimiser(model: Target, recipe: Recipe) -> Optimiser:
    muon, adam = {}, {}
    for name, tensor in model.tensors.items():
        if not tensor.requires_grad:
            continue
        if name.endswith("embed_tokens.weight"):
            adam[name] = recipe.embedding_rate
        elif name == "lm_head.weight":
            adam[name] = recipe.head_rate
        elif tensor.ndim > 1 and not name.endswith("mlp.gate.weight"):
            muon[name] = recipe.matrix_rate
        else:
            adam[name] = recipe.vector_rate if tensor.ndim == 1 else recipe.vector_rate / 5
    return Optimiser(model.tensors, muon, adam, recipe.weight_decay)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when all steps are done, 75 when it was stopped before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--recipe", choices=RECIPES, default="nano")
    parser.add_argument("--steps", type=int, help="of a new run; 0 with --weights: as they are")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop and save after these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--experts", choices=EXPERTS, help="default: as probe.py found, or dense")
    parser.add_argument("--compile", action="store_true", help="fuse layers with torch.compile")
    parser.add_argument("--weights", type=Path, help="a new run's first weights: a model folder")
    parser.add_argument("--workers", type=int, help="processes that make data")
    options = parser.parse_args(arguments)
    recipe = RECIPES[options.recipe]
    if options.steps is not None:
        recipe = replace(recipe, steps=options.steps)
    recipe = begin_run(options.run, recipe)
    settings = settings_of(options.run)
    job = TargetJob(
        recipe,
        options.run,
        options.device,
        experts=options.experts or settings["experts"],
        fused=options.compile or settings["compile"],
    )
    if options.weights is not None and not (options.run / "target.pt").exists():
        load_weights(job.model, options.weights)
        save(job, options.run / "target.pt", 0)
    total, active = parameters_in_use(job.model.config)
    print(f"target {recipe.name}: {total:,} parameters, {active:,} in use for a token")
    done = train(job, options.run, Limits(options.minutes, options.workers))
    return 0 if done else STOPPED_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
