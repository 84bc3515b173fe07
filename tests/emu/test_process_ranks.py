"""Ranks of a process group on emulated GPUs. Both are threads here, each with a Runtime of its own:
what they share goes through tickets and meetings, and lies at another address on each rank.
"""

from __future__ import annotations

import numpy as np
import pytest

from gpurt import ranks
from gpurt.errors import DeviceError
from gpurt.executors.shared import Pages, ProcessMemory
from gpurt.graphs.llama import build
from gpurt.runtime import Runtime
from tests.emu.device import EmulatedDevice
from tests.emu.test_ranks import CONFIG, COUNT, PROMPT, tokens, weights
from tests.helpers.rank_threads import together

OPTIONS = {"rows": 16, "context": 64, "kv_dtype": "bf16", "weight_dtype": "bf16"}


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are asked for; none can reach another's memory without a ticket."""
    monkeypatch.setattr(EmulatedDevice, "open", staticmethod(lambda *_: EmulatedDevice()))


def map_memory(group):
    """Whether symmetric memory lies in pages that hosts share, after it was written across."""
    size = 4096
    pages = Pages(group, size)
    memory = ProcessMemory(group, 0, pages, size)
    staged = memory.addresses[0] == int(pages.symmetric[0].ctypes.data)
    group.exchange("done", None)
    memory.unmap()
    group.exchange("unmapped", None)
    memory.free()
    return staged


def fail(*_):
    raise DeviceError("cuIpcOpenMemHandle failed: no such thing - at device cuda - go home")


def test_memory_is_mapped_by_tickets(tmp_path):
    assert together(tmp_path, 2, map_memory) == [False, False]


@pytest.mark.parametrize("lacking", ["export", "map_exported", "a mapping that works"])
def test_ranks_that_cannot_map_each_others_gpu_meet_in_host_memory(lacking, tmp_path, monkeypatch):
    if lacking in ("export", "map_exported"):
        monkeypatch.setattr(EmulatedDevice, lacking, fail)
    else:
        elsewhere = EmulatedDevice.map_exported

        def claim(self, ticket):
            """Another memory than the ticket's."""
            del ticket
            return elsewhere(self, self.export(self.allocate(1 << 21, "")))

        monkeypatch.setattr(EmulatedDevice, "map_exported", claim)
    assert together(tmp_path, 2, map_memory) == [True, True]


def test_ranks_that_share_nothing_are_refused_with_both_reasons(tmp_path, monkeypatch):
    monkeypatch.setattr(EmulatedDevice, "map_exported", fail)
    monkeypatch.setattr(EmulatedDevice, "register", fail)
    for rank, error in enumerate(together(tmp_path, 2, map_memory)):
        assert str(error).startswith(
            "ranks reach neither each other's GPUs (rank 0, import: cuIpcO"
        )
        assert "nor host memory (rank 0, export: cuIpcOpen" in str(error)
        assert f" - at rank {rank} - " in str(error)


@pytest.mark.parametrize("staged", [False, True])
def test_two_ranks_make_the_bits_of_ranks_of_one_runtime(staged, tmp_path, monkeypatch):
    if staged:
        monkeypatch.setattr(EmulatedDevice, "export", fail)
    monkeypatch.setattr(EmulatedDevice, "can_reach", lambda *_: False, raising=False)
    given = weights(CONFIG)
    graphs = [build(CONFIG, given, tp_size=2, tp_rank=rank, **OPTIONS) for rank in range(2)]
    wanted = tokens(["cuda:0", "cuda:1"], ranks.group(graphs))

    def run(group):
        graph = build(CONFIG, given, tp_size=2, tp_rank=group.rank, **OPTIONS)
        with Runtime("cuda", workers=1, wait_timeout_ms=60_000, group=group) as runtime:
            runtime.prepare(graph)
            seen = None
            if group.rank:
                runtime.follow()
            else:
                seen = list(runtime.submit(graph, PROMPT, max_tokens=COUNT, ignore_eos=True))
                runtime.park()
            return seen, runtime.read(graph, "logits.all")[0]

    (seen, *logits), (_, *others) = together(tmp_path, 2, run)
    assert seen == wanted[0]
    assert np.array_equal(logits + others, wanted[1])
