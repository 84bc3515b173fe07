"""A double of an executor: one Python thread that follows the submission protocol, no native code.

Its "model" answers a prompt with (sum of the prompt + i) % vocab. It shows the host side
(gpurt/runtime.py, gpurt/session.py) every order that a kernel may show, on command: it can be held
between two tokens, leave a fault, vanish, or end with requests queued.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from gpurt import wire
from gpurt.body import Target
from gpurt.executors.base import Options, RawTrace
from gpurt.plan import (
    TASK_ADVANCE,
    Plan,
    PlanCounter,
    PlanOperator,
    PlanSegment,
    PlanTask,
)


def toy_plan(graph, workers=2):
    """first (worker 0) -> second (worker 1) -> advance (worker 0)."""
    names = ("first", "second", "advance")
    tasks = tuple(
        PlanTask(
            op=i,
            body="noop" if i < 2 else "advance",
            coords=(0, 0, 0, 0),
            flags=TASK_ADVANCE if i == 2 else 0,
            waits=() if i == 0 else ((i - 1, 1),),
            signals=(i,) if i < 2 else (),
            addr=(),
            payload_mask=0,
            params=(),
            stream=None,
            layer=i,
            reads=(),
            writes=(),
            cost_ns=1000,
        )
        for i in range(3)
    )
    return Plan(
        version=1,
        name=graph.name,
        target=Target("host", workers),
        rows=graph.rows,
        slots=graph.slots,
        context=graph.context,
        vocab=graph.vocab,
        buffers=(),
        operators=tuple(
            PlanOperator(n, tasks[i].body, f"{graph.name}.{n}", i, "static")
            for i, n in enumerate(names)
        ),
        tasks=tasks,
        counters=(PlanCounter(1, (0,), ()), PlanCounter(1, (1,), ())),
        segments=(PlanSegment("static", 0, 3),),
        lists=(((0, 2),), ((1,),)),
        edges=(),
    )


class FakeView:
    """HostView without native code; one lock stands for every fence."""

    def __init__(self, queue, context):
        self.lock = threading.Condition()
        self.control = np.zeros((), wire.HOST_CONTROL)
        self.requests = np.zeros(queue, wire.REQUEST_RECORD)
        self.outputs = np.zeros(queue, wire.REQUEST_OUTPUT)
        self.prompt_tokens = np.zeros((queue, context), np.uint32)
        self.output_tokens = np.zeros((queue, context), np.uint32)
        self.peers = ()

    def publish(self, tail):
        with self.lock:
            self.control["submit_tail"] = tail
            self.lock.notify_all()
        return self.kernel_state() == wire.KernelState.RUNNING

    def cancel(self, entry):
        with self.lock:
            self.requests["cancel"][entry] = 1
            self.lock.notify_all()

    def request_exit(self):
        with self.lock:
            self.control["exit_request"] = 1
            self.lock.notify_all()

    def request_abort(self):
        with self.lock:
            self.control["abort_request"] = 1
            self.lock.notify_all()

    def kernel_state(self):
        return wire.KernelState(int(self.control["kernel_state"]))

    def wait_output(self, entry, seen_count, timeout_s):
        deadline = time.monotonic() + timeout_s
        with self.lock:
            while True:
                count = int(self.outputs["token_count"][entry])
                finish = int(self.outputs["finish_reason"][entry])
                left = deadline - time.monotonic()
                if count > seen_count or finish or left <= 0:
                    return count, wire.FinishReason(finish)
                self.lock.wait(left)

    def own_fault(self):
        return self.fault()

    def fault(self):
        if int(self.control["fault"]["kind"]) == 0:
            return None
        return np.array(self.control["fault"])


class FakeExecutor:
    """Thread-safe as the protocol asks. `hold()` stops it before the next token or step."""

    def __init__(self, plan, graph, options=None):
        self.plan, self.graph = plan, graph
        self.options = options or Options()
        self.host = FakeView(self.options.queue_capacity, plan.context)
        self.launches = 0
        self.closed = False
        self.residency_over = False  # end before the next request, whatever is queued
        self.fault_record = None  # left before the next token
        self.ending_s = 0.0  # from ENDING to the end
        self.vanish = False  # end without a word before the next token
        self.launch_error = None
        self.body_error = None
        self.buffers = {
            b.name: np.zeros(b.shape, b.dtype.storage) for b in graph.buffers if b.role == "state"
        }
        self.step = None  # function(buffers) of a plain graph
        self._held = False
        self._thread = None
        self._spans = []

    # ---- commands of a test ------------------------------------------------------------------
    def hold(self):
        with self.host.lock:
            self._held = True

    def release(self):
        with self.host.lock:
            self._held = False
            self.host.lock.notify_all()

    # ---- Executor ----------------------------------------------------------------------------
    @property
    def ranks(self):
        return (self,)

    def launch(self):
        assert not self.running()
        if self.launch_error is not None:
            raise self.launch_error
        control = self.host.control
        control["exit_request"] = control["abort_request"] = 0
        control["kernel_state"] = wire.KernelState.ABSENT
        control["fault"] = np.zeros((), wire.FAULT)
        self.launches += 1
        self._spans = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def running(self):
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout_s):
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.running()

    def read(self, buffer_name):
        return self.buffers[buffer_name].copy()

    def write(self, buffer_name, array):
        self.buffers[buffer_name][...] = array

    def counters(self):
        return np.zeros(len(self.plan.counters), np.uint64)

    def fault_cause(self):
        return self.body_error

    def raw_trace(self):
        own = [[(*s[:-1], 0) for s in self._spans if s[-1] == w] for w in (0, 1)]
        spans = [np.array(rows, wire.SPAN) for rows in own]
        steps = sorted({s[2] for s in self._spans})
        rows = [(s, s * 400, s * 400 + 300, 1, 2, 0) for s in steps]
        summaries = np.array(rows, wire.STEP_SUMMARY)
        empty = [np.zeros(0, wire.SPAN)] * 2
        return RawTrace(spans if self.options.trace else empty, empty, summaries, 1.0, 0)

    def raw_traces(self):
        return [self.raw_trace()]

    def close(self):
        self.host.request_abort()
        assert self.join(10)
        self.closed = True

    # ---- the kernel --------------------------------------------------------------------------
    def _run(self):
        view, control = self.host, self.host.control
        step, idle_since = 0, time.monotonic()
        with view.lock:
            control["kernel_state"] = wire.KernelState.RUNNING
        while True:
            with view.lock:
                if control["abort_request"]:
                    return
                queued = control["submit_head"] < control["submit_tail"]
                linger = 1e9 if self.options.resident else self.options.linger_ms / 1e3
                late = time.monotonic() - idle_since >= linger
                if control["exit_request"] or self.residency_over or (late and not queued):
                    control["kernel_state"] = wire.KernelState.ENDING
                    self.residency_over = False
                    view.lock.wait(self.ending_s)
                    return
                if not queued:
                    view.lock.wait(max(0.001, linger - (time.monotonic() - idle_since)))
                    continue
                entry = int(control["submit_head"]) % len(view.requests)
                control["submit_head"] += 1
            step = self._serve(entry, step)
            if step is None:
                return
            idle_since = time.monotonic()

    def _serve(self, entry, step):
        view = self.host
        record, out = view.requests[entry], view.outputs[entry : entry + 1]
        total = int(view.prompt_tokens[entry, : record["prompt_tokens"]].sum())
        with view.lock:
            out["begin_ns"], out["first_step"] = time.monotonic_ns(), step
        reason, made = None, 0
        while reason is None:
            with view.lock:
                while self._held and not view.control["abort_request"] and not record["cancel"]:
                    view.lock.wait()
                if view.control["abort_request"] or self.vanish:
                    return None
                if self.fault_record is not None:
                    view.control["fault"] = self.fault_record
                    self._spans.append((step * 400, 0, step, 5, 0, 80, 0))
                    return None
                reason = self._one_step(entry, record, out, total, made, step)
                made, step = made + 1, step + 1
                if reason is not None:
                    out["steps"], out["last_step"] = made, step - 1
                    out["end_ns"] = time.monotonic_ns()
                    out["finish_reason"] = reason
                view.control["heartbeat"] += 1
                view.lock.notify_all()
        return step

    def _one_step(self, entry, record, out, total, made, step):
        if record["cancel"]:
            return wire.FinishReason.CANCELLED
        for task in range(3):
            begin, worker = step * 400 + task * 100, task & 1
            self._spans.append((begin, task, step, 5 if task else 0, 0, 80, worker))
        if record["kind"] == wire.RequestKind.STEPS:
            if self.step is not None:
                self.step(self.buffers)
            return wire.FinishReason.STEPS if made + 1 == record["max_tokens"] else None
        token = (total + made) % self.plan.vocab
        self.host.output_tokens[entry, made] = token
        if made == 0:
            out["first_token_ns"] = time.monotonic_ns()
        out["token_count"] = made + 1
        stops = record["stop_ids"][: record["stop_count"]]
        if token in stops and not record["flags"] & wire.RequestFlags.IGNORE_STOP:
            return wire.FinishReason.STOP
        return wire.FinishReason.LENGTH if made + 1 == record["max_tokens"] else None
