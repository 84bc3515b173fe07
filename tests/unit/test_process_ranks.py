"""Ranks that are processes, on the host: threads' tokens; slow, late and dying ones; no trace left.

What a rank does is in tests/helpers/rank_process.py. Ranks are held still by files, never by time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from gpurt.graphs.llama import build
from gpurt.loaders import load_model
from gpurt.ranks import group
from gpurt.runtime import Runtime
from tests.helpers.rank_process import BOUNDS, POLICIES, PROMPT, ROOT, Started, start, wait_for
from tests.helpers.tiny import EIGHT_HEADS, tiny_folder

pytestmark = pytest.mark.timeout(120)

ALL_TOKENS = "1\n2\n3\n4\n5\n6\n"


@pytest.fixture
def model(tmp_path):
    return tiny_folder(tmp_path / "model", **EIGHT_HEADS)


def nothing_is_named(processes):
    """What they share has no name, so nothing can be left of it, however they end."""
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert maps.count("/memfd:gpurt") >= len(processes)
        assert "/dev/shm" not in maps


def is_open(process, path):
    with suppress(FileNotFoundError):  # a file that was closed while we looked
        return any(f.readlink() == path for f in Path(f"/proc/{process.pid}/fd").iterdir())
    return False


def threads(model, count):
    """Tokens and every rank's logits, by ranks that are threads of this process."""
    graphs = [
        build(model.config, model.weights, tp_size=count, tp_rank=rank, **BOUNDS)
        for rank in range(count)
    ]
    graph = group(graphs)
    with Runtime(["host"] * count, workers=1) as runtime:
        requests = [
            runtime.submit(graph, PROMPT[i:], max_tokens=12, ignore_eos=True) for i in range(3)
        ]
        tokens = [list(request) for request in requests]
        runtime.park()
        ranks = runtime._find(graph).executor.ranks
        return tokens, [one.read("logits.all")[0].view(np.uint32) for one in ranks]


@pytest.mark.parametrize("count", [2, 4])
def test_processes_make_the_bits_of_threads(count, model, tmp_path):
    wanted, bits = threads(load_model(model), count)
    with start("tokens", count, tmp_path) as ranks:
        assert ranks.ends() == [(0, "", "")] * count
    for policy in POLICIES:
        for rank in range(count):
            seen = np.load(tmp_path / f"{policy}.{rank}.npz")
            assert np.array_equal(seen["bits"], bits[rank])
            assert rank or seen["tokens"].tolist() == wanted


def test_inputs_reach_both_and_the_trace_has_both(tmp_path):
    (tmp_path / "device").write_text("host")
    with start("inputs_and_trace", 2, tmp_path) as ranks:
        assert ranks.ends() == [(0, "", "")] * 2
    seen = np.load(tmp_path / "seen.npz")
    assert seen["made"].tolist() == [[8.0] * 64, [16.0] * 64]
    assert seen["ranks"] == 2
    assert len(seen["whole"]) >= 3


def test_a_slow_rank_is_waited_for(tmp_path):
    with start("held", 2, tmp_path) as ranks:
        wait_for(tmp_path / "reached")
        first = ranks.processes[0].stdout
        assert first.readline() + first.readline() == "1\n2\n"
        os.set_blocking(first.fileno(), False)
        assert not first.readline()  # a step needs both
        os.set_blocking(first.fileno(), True)
        (tmp_path / "go").touch()
        assert ranks.ends() == [(0, "3\n4\n5\n6\n", ""), (0, "", "")]


def test_a_rank_that_starts_late_is_waited_for_however_long(tmp_path):
    with start("late", 2, tmp_path) as ranks:
        assert ranks.ends() == [(0, ALL_TOKENS, ""), (0, "", "")]


@pytest.mark.parametrize(("scenario", "dead"), [("held", 2), ("held", 0), ("loading", 2)])
def test_a_rank_that_is_killed_ends_all_with_a_report_each(scenario, dead, tmp_path):
    with start(scenario, 3, tmp_path) as ranks:
        wait_for(tmp_path / "reached")
        if scenario == "held":
            nothing_is_named(ranks.processes)
        ranks.processes[dead].kill()
        if dead != 2:  # who holds a body must come to its end
            ranks.processes[dead].wait()
            (tmp_path / "go").touch()
        for rank, (code, _, report) in enumerate(ranks.ends()):
            if rank == dead:
                assert code == -signal.SIGKILL
                continue
            assert code == 2
            assert report.count("\n") == 1
            assert f"the process of rank {dead} " in report
            assert f"rank {rank}" in report


def test_a_body_that_fails_on_one_rank_ends_all_with_a_report_each(tmp_path):
    """And all can go on."""
    with start("failing", 3, tmp_path) as ranks:
        ends = ranks.ends()
    assert [code for code, *_ in ends] == [2, 2, 2]
    assert ends[0][1] == "3\n4\n"  # of the request after
    for rank, (*_, report) in enumerate(ends):
        failed = "task 0 (give), worker 0, raised in step 1" if rank == 1 else "it ended because"
        assert report.startswith(f"rank {rank}: {failed}")
        assert rank == 1 or "because rank 1 gave up" in report


@pytest.mark.parametrize("interrupted", [[0, 1, 2], [0], [1]])
def test_an_interrupt_ends_all_ranks(interrupted, tmp_path):
    with start("held", 3, tmp_path) as ranks:
        wait_for(tmp_path / "reached")
        for rank in interrupted:
            ranks.processes[rank].send_signal(signal.SIGINT)
        (tmp_path / "go").touch()
        ends = ranks.ends()
    assert [code for code, *_ in ends] == [130] * 3
    assert "Traceback" not in "".join(report for *_, report in ends)


def command(model, *more):
    line = ["run", "--model", str(model), "--device", "host", "--prompt-ids", "5,6,7"]
    return [*line, "--max-tokens", "4", "--ignore-eos", "--json", *more]


def test_rank_0_answers_and_all_exit_alike(model, tmp_path):
    one = [sys.executable, "-m", "gpurt", *command(model)]
    wanted = json.loads(subprocess.run(one, capture_output=True, cwd=ROOT, check=True).stdout)
    lines = ["gpurt", *command(model, "--tp", "2")]
    with Started(lines, 2, tmp_path / "meeting") as ranks:
        (code, answer, _), other = ranks.ends()
    assert json.loads(answer)["token_ids"] == wanted["token_ids"]
    assert (code, other) == (0, (0, "", ""))
    with Started(lines[:-2], 2, tmp_path / "without") as ranks:
        ends = ranks.ends()
    for rank, (code, _, report) in enumerate(ends):
        assert code == 2
        assert report.startswith(f"gpurt: rank {rank}: 2 processes, but --tp is 1 - at WORLD_SIZE")


@pytest.mark.parametrize("other", ["lives", "is killed"])
def test_a_rank_that_torchrun_ends_says_why(other, model, tmp_path):
    """SIGTERM, while a model is read: its config is a pipe that says nothing."""
    pipe = model / "config.json"
    pipe.unlink()
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)
    with Started(["gpurt", *command(model, "--tp", "2")], 2, tmp_path / "meeting") as ranks:
        for process in ranks.processes:
            while not is_open(process, pipe):
                time.sleep(0.005)
        if other == "is killed":
            ranks.processes[1].kill()
            ranks.processes[1].wait()
        for process in ranks.processes:
            process.terminate()
        ends = ranks.ends()
    os.close(held)
    if other == "lives":
        told = "told to end (SIGTERM) - at rank"
        assert [code for code, *_ in ends] == [2, 2]
        assert ends[1][2].startswith(f"gpurt: rank 1: {told} 1")
    else:
        told = "the process of rank 1"
        assert ends[0][0] == 2
    assert ends[0][2].startswith(f"gpurt: rank 0: {told} ")


@pytest.mark.reference
def test_torchrun_starts_them(model):
    """With the store of torch.distributed."""
    line = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gpurt"]
    done = subprocess.run(
        [sys.executable, "-m", *line, *command(model, "--tp", "2")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 4
