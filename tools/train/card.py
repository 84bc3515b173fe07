"""The model card of a release, written from what was measured and from its recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.train.problem import HELD_OUT, TEMPLATES
from tools.train.recipe import Recipe, draft_config, parameters_in_use, target_config

_CARD = """\
# muse-spark-{name}

A very small language model that solves short word problems step by step, with a drafter that
proposes its tokens ahead. It exists to show gpurt at work: it knows nothing else.

Architecture: Muse Spark (sliding and global attention, a latent mixture of experts, residual
gates) with {layers} layers of {hidden}, {experts} experts of which a token uses {top_k};
{total:,} parameters, {active:,} in use for a token. Drafter: DFlash 2, {draft_layers} layers,
{draft_total:,} parameters, blocks of {block}. {size:,} bytes together: inner layers' experts in
NVFP4, router and gates in float32, the rest in bf16.

## Data
Chats from a seeded generator of our own (`tools/train`), no other text: {templates} templates of
word problems with worked solutions in varied wording, and one chat in ten with small talk.
One problem in sixteen, by its template and its numbers, is kept for tests and was never trained on;
{unseen} more templates were never trained on at all.

## Recipe
Seed {seed}; target: {steps:,} steps of {tokens:,} tokens, Muon and AdamW, warm-up, stable, linear
decay over the last {decay:.0%}, experts rounded to NVFP4 over the last {quantised:.0%};
experts balanced by the router's selection bias alone. Drafter: {draft_steps:,} steps on the
target's features and greedy tokens. Every setting: `recipe.json`.

## Figures
Greedy, through gpurt on {device}; `python -m tools.train.evaluate` prints them and wrote this.

| problems | right | accuracy |{draft_heads}
|---|---|---|{draft_rules}
{rows}

The last row says how much of it carries over to kinds of problems that training never showed: the
model then answers as if the problem were of a kind that it knows.

Outputs that differ with a drafter from those without: {different}.
"""


def write_card(folder: Path, recipe: Recipe | None, figures: Mapping[str, Any]) -> None:
    """Write FOLDER/README.md. Raises: ValueError without a recipe."""
    if recipe is None:
        raise ValueError(f"no recipe - at {folder} - export the release with tools.train.export")
    config, draft = target_config(recipe), draft_config(recipe)
    total, active = parameters_in_use(config)
    drafts = list(figures["tokens_per_step"])
    counts = figures["different_outputs"]
    text = _CARD.format(
        name=recipe.name,
        layers=recipe.layers,
        hidden=recipe.hidden,
        experts=recipe.experts,
        top_k=recipe.top_k,
        total=total,
        active=active,
        draft_layers=recipe.draft_layers,
        draft_total=sum(_count(shape) for shape in draft.tensors().values()),
        block=recipe.block,
        size=sum(p.stat().st_size for p in folder.rglob("*") if p.suffix != ".md" and p.is_file()),
        templates=len(recipe.stories or TEMPLATES),
        unseen=len(HELD_OUT),
        seed=recipe.seed,
        steps=recipe.steps,
        tokens=recipe.rows * recipe.length,
        decay=recipe.decay,
        quantised=recipe.quantised,
        draft_steps=recipe.draft_steps,
        device=figures["device"],
        draft_heads="".join(f" tokens a step, {draft} |" for draft in drafts),
        draft_rules="---|" * len(drafts),
        rows="\n".join(_row(name, group, drafts) for name, group in figures["groups"].items()),
        different=", ".join(f"{counts[d]} ({d})" for d in drafts) or "none were compared",
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _row(name: str, group: Mapping[str, Any], drafts: list[str]) -> str:
    rates = "".join(f" {group['tokens_per_step'][draft]:.2f} |" for draft in drafts)
    return f"| {name} | {group['right']} of {group['problems']} | {group['accuracy']:.1%} |{rates}"


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
