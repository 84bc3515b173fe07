"""Process groups: how ranks meet, what they say when they do not, and how they leave."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpurt import process_group
from gpurt.errors import ConfigError, RankError
from gpurt.process_group import FolderStore, ProcessGroup, find_place, from_environment

pytestmark = pytest.mark.timeout(60)


def together(size, act):
    """What `act(rank)` gives on each rank, in a thread each; or the error it raised."""

    def run(rank):
        try:
            return act(rank)
        except (ConfigError, RankError) as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.fixture
def groups(tmp_path):
    """Three ranks, all in this process."""
    store = FolderStore(tmp_path)
    return together(3, lambda rank: ProcessGroup(store, rank, 3, timeout_s=30))


def test_ranks_give_each_other_values_in_the_order_of_their_calls(groups):
    for what in ("one", "two"):
        seen = together(3, lambda rank, what=what: groups[rank].exchange(what, [what, rank]))
        assert seen == [[[what, 0], [what, 1], [what, 2]]] * 3


def test_ranks_at_different_things_are_told_so(groups):
    seen = together(3, lambda rank: groups[rank].exchange("plan b" if rank == 1 else "plan a", 0))
    assert str(seen[0]).startswith("rank 1 is at 'plan b', rank 0 at 'plan a' - at meeting 2 - ")
    assert str(seen[1]).startswith("rank 0 is at 'plan a', rank 1 at 'plan b'")


def test_a_rank_that_does_not_come_is_named(tmp_path):
    with pytest.raises(RankError, match=r"^rank 1 did not come within 0\.05 s - at rank 0, join"):
        ProcessGroup(FolderStore(tmp_path), 0, 2, timeout_s=0.05)


def test_who_waits_for_a_rank_that_has_left_is_told(groups):
    left = threading.Thread(target=lambda: groups[1].leave(2))
    left.start()
    with pytest.raises(RankError, match=r"^rank 1 has left - at rank 0, plan"):
        groups[0].exchange("plan", None)
    codes = together(3, lambda rank: None if rank == 1 else groups[rank].leave(0))
    left.join()
    assert codes == [2, None, 2]


def test_ranks_of_another_machine_are_refused(tmp_path):
    store = FolderStore(tmp_path)

    def join(rank):
        if rank == 1:
            store.set("gpurt/1/1", b'["join", ["another boot", 1]]')
            return None
        return ProcessGroup(store, 0, 2, timeout_s=30)

    seen = together(2, join)
    assert str(seen[0]).startswith("rank 1 runs on another machine or in another container - at ra")


def test_the_end_of_a_process_is_seen_however_it_ended(tmp_path):
    store = FolderStore(tmp_path)
    code = (
        "import sys, pathlib; from gpurt.process_group import FolderStore, ProcessGroup\n"
        "ProcessGroup(FolderStore(pathlib.Path(sys.argv[1])), 1, 2); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        group = ProcessGroup(store, 0, 2, timeout_s=30)
        assert group.lost() is None
        child.kill()
    assert group.lost() == 1
    with pytest.raises(RankError, match=rf"^the process of rank 1 \({child.pid}\) is gone - at ra"):
        group.exchange("plan", None)
    assert group.leave(0) == 2


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, r"^RANK is 'x' - at the environment"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, r"^RANK is 0 of 2, but neither MASTER_ADDR nor GPURT"),
        ({"RANK": "2", "WORLD_SIZE": "2", "GPURT_RENDEZVOUS": "."}, r"^rank 2 of 2 - at the env"),
        ({"RANK": "0", "WORLD_SIZE": "2", "GPURT_RENDEZVOUS": "/none"}, r"^no such folder - at /"),
    ],
)
def test_an_environment_that_names_no_group_is_refused(variables, what, monkeypatch):
    monkeypatch.setattr(process_group, "_joined", [])
    with pytest.raises(ConfigError, match=what):
        from_environment(variables)


def test_one_process_is_no_group():
    assert from_environment({}) is None
    assert from_environment({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert find_place({"RANK": "1", "WORLD_SIZE": "2"}) == (1, 2)
