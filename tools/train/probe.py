"""Probe: how fast a new run goes here, and so how many steps fit the time.

`python -m tools.train.probe RUN target --recipe nano --minutes 11` tries each way to compute
experts, plain and compiled, on the run's own batches; the fastest whose loss agrees with the first
is written to RUN/settings.json, the steps that fit the minutes to RUN/recipe.json. `draft` does
the latter for the drafter. Once: afterwards the schedule is fixed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tools.train.data import Batch, make_batch
from tools.train.draft import DraftJob
from tools.train.loop import Job
from tools.train.model import EXPERTS
from tools.train.recipe import RECIPES, Recipe, write_recipe
from tools.train.target import SETTINGS, TargetJob, begin_run, settings_of

_BATCHES = 4
_LONG = 100_000  # steps of the schedule while it is measured: its warm-up
_WARM_STEPS = 3
_AGREES = 0.02  # of the loss after a few steps: bf16 sums in another order
_SPARE = 0.93  # of the minutes: starts, checkpoints and probes take the rest


@dataclass(frozen=True)
class Trial:
    """One way to run a job. step_s: seconds a step. loss: of the last one."""

    experts: str
    fused: bool
    step_s: float
    loss: float


def measured(job: Job, batches: Sequence[Batch], steps: int) -> tuple[float, float]:
    """Seconds a step, and the last loss. The job's weights move."""
    for step in range(_WARM_STEPS):
        figures = job.step(step, batches[step % len(batches)])
    _wait()
    began = time.perf_counter()
    for step in range(steps):
        figures = job.step(_WARM_STEPS + step, batches[step % len(batches)])
    _wait()
    return (time.perf_counter() - began) / steps, float(figures["loss"].detach())


def trials(
    make_job: Callable[[str, bool], Job], kinds: Sequence[tuple[str, bool]], steps: int
) -> list[Trial]:
    """Every kind that runs and agrees with the first, fastest first. One that fails is named."""
    found: list[Trial] = []
    batches: list[Batch] = []
    for experts, fused in kinds:
        name = f"{experts}{', compiled' if fused else ''}"
        try:
            job = make_job(experts, fused)
            if not batches:
                encoder = job.encoder  # type: ignore[attr-defined]
                batches = [make_batch(job.shape, i, encoder) for i in range(_BATCHES)]
            began = time.perf_counter()
            step_s, loss = measured(job, batches, steps)
        except Exception as error:  # whatever a compiler or a kernel raises: this way is not taken
            print(f"{name}: failed, {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            continue
        rate = job.tokens_per_step / step_s
        print(f"{name}: {rate:,.0f} tokens/s, loss {loss:.4f}, {time.perf_counter() - began:.0f} s")
        if found and abs(loss - found[0].loss) > _AGREES * found[0].loss:
            print(f"{name}: the loss is not that of {found[0].experts}: not taken")
            continue
        found.append(Trial(experts, fused, step_s, loss))
    if not found:
        raise RuntimeError("no way to compute experts works - at the device - see the errors above")
    return sorted(found, key=lambda trial: trial.step_s)


def steps_for(minutes: float, step_s: float) -> int:
    """Steps that fit, with some time to spare; ten at least."""
    return max(10, int(_SPARE * 60 * minutes / step_s))


def probe_target(run: Path, recipe: Recipe, device: str, minutes: float, steps: int) -> Recipe:
    """Write the fastest settings, and the recipe with its steps."""
    long = replace(recipe, steps=_LONG)
    kinds = [(experts, fused) for fused in (False, device != "cpu") for experts in EXPERTS]
    kinds = list(dict.fromkeys(kinds))

    def make_job(experts: str, fused: bool) -> Job:
        torch.manual_seed(recipe.seed)
        return TargetJob(long, run, device, experts=experts, fused=fused)

    best = trials(make_job, kinds, steps)[0]
    _settle(run, experts=best.experts, compile=best.fused)
    return replace(recipe, steps=steps_for(minutes, best.step_s))


def probe_draft(run: Path, recipe: Recipe, device: str, minutes: float, steps: int) -> Recipe:
    """The recipe with the drafter's steps."""
    job = DraftJob(replace(recipe, draft_steps=_LONG), run, device)
    batches = [make_batch(job.shape, i, job.encoder) for i in range(_BATCHES)]
    step_s, loss = measured(job, batches, steps)
    print(f"draft: {job.tokens_per_step / step_s:,.0f} rows/s, loss {loss:.4f}")
    return replace(recipe, draft_steps=steps_for(minutes, step_s))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("what", choices=["target", "draft"])
    parser.add_argument("--recipe", choices=RECIPES, default="nano")
    parser.add_argument("--minutes", type=float, required=True, help="for all of its steps")
    parser.add_argument("--steps", type=int, default=20, help="measured of each kind")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    run, what = options.run, options.what
    if (run / f"{what}.pt").exists() or what in settings_of(run):
        print(f"{what}: its steps are settled - at {run}")
        return 0
    recipe = begin_run(run, RECIPES[options.recipe])
    probe = probe_target if what == "target" else probe_draft
    recipe = probe(run, recipe, options.device, options.minutes, options.steps)
    write_recipe(recipe, run)
    count = recipe.steps if what == "target" else recipe.draft_steps
    _settle(run, **{what: count})
    print(f"{what}: {count:,} steps for {options.minutes:g} minutes - at {run}")
    return 0


def _settle(run: Path, **values: Any) -> None:
    text = json.dumps(settings_of(run) | values)
    (run / SETTINGS).write_text(text + "\n", encoding="utf-8")


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
