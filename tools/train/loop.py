"""Loop: steps until they are done, the time is up or somebody asks to stop; saved so as to go on.

A run is a folder: recipe and tokenizer, `NAME.pt` (everything a job needs to go on as if nothing
had happened) and `NAME.jsonl` (what was seen on the way). A checkpoint is written every minute, at
the time limit and on SIGTERM, first beside its place, then moved there. Exit code 75: stopped
before the end, run the same command again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

from tools.train.data import Batch, Shape, Stream

STOPPED_EXIT_CODE = 75
_SAVE_EVERY_S = 60.0
_SHOW_EVERY_S = 5.0
_BAR_CELLS = 24
_PEAK_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100": 989e12}  # dense bf16, by the datasheet


class Job(Protocol):
    """What is trained: a target or a drafter."""

    name: str
    steps: int
    shape: Shape  # of its data
    tokens_per_step: int  # as the throughput counts them
    flops_per_step: float

    def step(self, index: int, batch: Batch) -> Mapping[str, torch.Tensor]:
        """One step of the optimiser. Returns figures to show, as scalars on the device."""

    def probe(self) -> Mapping[str, float]:
        """Figures on held-out problems."""

    def state(self) -> dict[str, Any]:
        """Everything the next step depends on."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""


@dataclass
class Limits:
    """When to stop early. minutes: 0 is no limit."""

    minutes: float = 0.0
    workers: int | None = None
    probe: bool = True
    began: float = field(default_factory=time.monotonic)

    def up(self) -> bool:
        """Whether the time is used."""
        return bool(self.minutes) and time.monotonic() - self.began > 60 * self.minutes


def train(job: Job, folder: Path, limits: Limits) -> bool:
    """Run a job from its checkpoint, if there is one, on. Returns whether it is done."""
    path = folder / f"{job.name}.pt"
    start = restore(job, path)
    log, asked = Log(job, folder, start), _Asked()
    saved = time.monotonic()
    if start >= job.steps:
        print(f"{job.name}: all {job.steps} steps are done")
        return True
    done = False
    with asked, Stream(job.shape, start, limits.workers) as stream:
        batches = iter(stream)
        for step in range(start, job.steps):
            waiting = time.monotonic()
            batch = next(batches)
            log.waited(time.monotonic() - waiting)
            log.add(step, job.step(step, batch))
            done = step + 1 == job.steps
            stop = done or asked.stop or limits.up()
            if stop or time.monotonic() - saved > _SAVE_EVERY_S:
                log.show(step, {})
                save(job, path, step + 1)
                if limits.probe:
                    log.show(step, job.probe())
                saved = time.monotonic()
            if stop:
                break
    if not done:
        print(f"{job.name}: stopped after step {step + 1} of {job.steps}; run again to go on")
    return done


def save(job: Job, path: Path, step: int) -> None:
    """Write a checkpoint: whole or not at all."""
    partial = path.with_suffix(".part")
    state = {"step": step, "job": job.state(), "torch_rng": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda_rng"] = torch.cuda.get_rng_state()
    torch.save(state, partial)
    os.replace(partial, path)


def restore(job: Job, path: Path) -> int:
    """Load a checkpoint if there is one. Returns the step to go on with."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    job.load(state["job"])
    torch.set_rng_state(state["torch_rng"])
    if "cuda_rng" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda_rng"])
    step: int = state["step"]
    return step


class Log:
    """Figures of a run on the terminal and in a file, a line every few seconds."""

    def __init__(self, job: Job, folder: Path, start: int) -> None:
        self._job, self._file = job, folder / f"{job.name}.jsonl"
        self._since = start
        self._at = time.monotonic()
        self._wait_s = self._step_s = 0.0
        self._sums: dict[str, torch.Tensor] = {}

    def waited(self, seconds: float) -> None:
        """Time in which no batch was ready."""
        self._wait_s += seconds

    def add(self, step: int, figures: Mapping[str, torch.Tensor]) -> None:
        """Count a step's figures; show a line now and then. Nothing waits for the device before."""
        for name, value in figures.items():
            value = value.detach()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        if time.monotonic() - self._at > _SHOW_EVERY_S:
            self.show(step, {})

    def show(self, step: int, extra: Mapping[str, float]) -> None:
        """A line for the steps since the last one."""
        count = step + 1 - self._since
        if not count and not extra:
            return
        elapsed = max(1e-9, time.monotonic() - self._at)
        line: dict[str, float] = {"step": step + 1}
        if count:
            line |= {name: float(value) / count for name, value in self._sums.items()}
            line["tokens_per_second"] = round(count * self._job.tokens_per_step / elapsed)
            if self._peak():
                line["mfu"] = count * self._job.flops_per_step / elapsed / self._peak()
            line["waiting_for_data"] = self._wait_s / elapsed
        line |= extra
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        if count:
            self._step_s = elapsed / count
        self._print(step + 1, line)
        self._since, self._at, self._wait_s, self._sums = step + 1, time.monotonic(), 0.0, {}

    def _print(self, done: int, line: Mapping[str, float]) -> None:
        steps = self._job.steps
        filled = _BAR_CELLS * done // steps
        bar = "#" * filled + "." * (_BAR_CELLS - filled)
        words = [f"{k} {v:,.0f}" if v > 100 else f"{k} {v:.4g}" for k, v in line.items()]
        left = (steps - done) * self._step_s
        print(f"{self._job.name} [{bar}] {left:.0f} s left; {', '.join(words)}", flush=True)

    def _peak(self) -> float:
        if not torch.cuda.is_available():
            return 0.0
        return _PEAK_FLOPS.get(torch.cuda.get_device_name(), 0.0)


class _Asked:
    """SIGTERM and Ctrl-C ask for an end after the step; a second one ends at once."""

    def __init__(self) -> None:
        self.stop = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Asked:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.stop:
            sys.exit(128 + number)
        self.stop = True
