"""Processes that are ranks: `start` runs `python -m tests.helpers.rank_process SCENARIO FOLDER`.

RANK, WORLD_SIZE and GPURT_RENDEZVOUS say which one. Ranks and the test tell each other where they
are by files in FOLDER. It ends as the command line does: one line of error, everybody's exit code.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import gpurt
from gpurt.bench.cases_ranks import sums
from gpurt.errors import DeviceError, GpurtError
from gpurt.executors import cuda_driver
from gpurt.graph import Graph
from gpurt.graphs.collectives import all_reduce
from gpurt.graphs.llama import build
from gpurt.loaders import load_model
from gpurt.process_group import ProcessGroup, from_environment
from gpurt.runtime import Runtime
from gpurt.serving import Drafting, encode_chat, model_graph

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 110.0
PROMPT = [504, 55, 282, 49, 314, 33, 34, 35, 33, 34]
QUESTION = "7 years ago Julia was twice as old as Max. Today Max is 15. What is Julia's age?"
BOUNDS = {"rows": 8, "slots": 2, "context": 64}
POLICIES = ("static", "claim", "ready")
STEPS = 6


def wait_for(path: Path) -> None:
    """Until a file is there."""
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.002)


def chooser(group: ProcessGroup, work=lambda _: None, width=8) -> Graph:
    """Makes the tokens 1, 2, 3, ...: the sum over ranks of step / size. work: called with the step,
    from 1, before the rank gives its part, of `width` numbers.
    """
    graph = Graph("choose", context=64, vocab=50, rank=group.rank, rank_count=group.size)
    part, steps = graph.activation("part", [1, width], "f32"), iter(range(1, 64))

    def give(to):
        step = next(steps)
        work(step)
        to.fill(step / group.size)

    graph.task(gpurt.body("give", give), [], [part])
    total = all_reduce(graph, part, group.size)
    graph.task(
        gpurt.body("choose", lambda x, y: np.copyto(y[:1], x[0, :1].astype(np.uint32))),
        [total],
        [graph.sampled],
    )
    return graph


def run(group: ProcessGroup, graph: Graph, before=lambda: None, **options) -> list[int]:
    """All tokens on rank 0; none on the others."""
    with Runtime("host", workers=1, group=group, **options) as runtime:
        runtime.prepare(graph)
        before()
        if group.rank:
            runtime.follow()
            return []
        request = runtime.submit(graph, [1], max_tokens=STEPS)
        tokens = []
        for token in request:
            tokens.append(token)
            print(token, flush=True)
        return tokens


def tokens(group: ProcessGroup, folder: Path) -> None:
    """A llama under each policy; saves tokens and logits of each rank."""
    model = load_model(folder / "model")
    for policy in POLICIES:
        graph = build(model.config, model.weights, tp_size=group.size, tp_rank=group.rank, **BOUNDS)
        with Runtime("host", workers=1, policy=policy, group=group) as runtime:
            runtime.prepare(graph)
            made = []
            if group.rank:
                runtime.follow()
            else:
                requests = [
                    runtime.submit(graph, PROMPT[i:], max_tokens=12, ignore_eos=True)
                    for i in range(3)
                ]
                made = [list(request) for request in requests]
                runtime.park()
            bits = runtime.read(graph, "logits.all")[0].view(np.uint32)
        np.savez(folder / f"{policy}.{group.rank}.npz", tokens=made, bits=bits)


def held(group: ProcessGroup, folder: Path) -> None:
    """The highest rank stands still in step 3 until the file `go` is there."""

    def work(step):
        if group.rank == group.size - 1 and step == 3:
            (folder / "reached").touch()
            wait_for(folder / "go")

    run(group, chooser(group, work), wait_timeout_ms=20_000)


def loading(group: ProcessGroup, folder: Path) -> None:
    """The highest rank is stuck before it prepares its graph."""
    if group.rank == group.size - 1:
        (folder / "reached").touch()
        wait_for(folder / "go")
    run(group, chooser(group))


def late(group: ProcessGroup, folder: Path) -> None:
    """Rank 1 follows once rank 0 has waited for longer than a time-out."""
    graph = chooser(group)
    if group.rank:
        run(group, graph, lambda: wait_for(folder / "go"), wait_timeout_ms=1000)
        return
    with Runtime("host", workers=1, group=group, wait_timeout_ms=1000) as runtime:
        request = runtime.submit(graph, [1], max_tokens=STEPS)
        try:
            request.result(timeout_s=1.2)
        except TimeoutError:
            (folder / "go").touch()
        print(*request, sep="\n")


def failing(group: ProcessGroup, folder: Path) -> None:
    """A body of rank 1 raises in step 2; all ranks go on once they have seen the report."""
    del folder
    failed = []

    def work(step):
        if group.rank == 1 and step == 2:
            raise ValueError("no such luck")

    graph = chooser(group, work)
    with Runtime("host", workers=1, group=group) as runtime:
        runtime.prepare(graph)
        for _ in range(2):
            try:
                if group.rank:
                    runtime.follow()
                else:
                    print(*runtime.submit(graph, [1], max_tokens=2), sep="\n")
            except GpurtError as error:
                failed.append(error)
    raise failed[0]


def nano_bits(devices, group: ProcessGroup | None = None, repeats=5):
    """nano and its drafter on two ranks: tokens of equal requests, and logits of the ranks here."""
    model = load_model("nano")
    prompt = encode_chat(model, [{"role": "user", "content": QUESTION}])
    place = {"tp": 2} if group is None else {"tp": 2, "rank": group.rank}
    with Runtime(devices, group=group) as runtime:
        kind = runtime.config.target.kind
        graph = model_graph(model, kind, context=256, drafting=Drafting("auto"), **place)
        runtime.prepare(graph)
        texts = []
        if group is not None and group.rank:
            runtime.follow()
        else:
            for _ in range(repeats):
                request = runtime.submit(graph, prompt, max_tokens=100, stop_ids=model.stop_ids)
                texts.append(request.result().token_ids)
            runtime.park()
        ranks = runtime._find(graph).executor.ranks
        return texts, [one.read("logits.all")[0].view(np.uint32) for one in ranks]


def nano(group: ProcessGroup, folder: Path) -> None:
    """On the kind of device that the file `device` names; saves what this rank saw."""
    texts, (bits,) = nano_bits((folder / "device").read_text(), group)
    np.savez(folder / f"nano.{group.rank}.npz", tokens=texts, bits=bits)


def nano_staged(group: ProcessGroup, folder: Path) -> None:
    """The same without CUDA IPC."""

    def fail(*_):
        raise DeviceError("no IPC here - at the test - go on")

    cuda_driver.Device.export = fail
    nano(group, folder)


def inputs_and_trace(group: ProcessGroup, folder: Path) -> None:
    """Sums of an input, on the kind of device that the file `device` names; saves what came, and
    what the last request's trace has.
    """
    graph = sums(group.rank, group.size, count=3, floats=64)
    device = (folder / "device").read_text()
    with Runtime(device, workers=1 if device == "host" else None, group=group) as runtime:
        runtime.prepare(graph)
        if group.rank:
            runtime.follow()
            return
        made = []
        for value in (1.0, 2.0):
            given = {"x": np.full((1, 64), value, np.float32)}
            request = runtime.submit(graph, inputs=given, steps=4)
            made.append(request.result().outputs["y"][0])
        trace = request.trace()
        seen = {"ranks": trace.ranks, "error_ns": trace.clock_error_ns}
        np.savez(folder / "seen.npz", made=made, whole=trace.whole_steps, **seen)


def nano_killed(group: ProcessGroup, folder: Path) -> None:
    """A kernel stays on each GPU; rank 0 goes on once the file `go` is there."""
    model = load_model("nano")
    with Runtime((folder / "device").read_text(), resident=True, group=group) as runtime:
        kind = runtime.config.target.kind
        graph = model_graph(model, kind, context=256, tp=2, rank=group.rank)
        runtime.prepare(graph)
        if group.rank:
            runtime.follow()
        for request in range(2):
            print(*runtime.submit(graph, PROMPT[-2:], max_tokens=50), flush=True)
            if request == 0:
                (folder / "reached").touch()
                wait_for(folder / "go")


class Started:
    """Ranks as processes, killed at the end if they are still there."""

    def __init__(self, command: list[str], size: int, meeting: Path) -> None:
        meeting.mkdir()
        self.processes = []
        for rank in range(size):
            names = {"RANK": str(rank), "WORLD_SIZE": str(size), "GPURT_RENDEZVOUS": str(meeting)}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", *command],
                    cwd=ROOT,
                    env=os.environ | names,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def ends(self) -> list[tuple[int, str, str]]:
        """(exit code, stdout, stderr) by rank, once all have ended."""
        rows = []
        for process in self.processes:
            out, err = process.communicate(timeout=WAIT_S)
            rows.append((process.returncode, out, err))
        return rows

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def start(scenario: str, size: int, folder: Path) -> Started:
    """The ranks of a scenario."""
    return Started(["tests.helpers.rank_process", scenario, str(folder)], size, folder / "meeting")


def main() -> int:
    """Run the scenario that the command line names. Returns: the exit code of all ranks."""
    scenario, folder = sys.argv[1:]
    group = from_environment()
    assert group is not None
    code = 0
    try:
        globals()[scenario](group, Path(folder))
    except GpurtError as error:
        print(error, file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    return group.leave(code)


if __name__ == "__main__":
    sys.exit(main())
