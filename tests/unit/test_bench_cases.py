"""The bench's cases without a GPU: each is named, plans, counts its bytes, and runs when small."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from gpurt.bench import cases, cases_draft, graphs, host_memory, made_up, models, shapes
from gpurt.bench.case import Case, Workload
from gpurt.bench.machine import Machine
from gpurt.bench.traffic import expected_live, step_bytes
from gpurt.body import Target
from gpurt.buffer import DTYPES
from gpurt.errors import ConfigError, FaultError, GraphError
from gpurt.executors.cuda_compile import GENERATED, compile_source, generate_header
from gpurt.plan import Plan
from gpurt.planner import plan
from tests.gpu import one_task

H200 = Target("cuda", 132, 16, "sm_90a", 232448, 60 << 20)
HOST = Machine("host", "test", Target("host", 2), "", "", "abc", "2026-01-01", 1e10)
ALL = cases.all_cases()
RUNNING = [case for case in ALL if case.name != "primitives"]
ASKED = """
chain-134-r1 chain-33-r1 chain-8-r1 chain-2-r1 chain-134-r16 chain-33-r16 primitives stream
dispatch-static dispatch-claim dispatch-ready smollm2 llama-1b llama-8b llama-8b-8k llama-8b-64k
qwen3-30b-a3b attention-512 attention-8k attention-64k
muse-slice-r1 muse-slice-r16 muse-slice-r16-repeat muse-slice-r16-natural
muse-moe-known muse-moe-routed
draft-slice muse-step
allreduce-8B allreduce-4K allreduce-32K allreduce-128K allreduce-256K allreduce-512K
allreduce-8B-load allreduce-4K-load allreduce-32K-load allreduce-128K-load allreduce-256K-load
allreduce-512K-load
tp2-qwen3-0.6b tp2-llama-1b tp2-muse-4 tp2-llama-8b
ttft-512 ttft-8192 decode-p99 launches smollm2-host
"""


def by_name(case: Case) -> str:
    return case.name


def quiet(what: str, done: int, total: int) -> None:
    del what, done, total


def plan_of(workload: Workload) -> Plan:
    assert workload.graph is not None
    settings = {"policy": "static", "edges": "auto"} | workload.settings
    return plan(workload.graph(), H200, policy=settings["policy"], edges=settings["edges"])


def test_every_case_that_was_asked_for_is_listed_once() -> None:
    names = [case.name for case in ALL]
    assert sorted(names) == sorted(ASKED.split())
    assert [c.name for c in cases.find(["llama-1b", "launches", "llama-1b"])] == [
        "llama-1b",
        "launches",
    ]
    with pytest.raises(ConfigError, match=r"^no case is named lama - at --case"):
        cases.find(["lama"])


@pytest.mark.parametrize("case", [c for c in RUNNING if c.kind == "cuda"], ids=by_name)
def test_a_small_case_has_a_plan_for_a_gpu(case: Case) -> None:
    made = plan_of(case.make(True))
    assert made.target == H200
    policy = case.make(True).settings.get("policy", "static")
    used = {op.policy for op in made.operators}
    assert (policy if isinstance(policy, str) else "claim") in used
    if case.name.startswith("chain"):
        assert any(task.payload_mask for task in made.tasks), "a chain's edges are payload"


@pytest.mark.parametrize("case", RUNNING, ids=by_name)
def test_a_small_case_runs_on_host_threads(case: Case) -> None:
    workload = case.make(True)
    workload.settings["edges"] = "auto"  # host threads do not poll
    side = case.ours(HOST, workload, quiet)
    try:
        assert side.measure() > 0
        side.rest()
        assert side.note()
    finally:
        side.close()


def test_a_whole_step_is_held_against_its_parts_and_says_what_is_computed() -> None:
    (case,) = cases.find(["muse-step"])
    workload = case.make(True)
    opened = [case.ours(HOST, workload, quiet), case.peers[cases_draft.PARTS](HOST, workload)]
    try:
        whole, parts = (side.measure() for side in opened)
        assert parts > 0
        note = opened[0].note()
        assert (
            " tokens a step of made-up weights; from the first of the drafter's tasks to " in note
        )
        assert note.endswith(
            f"at 6.6 tokens a step it would be {6.6e6 / whole:.5g} tokens/s: computed"
        )
        verify, draft = workload.parts
        assert workload.bytes_moved() == pytest.approx(
            verify.bytes_moved() + draft.bytes_moved(), rel=0.02
        )
    finally:
        for side in opened:
            side.close()


def test_a_request_without_a_whole_block_gives_no_figure() -> None:
    (case,) = cases.find(["draft-slice"])
    workload = case.make(True)
    workload.step["tokens"] = 3
    side = case.ours(HOST, workload, quiet)
    try:
        with pytest.raises(
            FaultError, match=r"^none of \d+ steps had 4 rows - at bench muse_draft"
        ):
            side.measure()
    finally:
        side.close()


# Of 62 routers, [256, 8192] float32, a rank of 8 has an eighth.
ROUTERS = 62 * 256 * 8192 * 4 * 7 / 8 / 1e9


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("chain-134-r1", 0.1342),
        ("chain-2-r1", 0.0021),
        ("smollm2", 0.269 + 0.012),  # weights, and keys and values of 512 positions
        ("llama-1b", 2.47 + 0.017),
        ("llama-8b", 15.0 + 0.067),
        ("llama-8b-64k", 15.0 + 8.6),
        ("tp2-llama-8b", (15.0 + 0.067) / 2),  # a rank's
        ("muse-slice-r1", 7.26 - ROUTERS),
        ("muse-slice-r16", 29.6 - ROUTERS),
        ("draft-slice", 1.232),
        ("muse-step", 29.6 - ROUTERS + 1.232),
    ],
)
def test_a_full_case_moves_the_bytes_that_were_worked_out_by_hand(
    name: str, gigabytes: float
) -> None:
    (case,) = cases.find([name])
    moved = case.make(False).bytes_moved() / 1e9
    assert moved == pytest.approx(gigabytes, rel=0.01)


def test_a_floor_is_bytes_over_the_measured_bandwidth() -> None:
    machine = replace(HOST, bandwidth=4e12)
    (case,) = cases.find(["chain-134-r1"])
    assert case.floor(machine, case.make(False)) == pytest.approx(33.55, rel=1e-3)
    rate = replace(case, unit="tok/s")
    assert rate.floor(machine, case.make(False)) == pytest.approx(1e6 / 33.55, rel=1e-3)
    assert replace(case, unit="GB/s").floor(machine, case.make(False)) == 4000
    assert cases.find(["dispatch-ready"])[0].floor(machine, Workload(None, lambda: 0)) == 0


def test_experts_that_rows_choose_together_are_those_of_random_draws() -> None:
    assert expected_live(256, 8, 1) == pytest.approx(8)
    assert expected_live(256, 8, 16) == pytest.approx(101.96, abs=0.01)
    rng = np.random.default_rng(0)
    seen = [
        len({int(e) for _ in range(4) for e in rng.choice(12, 3, replace=False)})
        for _ in range(2000)
    ]
    assert expected_live(12, 3, 4) == pytest.approx(np.mean(seen), rel=0.02)


def test_a_slice_says_how_many_experts_its_rows_chose_and_what_its_load_took() -> None:
    (case,) = cases.find(["muse-slice-r16-repeat"])
    workload = case.make(True)
    assert workload.graph is not None
    tables = [b.source for b in workload.graph().buffers if b.name.endswith("forced")]
    counts = [len(np.unique(table)) for table in tables]
    side = case.ours(HOST, workload, quiet)
    try:
        note = side.note()
    finally:
        side.close()
    mean = sum(counts) / len(counts)
    assert f"{mean:.1f} experts a layer ({min(counts)} to {max(counts)} in 4 layers): " in note
    assert re.search(r"; host memory [0-9.]+ GB at most while loading; 1 launches in all; ", note)


@pytest.mark.parametrize("name", ["muse-slice-r1", "muse-slice-r16", "muse-slice-r16-natural"])
def test_a_slice_runs_100_steps_within_its_context(name: str) -> None:
    step = cases.find([name])[0].make(False).step
    begin = step["position"] - step["tokens"] // 2 * step["rows"]
    assert step["tokens"] == 100
    assert 0 <= begin < begin + step["tokens"] * step["rows"] < step["context"]


def test_the_peak_of_host_memory_is_of_what_came_after_its_reset() -> None:
    np.ones(96 << 20, np.uint8)
    host_memory.reset_peak()
    before = host_memory.peak_bytes()
    np.ones(32 << 20, np.uint8)
    assert 24 << 20 < host_memory.peak_bytes() - before < 64 << 20


def test_bytes_follow_position_window_and_chosen_experts() -> None:
    config = models.small_muse(shapes.MUSE_SPARK)
    graph = models.model_graph(config, rows=2, context=4096)
    short, long = (step_bytes(graph, rows=2, position=p, live=5) for p in (2000, 4000))
    kept = sum(1 for window in config.windows if not window)
    one = 2 * config.kv_heads * config.head_dim * 2  # keys and values of a position, bf16
    sliding = (len(config.windows) - kept) * (2048 + 1 - 2002)
    assert long - short == one * (kept * 2000 + sliding)
    six = step_bytes(graph, rows=2, position=2000, live=6)
    inner, width = config.moe_intermediate, config.moe_hidden
    expert = 3 * inner * width
    dense = config.layers - len(config.quantised)
    assert six - short == expert * 2 * dense + expert * 9 // 16 * len(config.quantised)


def test_a_step_of_repeated_routing_has_the_experts_of_the_step_before() -> None:
    config = models.small_muse(shapes.MUSE_SPARK)
    graph = models.model_graph(config, rows=4, context=64, routing="repeat")
    tables = [b.source for b in graph.buffers if b.name.endswith("forced")]
    assert tables
    assert all(table.shape == (4, config.top_k) for table in tables)
    assert len({int(e) for e in tables[0].reshape(-1)}) > config.top_k, "rows differ"


# ---- made-up weights -------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["f32", "bf16", "nvfp4"])
def test_a_made_up_matrix_keeps_the_size_of_activations(dtype: str) -> None:
    from gpurt.graphs.ops.dtypes import to_float32

    shape = (3, 64, 256) if dtype == "nvfp4" else (192, 256)
    stored = made_up.matrix(shape, DTYPES[dtype])
    values = to_float32(stored, DTYPES[dtype]).reshape(-1, 256)
    if dtype == "nvfp4":
        values = values * np.float32(made_up.nvfp4_scale(256))
    assert np.std(values) == pytest.approx(256**-0.5, rel=0.1)
    assert np.isfinite(values).all()
    assert len({row.tobytes() for row in values}) == len(values), "no two rows are equal"
    assert np.array_equal(stored, made_up.matrix(shape, DTYPES[dtype]))


def test_matrices_of_one_shape_share_one_source_and_a_buffer_without_one_is_refused() -> None:
    graph = graphs.chain(3, 64)
    assert len({id(b.source) for b in graph.buffers if b.role == "weight"}) == 1
    hidden = next(b for b in graph.buffers if b.role == "activation")
    with pytest.raises(GraphError, match=r"^h\[0\] has no source to replace"):
        graph.refill(hidden, np.zeros(4))


# ---- kernels ---------------------------------------------------------------------------------
def compile_attention(made: Plan) -> set[str]:
    """Of a plan of nothing else. Returns: its instances."""
    header, _ = generate_header(made, {})
    headers = one_task.headers("noop", "", H200.team_warps) | {GENERATED: header}
    compiled = compile_source(one_task.RUNNER, "sm_90a", headers=headers, name="runner.cu")
    assert compiled.function("run_tasks").registers > 0
    return set(re.findall(r"attention_of<([^>]*)>", header))


@pytest.mark.timeout(300)
def test_a_drafters_share_has_a_plan_at_its_true_size_and_its_attention_compiles() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    (case,) = cases.find(["draft-slice"])
    made = plan_of(case.make(False))
    streamed = sum(task.stream[2] for task in made.tasks if task.stream is not None)
    twice = 5 * 2 * 128 * 8192 * 2  # the context's keys and values, and those of the block
    assert streamed == pytest.approx(case.make(False).bytes_moved() + twice, rel=0.005)
    shared = [b for b in made.buffers if b.role == "symmetric" and b.memory != "none"]
    # fc; two sums, of two shots, and two convolutions a layer; the choice.
    assert len(shared) == 1 + (2 * 2 + 2) * 5 + 3
    attention = tuple(t for t in made.tasks if t.body == "attention")
    assert compile_attention(replace(made, tasks=attention)) == {"128, 8, 2, true"}


@pytest.mark.timeout(300)
def test_attention_compiles_for_every_shape_of_the_full_cases() -> None:
    """Of a kernel's code only attention depends on shapes: heads, group, dtype, extras. The other
    bodies are compiled for tiny models elsewhere, the same code.
    """
    pytest.importorskip("cuda.bindings.nvrtc")
    wide = [
        models.model_graph(shapes.llama_layers(config, 1), rows=rows, context=1024)
        for config, rows in (
            (shapes.SMOLLM2_135M, 16),
            (shapes.LLAMA_1B, 16),
            (shapes.LLAMA_8B, 16),
            (shapes.QWEN3_30B_A3B, 1),
        )
    ]
    drafting = {case.name for case in cases_draft.draft_cases()}  # see above
    small = [c.make(True) for c in RUNNING if c.kind == "cuda" and c.name not in drafting]
    plans = [*(plan(g, H200, edges="auto") for g in wide), *(plan_of(w) for w in small)]
    # Without regions: buffers are counted plan by plan.
    tasks = tuple(replace(t, reads=(), writes=()) for p in plans for t in p.tasks)
    together = replace(plans[0], tasks=tasks)
    _, bodies = generate_header(together, {})
    assert {"route", "expert_matvec", "collect", "publish", "rearm"} <= set(bodies)
    attention = tuple(t for t in together.tasks if t.body == "attention")
    heads = compile_attention(replace(together, tasks=attention))
    groups = {"64, 3, 2", "64, 4, 2", "64, 8, 2, true", "128, 2, 2", "128, 4, 2", "128, 8, 2"}
    assert heads == groups


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_benchs_own_kernels_compile_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from gpurt.bench import grouped, primitives

    for compiled, entries in (
        (primitives.compile_primitives(arch), primitives.ENTRIES),
        (grouped.compile_grouped(arch), grouped.ENTRIES.values()),
    ):
        for entry in entries:
            function = compiled.function(entry)
            assert 0 < function.registers <= 128
            assert function.spill_store_bytes == 0, function
