"""Cases of drafting: a DFlash draft step alone, and the whole step of draft, verify and accept.

Made-up weights accept next to nothing. So a step is timed, which costs the same whatever comes of
it, and what it would make at the report's rate of acceptance is computed and said to be. Each part
alone has the rest of the step as stubs of one or two tasks:

    draft alone    the stream is the embedding, the target's token always 0, its drafter true
    verify alone   the target true, its drafter proposes 15 times token 0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from gpurt.bench import graphs, made_up, models, shapes
from gpurt.bench.case import Case, Side, Workload
from gpurt.bench.machine import Machine
from gpurt.bench.ours import Decode
from gpurt.bench.traffic import step_bytes
from gpurt.buffer import DTYPES
from gpurt.errors import FaultError
from gpurt.graph import Graph
from gpurt.graphs.dflash import DFlashConfig, DraftModel, DraftTarget
from gpurt.graphs.drafters import SCOPE, add_drafter
from gpurt.graphs.muse_spark import PAGE
from gpurt.graphs.muse_spark_config import MuseSparkConfig
from gpurt.graphs.ops.draft_rows import draft_rows
from gpurt.graphs.ops.draft_walk import draft_walk
from gpurt.graphs.ops.embed import embed
from gpurt.graphs.ops.sample import SAMPLE
from gpurt.trace.trace import PHASES

STEPS = 64  # that are timed, at least
ACCEPTED = 6.6  # tokens a step, the bonus one included: the report's, on GSM8K
PARTS = "draft and verify, each alone"
_CHOICES = 64  # logits of the stub of a target


def draft_cases() -> list[Case]:
    """The draft step, and the step that it is a part of."""
    return [
        Case(
            name="draft-slice",
            measures="a DFlash 2 draft step at true size, a TP8 rank's slice, 15 proposals",
            kind="cuda",
            unit="us",
            make=_draft_slice,
            ours=DraftedStep,
            goal=470.0,
        ),
        Case(
            name="muse-step",
            measures="Muse Spark, a TP8 rank's slice: draft of 15, verify of 16, accept",
            kind="cuda",
            unit="us",
            make=_muse_step,
            ours=WholeStep,
            peers={PARTS: Parts},
            beside=False,
            rounds=3,
        ),
    ]


# ---- graphs ----------------------------------------------------------------------------------
def draft_alone(config: DFlashConfig, *, context: int, ranks: int) -> Graph:
    """A rank's share of a drafter. Every tap is the embedding of the step's tokens."""
    config, bf16 = replace(config, taps=(0,) * len(config.taps)), DTYPES["bf16"]
    graph = Graph(
        "muse_draft", rows=config.block, context=context, vocab=config.vocab, rank_count=ranks
    )
    table = graph.weight("embed.table", [config.vocab, config.hidden], bf16, graphs.pending)
    stream = graph.row_activation("embed.s", config.hidden, "f32")
    embed(graph, table, stream, eps=config.eps)
    logits = graph.state("logits", [config.block, _CHOICES], "f32")
    graph.op(SAMPLE, {"logits": logits, "sampled": graph.sampled}, name="sample", vocab=_CHOICES)
    head = graph.weight("head.w", [config.vocab // ranks, config.hidden], bf16, graphs.pending)
    target = DraftTarget([stream], table, head, PAGE, "bf16", bf16, bf16)
    add_drafter(graph, "dflash", config.block - 1, target, _made_up(config))
    made_up.share_matrices(graph)
    return graph


def verify_alone(
    config: MuseSparkConfig, *, rows: int, context: int, ranks: int, routing: str
) -> Graph:
    """A rank's share of a model, each of whose steps verifies a block."""
    graph = models.model_graph(config, rows=rows, context=context, tp_size=ranks, routing=routing)
    with graph.at(SCOPE):
        proposals, table = graph.draft(rows - 1), graph.row_table("draft.rows", rows)
        draft_rows(graph, table, block=rows, mask=0)
        scores = graph.state("draft.scores", [rows, 1], "f32")
        ids = graph.state("draft.ids", [rows, 1], "u32")
        with graph.over(table):
            draft_walk(graph, scores, ids, proposals, top_k=1)
    return graph


def whole_step(
    config: MuseSparkConfig,
    drafter: DFlashConfig,
    *,
    context: int,
    ranks: int,
    routing: str,
) -> Graph:
    """A rank's share of a model and of its drafter, as `gpurt run` builds them."""
    return models.model_graph(
        config,
        rows=drafter.block,
        context=context,
        tp_size=ranks,
        routing=routing,
        draft="dflash",
        draft_model=_made_up(drafter),
    )


# ---- workloads -------------------------------------------------------------------------------
def _draft_slice(small: bool) -> Workload:
    _, config, ranks, step = _sizes(small)
    build = cache(partial(draft_alone, config, context=step["context"], ranks=ranks))
    return _workload(build, step)


def _muse_step(small: bool) -> Workload:
    model, config, ranks, step = _sizes(small)
    given: dict[str, Any] = {"context": step["context"], "ranks": ranks, "routing": "random"}
    settings = {"policy": {"expert_matvec": "claim"}}
    verify = cache(partial(verify_alone, model, rows=config.block, **given))
    parts = (_workload(verify, step, settings), _draft_slice(small))
    whole = _workload(cache(partial(whole_step, model, config, **given)), step, settings)
    return replace(whole, parts=parts)


def _sizes(small: bool) -> tuple[MuseSparkConfig, DFlashConfig, int, dict[str, int]]:
    """Of the model, of its drafter, how many ranks, and where the steps lie."""
    model, drafter = shapes.MUSE_SPARK, shapes.MUSE_DRAFT
    if not small:
        step = {"position": 512, "tokens": STEPS + drafter.block, "context": 2048}
        return model, drafter, shapes.MUSE_RANKS, step
    model = models.small_muse(model)
    return (
        model,
        models.small_draft(drafter, model),
        2,
        {"position": 16, "tokens": 8, "context": 64},
    )


def _workload(
    build: Callable[[], Graph], step: dict[str, int], settings: dict[str, Any] | None = None
) -> Workload:
    return Workload(
        graph=build,
        bytes_moved=lambda: step_bytes(build(), rows=build().rows, position=step["position"]),
        settings=dict(settings or {}),
        step=step,
    )


# ---- sides -----------------------------------------------------------------------------------
class DraftedStep(Decode):
    """The median of decode steps that verify a whole block, in microseconds."""

    def measure(self) -> float:
        """Over one request. Raises: FaultError if no step had a block to verify."""
        request = self._request(self.workload.step["tokens"], self.last)
        request.result()
        self.last, steps = request, request.trace().steps
        full = (steps["phase"] == PHASES.index("decode")) & (steps["rows"] == self.graph.rows)
        if not full.any():
            what = f"none of {len(steps)} steps had {self.graph.rows} rows"
            raise FaultError(
                f"{what} - at bench {self.graph.name} - its drafter proposed too little"
            )
        times = (steps["end_ns"] - steps["begin_ns"])[full]
        return float(np.median(times)) / 1e3

    def note(self) -> str:
        """How long the drafter's tasks took in it, and what came of its proposals."""
        assert self.last is not None
        stats = self.last.stats
        parts = [super().note(), f"{stats.accepted_per_step:.2f} tokens a step of made-up weights"]
        if stats.draft_ms is not None:
            parts.append(
                f"from the first of the drafter's tasks to the last {stats.draft_ms:.3f} ms"
            )
        return "; ".join(parts)


class WholeStep(DraftedStep):
    """The same of draft, verify and accept together."""

    us = 0.0

    def measure(self) -> float:
        """As above."""
        self.us = super().measure()
        return self.us

    def note(self) -> str:
        """Also the tokens a second that are computed from it."""
        rate = f"{ACCEPTED * 1e6 / self.us:.5g} tokens/s"
        return f"{super().note()}; at {ACCEPTED} tokens a step it would be {rate}: computed"


class Parts:
    """The parts of a workload alone, one after another: their times together."""

    def __init__(self, machine: Machine, workload: Workload) -> None:
        """Opens all. Raises: GpurtError."""
        self.sides: list[Side] = []
        try:
            for part in workload.parts:
                self.sides.append(DraftedStep(machine, part, lambda *_: None))
        except BaseException:
            self.close()
            raise

    def measure(self) -> float:
        """The sum, in microseconds."""
        total = 0.0
        for side in self.sides:
            total += side.measure()
            side.rest()
        return total

    def rest(self) -> None:
        """They do, after each measurement."""

    def note(self) -> str:
        """Nothing."""
        return ""

    def close(self) -> None:
        """End all."""
        while self.sides:
            self.sides.pop().close()


# ---- helpers ---------------------------------------------------------------------------------
def _made_up(config: DFlashConfig) -> DraftModel:
    return DraftModel(config, made_up.weights(config))
