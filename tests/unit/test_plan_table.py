"""print(plan): what a reader needs is on it, and a long plan stays on one screen."""

from __future__ import annotations

from gpurt.body import Target
from gpurt.planner import plan
from tests.helpers.random_graphs import CUDA, POLLING
from tests.unit.test_check_plan import chain
from tests.unit.test_plan import llama


def test_table_has_operators_edges_load_and_memory():
    made = plan(llama(layers=1), Target("host", 2), policy={"attention": "ready"})
    lines = str(made).splitlines()
    assert lines[0] == "plan llama: host, 2 workers; 4 rows, 2 slots, context 128, vocab 96"
    moved = sum(t.cost_bytes for t in made.tasks)
    assert f"{moved / 1e6:.1f} MB a step" in lines[2]
    (row,) = [line.split() for line in lines if line.startswith("attention")]
    assert row[:5] == ["attention", "attention", "0", "ready", "3"]
    starts = ("segments: static", "edges: counter", "load: static us", "weight", "state", "step")
    for start in starts:
        assert any(line.startswith(start) for line in lines), start


def test_bandwidth_gives_the_floor_of_a_step():
    made = plan(llama(layers=1), Target("host", 2))
    moved = sum(t.cost_bytes for t in made.tasks)
    assert f"floor {moved / 10e9 * 1e6:.1f} us at 10 GB/s" in made.describe(10e9)
    assert "floor" not in made.describe()


def test_deep_model_is_folded_by_operator_name():
    text = str(plan(llama(layers=30), Target("host", 2)))
    assert len(text.splitlines()) < 40
    (row,) = [line.split() for line in text.splitlines() if line.startswith("attention")]
    assert row[2] == "0-29"


def test_payload_edges_and_both_sets_are_shown():
    text = str(plan(chain(POLLING), CUDA, edges="payload"))
    assert text.startswith("plan chain: cuda sm_90a, 7 workers of 16 warps;")
    assert "payload 2 pairs, 8 waits; 8 tasks poll" in text
    assert "payload        3  2 x 768 B" in text
