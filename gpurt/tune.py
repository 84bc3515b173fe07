"""Tune: measures which policy each kind of operator likes best on this device, and which edges.

Coordinate descent: from all-static, one operator's policy (or the edges) is changed at a time, and
a change is kept if it gains more than noise. Dearest operators first. A candidate is measured in
pairs with the best so far, in alternating order, so that a drifting clock or another process
reaches both. Loading the same plan twice gives two speeds too (where its memory came to lie): the
default is loaded a second time first, and that difference is noise as well. In the end the choice
must beat the default in every one of three fresh loads of both.

    trial   pairs of (best, candidate) -> ratios -> median gain, standard error of the median
    keep    gain > 2 errors, MIN_GAIN, and what a second load made of the default

Bits do not depend on the choice, so nothing but time is compared.
"""

from __future__ import annotations

import datetime
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from gpurt.config import POLICIES
from gpurt.graph import Graph
from gpurt.plan import Plan
from gpurt.profiles import DEFAULT_POLICY, Key, Profile
from gpurt.runtime import Runtime

MIN_GAIN = 0.01  # less is not worth another plan
ERRORS = 2.0  # a gain must exceed so many standard errors
MEDIAN_FACTOR = 1.25  # standard error of a median over that of a mean
PAIRS = 7
RELOADS = 3


class Sampler(Protocol):
    """One choice, loaded."""

    def sample(self) -> float:
        """Microseconds of a step, now."""

    def close(self) -> None:
        """Give the device back."""


@dataclass(frozen=True)
class Choice:
    """Policies by operator name, in the order of names, the rest static; and the kind of edges."""

    policy: tuple[tuple[str, str], ...] = ()
    edges: str = "auto"

    def with_policy(self, operator: str, policy: str) -> Choice:
        """The same with one operator changed."""
        kept = [(name, value) for name, value in self.policy if name != operator]
        if policy != DEFAULT_POLICY:
            kept.append((operator, policy))
        return Choice(tuple(sorted(kept)), self.edges)

    def __str__(self) -> str:
        """As in `attention=ready, edges payload`."""
        chosen = ", ".join(f"{name}={value}" for name, value in self.policy)
        return f"{chosen or 'all static'}, edges {self.edges}"


class Decoding:
    """Decoding under one choice, timed on the device's clock; no kernel stays between samples."""

    def __init__(
        self, graph: Graph, device: str, workers: int, choice: Choice, tokens: int
    ) -> None:
        """Plan and load. tokens: of one sample, two or more. Raises: GpurtError."""
        policy = dict(choice.policy) or DEFAULT_POLICY
        self._graph, self._tokens = graph, tokens
        self._runtime = Runtime(
            device, workers=workers, policy=policy, edges=choice.edges, residency_ms=0
        )
        try:
            self.plan = self._runtime.prepare(graph)
        except BaseException:
            self._runtime.close()
            raise

    def sample(self) -> float:
        """One request of a few prompt tokens."""
        prompt = range(min(8, self._graph.context - self._tokens, self._graph.vocab))
        request = self._runtime.submit(
            self._graph, list(prompt), max_tokens=self._tokens, ignore_eos=True
        )
        request.result()
        timing = request.timing
        self._runtime.park()
        return (timing.end_ns - timing.first_token_ns) / 1e3 / (len(request.tokens) - 1)

    def close(self) -> None:
        """Free the device."""
        self._runtime.close()


def operators_of(plan: Plan) -> list[str]:
    """Names of the graph's operators, dearest first by the planner's model."""
    cost: dict[str, int] = {}
    generated = ("noop", "rearm", "advance")
    for task in plan.tasks:
        op = plan.operators[task.op]
        if op.body not in generated:
            cost[op.name] = cost.get(op.name, 0) + task.cost_ns
    return sorted(cost, key=lambda name: -cost[name])


@dataclass(frozen=True)
class Trial:
    """A candidate beside the best so far. gain, noise: shares of a step's time."""

    choice: Choice
    us: float
    best_us: float
    gain: float
    noise: float
    kept: bool

    def __str__(self) -> str:
        """One line."""
        verdict = "kept" if self.kept else "no"
        times = f"{self.us:.1f} us, best so far {self.best_us:.1f}"
        return f"{self.choice}: {times}, {self.gain:+.1%} (noise {self.noise:.1%}) {verdict}"


@dataclass
class Tuner:
    """One search. open: loads a choice. seconds: when no further trial begins.

    now: a clock in seconds. tell: called with each trial as it ends.
    """

    open: Callable[[Choice], Sampler]
    operators: Sequence[str]
    edges: Sequence[str] = ("auto",)
    seconds: float = 60.0
    pairs: int = PAIRS
    now: Callable[[], float] = time.monotonic
    tell: Callable[[Trial], None] | None = None
    trials: list[Trial] = field(default_factory=list)

    def run(self) -> tuple[Choice, Trial | None]:
        """The best choice, and how it compares with the default; None if nothing was better."""
        deadline = self.now() + self.seconds
        best = default = Choice(edges=self.edges[0])
        sampler = self.open(best)
        try:
            twin, again = self._try(default, sampler, 0.0)
            twin.close()
            for candidate_of in self._changes():
                if self.now() >= deadline:
                    break
                candidate = candidate_of(best)
                if candidate == best:
                    continue
                other, trial = self._try(candidate, sampler, abs(again.gain))
                if trial.kept:
                    sampler, other, best = other, sampler, candidate
                other.close()
        finally:
            sampler.close()
        return (default, None) if best == default else self._confirm(best, default)

    # ---- helpers -----------------------------------------------------------------------------
    def _changes(self) -> Iterator[Callable[[Choice], Choice]]:
        """What is tried, in order: all operators at once, edges, then operator by operator."""
        for policy in POLICIES:
            yield partial(self._all, policy)
        for edges in self.edges[1:]:
            yield partial(replace, edges=edges)
        for operator in self.operators:
            for policy in POLICIES:
                yield partial(Choice.with_policy, operator=operator, policy=policy)

    def _all(self, policy: str, best: Choice) -> Choice:
        for operator in self.operators:
            best = best.with_policy(operator, policy)
        return best

    def _try(self, choice: Choice, best: Sampler, floor: float) -> tuple[Sampler, Trial]:
        """Load a choice and compare it. floor: a gain that another load alone can give."""
        candidate = self.open(choice)
        try:
            trial = _compare(choice, candidate, best, self.pairs, floor)
        except BaseException:
            candidate.close()
            raise
        self._note(trial)
        return candidate, trial

    def _note(self, trial: Trial) -> None:
        self.trials.append(trial)
        if self.tell is not None:
            self.tell(trial)

    def _confirm(self, best: Choice, default: Choice) -> tuple[Choice, Trial | None]:
        """Against the default in fresh loads: of many trials one is lucky, and so is one load."""
        found: list[Trial] = []
        for _ in range(RELOADS):
            base = self.open(default)
            try:
                sampler, trial = self._try(best, base, 0.0)
                sampler.close()
            finally:
                base.close()
            found.append(trial)
        gains = [trial.gain for trial in found]
        noise = max(max(trial.noise for trial in found), (max(gains) - min(gains)) / 2)
        whole = Trial(
            best,
            statistics.median(trial.us for trial in found),
            statistics.median(trial.best_us for trial in found),
            statistics.median(gains),
            noise,
            all(trial.kept for trial in found),
        )
        return (best, whole) if whole.kept else (default, None)


def profile_of(key: Key, choice: Choice, trial: Trial | None, tuner: Tuner, commit: str) -> Profile:
    """What the search found, to be saved."""
    made = datetime.datetime.now(datetime.UTC).replace(microsecond=0, tzinfo=None).isoformat()
    base = tuner.trials[0].best_us if tuner.trials else 0.0
    return Profile(
        key=key,
        policy=dict(choice.policy),
        edges=choice.edges,
        default_us=base if trial is None else trial.best_us,
        us=base if trial is None else trial.us,
        gain=0.0 if trial is None else trial.gain,
        noise=max((t.noise for t in tuner.trials), default=0.0) if trial is None else trial.noise,
        made=made,
        commit=commit,
        trials=tuple(str(t) for t in tuner.trials),
    )


def _compare(choice: Choice, candidate: Sampler, best: Sampler, pairs: int, floor: float) -> Trial:
    """Pairs in alternating order; the first one warms both up and is dropped."""
    ours: list[float] = []
    theirs: list[float] = []
    for turn in range(pairs + 1):
        order = ((candidate, ours), (best, theirs))
        for sampler, times in order if turn % 2 else order[::-1]:
            times.append(sampler.sample())
    ours, theirs = ours[1:], theirs[1:]
    gains = [1 - a / b for a, b in zip(ours, theirs, strict=True)]
    gain, noise = statistics.median(gains), _noise(gains)
    kept = gain > max(MIN_GAIN, ERRORS * noise, floor)
    return Trial(choice, statistics.median(ours), statistics.median(theirs), gain, noise, kept)


def _noise(gains: Sequence[float]) -> float:
    """Standard error of their median, from the middle half: one interruption says little."""
    if len(gains) < 2:
        return math.inf
    low, _, high = statistics.quantiles(gains, n=4)
    return MEDIAN_FACTOR * (high - low) / 1.349 / math.sqrt(len(gains))
