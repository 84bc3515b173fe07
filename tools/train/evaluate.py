"""Evaluate a release through gpurt: `python -m tools.train.evaluate [FOLDER]`.

Greedy answers to held-out problems, by held-out seed and for templates that training never saw;
tokens a step and a second with each drafter and with none, and whether the tokens are the same.
Figures go to the terminal, one JSON object to the last line. --card writes the model card from
them, so that no figure in it was typed by hand. Exit code 1: some output differs between drafters.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpurt.channels import ANSWER, ChannelFormat
from gpurt.loaders import load_model
from gpurt.loaders.nano import nano_path
from gpurt.runtime import Runtime
from gpurt.serving import Drafting, encode_chat, model_graph
from tools.train.card import write_card
from tools.train.problem import Problem, is_right, make
from tools.train.recipe import read_recipe

if TYPE_CHECKING:
    from gpurt.graph import Graph
    from gpurt.loaders import Model

_MAX_TOKENS = 256
_CONTEXT = 512  # of the problems: the longest prompt has 200 tokens
_SEEDS = (101, 102, 103, 104)
UNSEEN = "unseen templates"


class Answer(NamedTuple):
    """A reply; how many tokens a step committed; seconds from its first token to its last."""

    tokens: list[int]
    per_step: float
    seconds: float


@dataclass
class Group:
    """Problems that are reported together, and what came of them."""

    name: str
    problems: list[Problem]
    right: int = 0
    tokens: int = 0
    drafted: int = 0  # all but the first of each reply, which the prompt's own step gives
    steps: dict[str, float] = field(default_factory=dict)  # by drafter
    seconds: dict[str, float] = field(default_factory=dict)  # of `drafted`, by drafter and "none"
    different: dict[str, int] = field(default_factory=dict)  # by drafter: outputs not as without

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "problems": len(self.problems),
            "right": self.right,
            "accuracy": self.right / len(self.problems),
            "tokens": self.tokens,
            "tokens_per_step": {draft: self.drafted / n for draft, n in self.steps.items()},
            "tokens_per_second": {draft: self.drafted / s for draft, s in self.seconds.items()},
            "different_outputs": self.different,
        }


def groups_of(seeds: Sequence[int], count: int, stories: Sequence[str]) -> list[Group]:
    """About `count` problems over the seeds, and a quarter of it of unseen templates."""
    each = -(-count // len(seeds))
    groups = [
        Group(
            f"seed {seed}",
            [make((seed << 32) + i, test=True, stories=stories) for i in range(each)],
        )
        for seed in seeds
    ]
    unseen = [make((seeds[0] << 32) + i, test=True, unseen=True) for i in range(-(-count // 4))]
    return [*groups, Group(UNSEEN, unseen)]


def evaluate(
    model: Model, runtime: Runtime, groups: Sequence[Group], drafts: Sequence[str]
) -> None:
    """Fill in the groups. drafts: besides "none"."""
    kind = runtime.config.target.kind
    graphs = {
        draft: model_graph(model, kind, context=_CONTEXT, drafting=drafting_of(draft))
        for draft in ("none", *drafts)
    }
    for group in groups:
        group.steps = dict.fromkeys(drafts, 0.0)
        group.seconds = dict.fromkeys(graphs, 0.0)
        group.different = dict.fromkeys(drafts, 0)
        for problem in group.problems:
            prompt = encode_chat(model, [{"role": "user", "content": problem.question}])
            plain = _answer(runtime, graphs["none"], model, prompt)
            group.right += is_right(problem, answer_text(model, plain.tokens))
            group.tokens += len(plain.tokens)
            group.drafted += len(plain.tokens) - 1
            group.seconds["none"] += plain.seconds
            for draft in drafts:
                answer = _answer(runtime, graphs[draft], model, prompt)
                group.different[draft] += answer.tokens != plain.tokens
                group.steps[draft] += (len(answer.tokens) - 1) / answer.per_step
                group.seconds[draft] += answer.seconds
        print(_line(group), flush=True)


def drafting_of(text: str) -> Drafting:
    """A drafter by name; "tree" is dflash with one. "dflash:3" proposes three tokens at most."""
    name, _, count = text.partition(":")
    tree = name == "tree"
    return Drafting("dflash" if tree else name, proposals=int(count) if count else None, tree=tree)


def answer_text(model: Model, tokens: Sequence[int]) -> str:
    """What the reply says to the user, without the reasoning."""
    assert model.tokenizer is not None
    assert isinstance(model.chat, ChannelFormat)
    stream, said = model.chat.stream(model.tokenizer), []
    for token in tokens:
        text = stream.push(token)
        if stream.channel == ANSWER:
            said.append(text)
    return "".join(said)


def summary(groups: Sequence[Group], model: Model, runtime: Runtime) -> dict[str, Any]:
    """All figures. The whole is that of the held-out seeds, without the unseen templates."""
    seeds = [group for group in groups if group.name != UNSEEN]
    drafts = list(groups[0].steps)
    problems = sum(len(group.problems) for group in seeds)
    drafted = sum(group.drafted for group in seeds)
    right = sum(group.right for group in seeds)
    return {
        "model": model.name,
        "device": runtime.config.device,
        "problems": problems,
        "right": right,
        "accuracy": right / problems,
        "tokens_per_step": {d: drafted / sum(g.steps[d] for g in seeds) for d in drafts},
        "tokens_per_second": {
            d: drafted / sum(g.seconds[d] for g in seeds) for d in seeds[0].seconds
        },
        "different_outputs": {d: sum(g.different[d] for g in groups) for d in drafts},
        "groups": {group.name: group.as_dict() for group in groups},
    }


def _answer(runtime: Runtime, graph: Graph, model: Model, prompt: list[int]) -> Answer:
    request = runtime.submit(graph, prompt, max_tokens=_MAX_TOKENS, stop_ids=model.stop_ids)
    tokens, stats = request.result().token_ids, request.stats
    rate = stats.tokens_per_second
    return Answer(tokens, stats.accepted_per_step or 1.0, (len(tokens) - 1) / rate if rate else 0.0)


def _line(group: Group) -> str:
    figures = group.as_dict()
    words = [f"{group.name}: {group.right} of {len(group.problems)} right"]
    for draft, rate in figures["tokens_per_second"].items():
        steps = figures["tokens_per_step"].get(draft, 1.0)
        different = f", {group.different[draft]} outputs differ" if draft in group.steps else ""
        words.append(f"{draft} {steps:.2f} tokens a step, {rate:,.0f} a second{different}")
    return "; ".join(words)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="default: nano in the package")
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(_SEEDS))
    drafters = "drafters beside none: dflash, tree (dflash with one), ngram; dflash:3 proposes 3"
    parser.add_argument("--drafts", nargs="*", default=["dflash", "ngram"], help=drafters)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--card", action="store_true", help="write FOLDER/README.md from them")
    options = parser.parse_args(arguments)
    folder = options.folder or nano_path()
    model, recipe = load_model(folder), read_recipe(folder)
    groups = groups_of(options.seeds, options.problems, recipe.stories if recipe else ())
    began = time.monotonic()
    with Runtime(options.device) as runtime:
        evaluate(model, runtime, groups, options.drafts)
        figures = summary(groups, model, runtime)
    figures["seconds"] = time.monotonic() - began
    print(f"held-out seeds: {figures['accuracy']:.1%} of {figures['problems']} problems right")
    if options.card:
        write_card(folder, recipe, figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))
    return 1 if any(figures["different_outputs"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
