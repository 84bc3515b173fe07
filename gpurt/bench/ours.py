"""Our sides: graphs under the runtime, with tracing, re-arm, abort exits and watchdog on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpurt.bench.case import Workload
from gpurt.bench.experts import chosen_experts, experts_note
from gpurt.bench.host_memory import peak_bytes, reset_peak
from gpurt.bench.machine import Machine
from gpurt.bench.traffic import step_bytes
from gpurt.errors import FaultError
from gpurt.graph import Graph
from gpurt.plan import Plan
from gpurt.progress import Progress
from gpurt.request import Request
from gpurt.runtime import Runtime
from gpurt.trace import analysis
from gpurt.trace.spans import end_ns

_WARM_TOKENS = 4
_LAUNCH_REQUESTS = 20


def prompt_ids(position: int, tokens: int, vocab: int) -> list[int]:
    """A prompt after which `tokens` tokens lie around `position`."""
    count = max(1, position - tokens // 2)
    return [int(t) for t in np.random.default_rng(1).integers(0, vocab, count)]


class Ours:
    """A workload's graph, loaded. Subclasses say what is measured."""

    def __init__(self, machine: Machine, workload: Workload, progress: Progress) -> None:
        """Plan, load and warm up. Raises: GpurtError."""
        assert workload.graph is not None
        progress("building the graph", 0, 1)
        self.workload, self.graph = workload, workload.graph()
        self.runtime = Runtime(
            self.place(machine), workers=machine.target.workers, residency_ms=0, **workload.settings
        )
        try:
            reset_peak()
            self.plan: Plan = self.runtime.prepare(self.graph, progress=progress)
            self.load_peak_bytes = peak_bytes()
            progress("warming up", 0, 1)
            self.warm_up()
        except BaseException:
            self.runtime.close()
            raise

    def place(self, machine: Machine) -> str | Sequence[str]:
        """The device, or one for each rank."""
        return "host" if machine.kind == "host" else "cuda:0"

    def warm_up(self) -> None:
        """Run once, so that the first figure is like the others."""
        self.measure()
        self.rest()

    def measure(self) -> float:
        """One figure."""
        raise NotImplementedError

    def rest(self) -> None:
        """No kernel stays on the device."""
        self.runtime.park()

    def note(self) -> str:
        """The plan's size, the policy, what loading took of the host, and experts of a step."""
        policy = self.runtime.config.policy
        chosen = (
            policy if isinstance(policy, str) else ",".join(f"{k}={v}" for k, v in policy.items())
        )
        parts = [
            f"{len(self.plan.tasks)} tasks, {chosen}, edges {self.runtime.config.edges}",
            f"host memory {self.load_peak_bytes / 1e9:.1f} GB at most while loading",
            f"{self.runtime.launches} launches in all",
            self._experts(),
        ]
        return "; ".join(part for part in parts if part)

    def _experts(self) -> str:
        """Those of the last step, and the bytes that such a step moves."""
        chosen = chosen_experts(self.runtime, self.graph)
        if not chosen:
            return ""
        mean, rows = sum(chosen) / len(chosen), self.graph.rows
        position = self.workload.step.get("position", 0)
        moved = step_bytes(self.graph, rows=rows, position=position, live=mean)
        return f"{experts_note(chosen)}: {moved / 1e6:.6g} MB a step"

    def close(self) -> None:
        """End the kernel and free the device."""
        self.runtime.close()


class Steps(Ours):
    """A graph without tokens: microseconds of one step, or of the part of it that `per` names.

    Time is the device's own, from the admission of the request to its end.
    """

    def measure(self) -> float:
        """Microseconds."""
        count = self.workload.step["steps"]
        inputs = {name: _content(self.graph, name) for name in self.graph.inputs}
        request = self.runtime.submit(self.graph, inputs=inputs, steps=count)
        self._check(request)
        timing = request.timing
        return (timing.end_ns - timing.begin_ns) / 1e3 / count / self.workload.per

    def _check(self, request: Request) -> None:
        """Every run gives the same bits. Raises: FaultError."""
        outputs = request.result().outputs
        want = self.__dict__.setdefault("_want", outputs)
        for name, array in outputs.items():
            if not np.array_equal(_bits(array), _bits(want[name])):
                msg = f"{name} differs from run to run - at bench {self.graph.name}"
                raise FaultError(f"{msg} - report it: no figure of a wrong run counts")


class Bandwidth(Steps):
    """The same as GB/s of the workload's bytes."""

    def measure(self) -> float:
        """GB/s."""
        us = super().measure()
        return self.bytes_moved() / self.workload.per / us / 1e3

    def bytes_moved(self) -> int:
        """Of one step; of experts, those that the step really chose."""
        live = chosen_experts(self.runtime, self.graph)
        mean = sum(live) / max(len(live), 1)
        return step_bytes(self.graph, rows=self.graph.rows, live=mean)


class Decode(Ours):
    """Greedy decoding: microseconds a token around `position`, or tokens a second.

    Prompts begin alike, so what the first one left in the cache is not computed again.
    """

    tokens_per_s = False
    last: Request | None = None

    def warm_up(self) -> None:
        """A short request."""
        self.last = self._request(_WARM_TOKENS)
        self.last.result()
        self.rest()

    def measure(self) -> float:
        """From the first token to the last, on the device's clock."""
        request = self._request(self.workload.step["tokens"], self.last)
        request.result()
        self.last = request
        timing, count = request.timing, len(request.tokens) - 1
        us = (timing.end_ns - timing.first_token_ns) / 1e3 / count
        return 1e6 / us if self.tokens_per_s else us

    def note(self) -> str:
        """Also what the critical path of a typical step is made of."""
        return "; ".join(part for part in (super().note(), self._path()) if part)

    def _request(self, tokens: int, after: Request | None = None) -> Request:
        ids = prompt_ids(self.workload.step["position"], tokens, self.graph.vocab)
        given: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "after": after}
        return self.runtime.submit(self.graph, ids, **given)

    def _path(self) -> str:
        """Shares of compute, stall, hop, ... on the critical path, in microseconds."""
        from gpurt.errors import TraceError

        try:
            assert self.last is not None
            trace = self.last.trace()
            parts = analysis.path_parts(trace, analysis.typical_step(trace))
        except TraceError as error:
            return f"no trace: {error}"
        return "path " + ", ".join(f"{name} {ns / 1e3:.1f} us" for name, ns in parts.items())


class AttentionPath(Decode):
    """What attention adds to the critical path of a decode step, in microseconds a layer."""

    def measure(self) -> float:
        """Of the typical step of one request."""
        super().measure()
        assert self.last is not None
        trace = self.last.trace()
        path = analysis.critical_path(trace, analysis.typical_step(trace))
        ends = end_ns(path).astype(np.int64)
        added = np.diff(ends, prepend=ends[0])
        bodies = [trace.operators[int(span["op"])].body for span in path]
        of_attention = [body in ("attention", "attention_merge") for body in bodies]
        return float(added[of_attention].sum()) / 1e3 / self.workload.per


class DecodeRate(Decode):
    """The same in tokens a second."""

    tokens_per_s = True


class Verify(Decode):
    """Steps of all rows of one sequence, as a verify step has them: a long prompt's steps."""

    def warm_up(self) -> None:
        """A few steps."""
        self._steps(4)
        self.rest()

    def measure(self) -> float:
        """The median of the steps around `position`, in microseconds."""
        rows, position = self.graph.rows, self.workload.step["position"]
        count = self.workload.step["tokens"]
        times = self._steps(position // rows + count // 2)
        return float(np.median(times[-count:]))

    def _steps(self, count: int) -> Any:
        rows = self.graph.rows
        ids = prompt_ids(count * rows, 0, self.graph.vocab)
        self.last = self.runtime.submit(self.graph, ids, max_tokens=1, ignore_eos=True)
        self.last.result()
        return analysis.step_times_us(self.last.trace(), "prefill")


class FirstToken(Ours):
    """Microseconds from a request's admission to its first token, for a prompt of `position`."""

    def measure(self) -> float:
        """On the device's clock."""
        ids = prompt_ids(self.workload.step["position"], 0, self.graph.vocab)
        request = self.runtime.submit(self.graph, ids, max_tokens=1, ignore_eos=True)
        request.result()
        return (request.timing.first_token_ns - request.timing.begin_ns) / 1e3


class Steady(Decode):
    """The 99th percentile of `tokens` decode steps, in microseconds."""

    def warm_up(self) -> None:
        """Decode for a while: clocks settle."""
        self._request(self.workload.step["tokens"] // 4).result()
        self.rest()

    def measure(self) -> float:
        """Over one request."""
        self.last = self._request(self.workload.step["tokens"])
        self.last.result()
        times = analysis.step_times_us(self.last.trace(), "decode")
        self.median = float(np.median(times))
        return float(np.percentile(times, 99))

    def note(self) -> str:
        """The median that it is held against."""
        return f"{super().note()}; median {self.median:.5g} us"


class Launches(Decode):
    """Requests to a kernel that stays: microseconds of one; none may launch anything."""

    def __init__(self, machine: Machine, workload: Workload, progress: Progress) -> None:
        """As Ours, resident."""
        workload.settings["resident"] = True
        self.launched = 0
        super().__init__(machine, workload, progress)

    def warm_up(self) -> None:
        """The launch that is not counted."""
        self._request(_WARM_TOKENS).result()

    def rest(self) -> None:
        """The kernel stays."""

    def measure(self) -> float:
        """Wall clock of one request of a batch, submit to last token. Raises: FaultError."""
        before, began = self.runtime.launches, time.perf_counter()
        for _ in range(_LAUNCH_REQUESTS):
            self.last = self._request(self.workload.step["tokens"])
            self.last.result()
        us = (time.perf_counter() - began) * 1e6 / _LAUNCH_REQUESTS
        self.launched += self.runtime.launches - before
        if self.launched:
            what = f"{self.launched} launches in {_LAUNCH_REQUESTS} requests to a resident kernel"
            raise FaultError(f"{what} - at bench launches - there must be none")
        return us

    def note(self) -> str:
        """The count."""
        return f"{self.launched} launches a request; {_LAUNCH_REQUESTS} requests a round"


# ---- helpers ---------------------------------------------------------------------------------
def _content(graph: Graph, name: str) -> Any:
    shape = graph.inputs[name].shape
    return np.random.default_rng(shape[-1]).standard_normal(shape, np.float32)


def _bits(array: Any) -> Any:
    return np.ascontiguousarray(array).view(np.uint8)
