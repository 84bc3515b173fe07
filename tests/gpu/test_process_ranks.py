"""Two processes on two GPUs: the bits of threads of one process, by CUDA IPC and through the host's
memory; a process that is killed ends the other, whose kernel is resident.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpurt.doctor import probe_cuda
from tests.helpers.rank_process import nano_bits, start, wait_for

pytestmark = [
    pytest.mark.skipif(not probe_cuda(1).usable, reason="needs two GPUs"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "device").write_text("cuda")
    return tmp_path


@pytest.fixture(scope="module")
def threads():
    return nano_bits(["cuda:0", "cuda:1"], repeats=1)


@pytest.mark.parametrize("scenario", ["nano", "nano_staged"])
def test_processes_make_the_bits_of_threads_and_repeat_them(scenario, threads, folder) -> None:
    (wanted,), bits = threads
    with start(scenario, 2, folder) as ranks:
        ends = ranks.ends()
    told = "no IPC here" if scenario == "nano_staged" else ""
    for rank, (code, _, report) in enumerate(ends):
        assert code == 0, report
        assert told in report
        seen = np.load(folder / f"nano.{rank}.npz")
        assert np.array_equal(seen["bits"], bits[rank])
        assert rank or seen["tokens"].tolist() == [wanted] * 5


def test_inputs_reach_both_and_the_trace_has_both_on_one_clock(folder) -> None:
    with start("inputs_and_trace", 2, folder) as ranks:
        for code, _, report in ranks.ends():
            assert code == 0, report
    seen = np.load(folder / "seen.npz")
    assert seen["made"].tolist() == [[8.0] * 64, [16.0] * 64]
    assert seen["ranks"] == 2
    assert len(seen["whole"]) >= 3
    assert 0 < seen["error_ns"] < 20_000


def test_a_rank_that_is_killed_ends_the_other_with_its_report(folder) -> None:
    with start("nano_killed", 2, folder) as ranks:
        wait_for(folder / "reached")
        ranks.processes[1].kill()
        ranks.processes[1].wait()
        (folder / "go").touch()
        (code, _, report), _ = ranks.ends()
    assert code == 2, report
    assert "the process of rank 1 " in report
