"""Cases of two GPUs against one: a decode step of one model, both in the same run.

A figure is the step of two ranks, its floor the bytes of one rank's share: the other reads its own
at the same time. The note has the step of one GPU and how many times two are as fast. What is asked
is 1.6 times where a step reads more than 10 GB.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from gpurt.bench import models, shapes
from gpurt.bench.case import Case, Workload
from gpurt.bench.machine import Machine, UnavailableError
from gpurt.bench.ours import Decode
from gpurt.bench.traffic import step_bytes
from gpurt.graph import Graph
from gpurt.graphs.llama import LlamaConfig
from gpurt.loaders.model import ModelConfig
from gpurt.progress import Progress
from gpurt.ranks import group
from gpurt.serving import DEFAULT_ROWS

RANKS = 2
POSITION, TOKENS, CONTEXT = 512, 64, 1024
MUSE_LAYERS = 4  # of its 62; of one kind each slides, and the fourth is global


def speedup_cases() -> list[Case]:
    """By the bytes that a step reads."""
    cut = shapes.muse_layers(shapes.MUSE_SPARK, 2, MUSE_LAYERS)
    small, claim = models.small_muse(shapes.MUSE_SPARK), {"expert_matvec": "claim"}
    return [
        _llama("qwen3-0.6b", shapes.QWEN3_06B, "Qwen3-0.6B's shape"),
        _llama("llama-1b", shapes.LLAMA_1B, "Llama-3.2-1B's shape"),
        _case("muse-4", cut, small, f"{MUSE_LAYERS} layers of Muse Spark", 1, {"policy": claim}),
        _llama("llama-8b", shapes.LLAMA_8B, "Llama-3.1-8B's shape"),
    ]


class Pair(Decode):
    """Microseconds of a step of two ranks, by turns with the step of one GPU."""

    def __init__(self, machine: Machine, workload: Workload, progress: Progress) -> None:
        """Plan and load both. Raises: UnavailableError without two devices; GpurtError."""
        self.steps: list[tuple[float, float]] = []
        super().__init__(machine, workload, progress)
        try:
            self.alone = Decode(machine, workload.parts[0], progress)
        except BaseException:
            self.close()
            raise
        self.floor_us = machine.floor_us(workload.bytes_moved())

    def place(self, machine: Machine) -> str | Sequence[str]:
        """Two devices."""
        from gpurt.doctor import probe_cuda

        if machine.kind == "host":
            return ["host"] * RANKS
        for device in range(RANKS):
            if not (probe := probe_cuda(device)).usable:
                raise UnavailableError(f"no usable GPU {device}: {probe.reason}")
        return [f"cuda:{device}" for device in range(RANKS)]

    def measure(self) -> float:
        """Of the ranks; that of one GPU is kept for the note."""
        alone = self.alone.measure()
        self.alone.rest()
        together = super().measure()
        self.steps.append((alone, together))
        return together

    def note(self) -> str:
        """Both steps, what two GPUs gain, and the share of their bandwidth."""
        alone, together = (statistics.median(step) for step in zip(*self.steps, strict=True))
        gains = [one / two for one, two in self.steps]
        said = (
            f"one GPU {alone:.5g} us, two {together:.5g} us: {alone / together:.3g} times as fast"
            f" ({min(gains):.3g} to {max(gains):.3g})"
            f", {self.floor_us / together:.1%} of both GPUs' bandwidth"
        )
        return f"{said}; {super().note()}"

    def close(self) -> None:
        """Both."""
        super().close()
        if hasattr(self, "alone"):
            self.alone.close()


# ---- helpers ---------------------------------------------------------------------------------
def _llama(name: str, config: LlamaConfig, what: str) -> Case:
    return _case(name, config, models.small_model(config), what, DEFAULT_ROWS["cuda"], {})


def _case(
    name: str,
    config: ModelConfig,
    small_config: ModelConfig,
    what: str,
    rows: int,
    settings: dict[str, Any],
) -> Case:
    def make(small: bool) -> Workload:
        chosen = small_config if small else config
        at, tokens, context = (32, 8, 64) if small else (POSITION, TOKENS, CONTEXT)
        build = partial(models.model_graph, chosen, rows=rows, context=context)
        ours = dict(settings)

        def workload(graph: Callable[[], Graph], *parts: Workload) -> Workload:
            return Workload(
                graph=graph,
                bytes_moved=lambda: step_bytes(graph(), position=at),
                settings=ours,
                step={"position": at, "tokens": tokens, "context": context},
                config=chosen,
                parts=parts,
            )

        return workload(cache(partial(_ranks, build)), workload(cache(build)))

    return Case(
        name=f"tp2-{name}",
        measures=f"{what}, bf16, greedy, batch 1, at position {POSITION}: over two GPUs",
        kind="cuda",
        unit="us",
        make=make,
        ours=Pair,
        rounds=3,
    )


def _ranks(build: Callable[..., Graph]) -> Graph:
    return group([build(tp_size=RANKS, tp_rank=rank) for rank in range(RANKS)])
