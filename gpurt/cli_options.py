"""Options that several commands share: dataclasses, whose fields the command line shows as options.

A command under `with_options` takes such a class as one parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from gpurt.errors import ConfigError

if TYPE_CHECKING:
    from gpurt.serving import Drafting


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn, and when they end."""

    max_tokens: Annotated[int | None, typer.Option(help="Tokens to generate; default 256.")] = None
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0
    seed: Annotated[int, typer.Option(help="Of the sampler.")] = 0
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None

    def draws(self) -> dict[str, Any]:
        """What a request needs to know of how its tokens are drawn."""
        return {n: getattr(self, n) for n in ("temperature", "top_k", "top_p", "seed")}


@dataclass(frozen=True)
class PlanOptions:
    """What is planned."""

    workers: Annotated[int | None, typer.Option(help="Threads or SMs; default: all.")] = None
    policy: Annotated[
        str, typer.Option(help="static, claim, ready, auto, or OPERATOR=POLICY,...")
    ] = "static"
    edges: Annotated[str, typer.Option(help="counter, payload or auto.")] = "auto"
    rows: Annotated[
        str | None, typer.Option(help="Rows of a step, or of each step size: 16,128.")
    ] = None
    context: Annotated[int | None, typer.Option(help="Positions of one sequence.")] = None
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Keys, values: f32, f16, bf16, fp8. Host f32 (logits to 1e-3), cuda bf16."
        ),
    ] = None
    draft: Annotated[
        str,
        typer.Option(
            help="Who proposes tokens ahead: none, ngram, dflash; auto: dflash if the model has a "
            "drafter in its draft/ folder, as nano has, else none."
        ),
    ] = "auto"
    draft_model: Annotated[
        Path | None,
        typer.Option(help="The folder of a dflash drafter; default: draft/ in the model's."),
    ] = None
    proposals: Annotated[int | None, typer.Option(help="Tokens proposed a step, at most 15.")] = (
        None
    )
    draft_tree: Annotated[
        bool,
        typer.Option("--draft-tree", help="Greedy proposals of dflash are a tree, not a chain."),
    ] = False

    def drafting(self) -> Drafting:
        """Of the model's graph."""
        from gpurt.serving import Drafting

        return Drafting(self.draft, self.draft_model, self.proposals, self.draft_tree)


@dataclass(frozen=True)
class RunOptions(PlanOptions):
    """Where and how a model runs."""

    device: Annotated[str, typer.Option(help="auto, host, cuda or cuda:N.")] = "auto"
    tp: Annotated[int, typer.Option(help="Ranks that share the model, one a device.")] = 1
    cache_packed: Annotated[
        Path | None, typer.Option(help="Keep packed weights in this folder, for the next load.")
    ] = None

    def settings(self) -> dict[str, Any]:
        """Of a Runtime."""
        from gpurt.serving import parse_rows

        sizes = parse_rows(self.rows)
        chosen = parse_policy(self.policy)
        return {
            "workers": self.workers,
            "policy": chosen,
            "edges": self.edges,
            "step_rows": sizes,
        }


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one parameter for each field of its parameters that are dataclasses."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            own = parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
            options.append(own)
            continue
        group = groups[parameter.name]
        types = get_type_hints(group, include_extras=True)
        options += [
            inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=types[f.name]
            )
            for f in fields(group)
        ]

    @wraps(command)
    def expanded(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        command(**given)

    expanded.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    expanded.__annotations__ = {option.name: option.annotation for option in options}
    return expanded


def parse_policy(text: str) -> str | dict[str, str]:
    """`static`, or `matvec=claim,attention=ready`. Raises: ConfigError for anything else."""
    if "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    if any(not name or not value for name, _, value in pairs):
        msg = f"policy is {text!r} - at --policy - use OPERATOR=POLICY,OPERATOR=POLICY"
        raise ConfigError(msg)
    return {name.strip(): value.strip() for name, _, value in pairs}
