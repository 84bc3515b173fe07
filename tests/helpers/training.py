"""A recipe so small that a step takes milliseconds, and runs of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tools.train.recipe import RECIPES, Recipe
from tools.train.target import begin_run
from tools.train.text import train_tokenizer

MICRO = replace(
    RECIPES["tiny"],
    name="micro",
    hidden=32,
    layers=5,
    heads=2,
    head_dim=16,
    experts=5,
    moe_hidden=32,
    moe_intermediate=16,
    vocab=320,
    context=512,
    window=24,
    draft_intermediate=32,
    selector_rank=8,
    selector_top_k=6,
    block=5,
    steps=8,
    rows=3,
    length=160,
    draft_steps=6,
    draft_rows=3,
    draft_length=128,
    draft_anchors=3,
)


@cache
def _tokenizer() -> bytes:
    path = Path(mkdtemp()) / "tokenizer.json"
    train_tokenizer(path, MICRO.vocab, 300)
    return path.read_bytes()


def new_run(folder: Path, recipe: Recipe = MICRO) -> Path:
    """A run's folder, begun."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(_tokenizer())
    begin_run(folder, recipe)
    return folder


class StopAfter:
    """Limits that are up after some steps, whatever the clock says."""

    workers, probe = 0, False

    def __init__(self, steps: int) -> None:
        self.left = steps

    def up(self) -> bool:
        """Asked once a step."""
        self.left -= 1
        return self.left <= 0
