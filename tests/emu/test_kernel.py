"""The whole persistent kernel on the emulated GPU: the GPU's own tests, in small.

Tokens against the oracle, and one set of bits over policies, edges, teams and workers. Every launch
runs another schedule of fibres and copies.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from gpurt.executors.base import Options
from gpurt.runtime import Runtime
from tests.emu import device
from tests.gpu import (
    test_dflash,
    test_draft_ngram,
    test_draft_tree,
    test_dynamic,
    test_faults,
    test_llama,
    test_matvec,
    test_muse_spark,
    tiny_dflash,
    tiny_llama,
    tiny_muse,
)

VOCAB = 208
PROMPT = [int(t) for t in np.random.default_rng(1).integers(0, VOCAB, 11)]
COUNT = 4
LLAMA = replace(
    tiny_llama.CONFIG, hidden=128, layers=2, heads=2, kv_heads=1, intermediate=192, vocab=VOCAB
)
MUSE = replace(
    tiny_muse.CONFIG, hidden=128, heads=2, kv_heads=1, vocab=VOCAB, intermediate=160, experts=7
)
DRAFT = replace(
    tiny_dflash.DRAFT, hidden=128, heads=2, kv_heads=1, vocab=VOCAB, intermediate=160, block=5
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models, prompts and texts of a size for one host thread."""
    monkeypatch.setattr(tiny_llama, "CONFIG", LLAMA)
    monkeypatch.setattr(tiny_muse, "CONFIG", MUSE)
    monkeypatch.setattr(tiny_dflash, "DRAFT", DRAFT)
    monkeypatch.setattr(test_dflash, "PROMPT", PROMPT)
    monkeypatch.setattr(test_dflash, "COUNT", 6)
    for module in (test_llama, test_muse_spark):
        monkeypatch.setattr(module, "PROMPT", PROMPT)
        monkeypatch.setattr(module, "COUNT", COUNT)
    monkeypatch.setattr(test_draft_ngram, "COUNT", 6)
    monkeypatch.setattr(test_draft_tree, "PROMPT", PROMPT)
    monkeypatch.setattr(test_draft_tree, "PROPOSALS", (7,))
    monkeypatch.setattr(test_draft_tree, "COUNT", 6)
    monkeypatch.setattr(test_draft_tree, "DRAFT", DRAFT)


@cache
def wanted(module: Any) -> Any:
    executor = module.load(workers=1, team_warps=1) if module is test_muse_spark else load_llama()
    try:
        return module.bits(executor)
    finally:
        executor.close()


def load_llama(**variant: Any) -> Any:
    variant = {"workers": 1, "team_warps": 1} | variant
    return test_llama.load(tiny_llama.tiny_llama(context=64), **variant)


# ---- llama -----------------------------------------------------------------------------------
def test_llama_equals_the_oracle() -> None:
    test_llama.test_logits_are_within_a_hundredth_of_the_oracle()


TWO = {"workers": 2, "team_warps": 1}
LLAMA_VARIANTS: dict[str, dict[str, Any]] = {
    "team of 16": {"workers": 2, "team_warps": 16},
    "team of 16, mixed, payload": {
        "workers": 3,
        "team_warps": 16,
        "policy": test_llama.MIXED,
        "edges": "payload",
    },
    "claim": TWO | {"policy": "claim"},
    "ready": TWO | {"policy": "ready", "workers": 3},
    "payload claim": TWO | {"edges": "payload", "policy": "claim"},
    "prefill by 3 rows": TWO | {"options": Options(prefill_rows=3), "policy": "claim"},
    "step sizes": TWO | {"step_rows": (2, 4), "policy": "ready"},
    "step sizes, team of 16, mixed, payload": {
        "workers": 3,
        "team_warps": 16,
        "policy": test_llama.MIXED,
        "edges": "payload",
        "step_rows": (2, 8),
    },
    "steps from just below 2^32": TWO | {"options": Options(first_step=2**32 - 3)},
}


@pytest.mark.parametrize("name", LLAMA_VARIANTS)
def test_bits_of_llama_do_not_depend_on_the_plan(name: str) -> None:
    same_bits(load_llama(**LLAMA_VARIANTS[name]), test_llama)


def same_bits(executor: Any, module: Any, launches: int = 2) -> None:
    tokens, arrays = wanted(module)
    try:
        for launch in range(launches):
            got, contents = module.bits(executor)
            assert got == tokens, f"launch {launch}"
            for buffer, content in arrays.items():
                assert contents[buffer] == content, f"launch {launch}: {buffer}"
    finally:
        executor.close()


def test_prompts_that_come_one_after_another_switch_sizes_both_ways() -> None:
    executor = load_llama(**TWO, step_rows=(2, 4), policy="claim", edges="payload")
    try:
        tokens = [test_llama.generate(executor, PROMPT, COUNT) for _ in range(3)]
        executor.host.request_exit()
        assert executor.join(10)
        steps = executor.raw_trace().summaries
    finally:
        executor.close()
    assert tokens == [wanted(test_llama)[0]] * 3
    # 4 + 4 + 3 prompt rows, three decode steps; what comes behind a last token begins wide, too.
    assert executor.launches == 1
    assert steps["variant"].tolist() == [1, 1, 1, 0, 0, 0] * 3
    assert steps["rows"].tolist() == [4, 4, 3, 1, 1, 1] * 3


# ---- Muse Spark ------------------------------------------------------------------------------
def test_muse_spark_equals_the_oracle() -> None:
    test_muse_spark.test_logits_are_within_a_fiftieth_of_the_oracle()


CLAIMED = test_muse_spark.CLAIMED
MUSE_VARIANTS: dict[str, dict[str, Any]] = {
    "team of 16, dynamic experts, payload": {
        "workers": 3,
        "team_warps": 16,
        "policy": CLAIMED,
        "edges": "payload",
    },
    "dynamic experts": TWO | {"policy": CLAIMED, "workers": 3},
    "step sizes, dynamic experts, payload": {
        "workers": 3,
        "team_warps": 16,
        "policy": CLAIMED,
        "edges": "payload",
        "step_rows": (1, 4),
    },
    "ready": TWO | {"policy": "ready"},
    "mixed": TWO | {"policy": test_muse_spark.MIXED},
}


@pytest.mark.parametrize("name", MUSE_VARIANTS)
def test_bits_of_muse_spark_do_not_depend_on_the_plan(name: str) -> None:
    same_bits(test_muse_spark.load(**MUSE_VARIANTS[name]), test_muse_spark)


def test_bf16_experts_right_before_nvfp4_ones_on_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 48 workers, seven have such a pair: they go by two loops."""
    monkeypatch.setattr(device, "LIMITS", replace(device.LIMITS, sm_count=48))
    same_bits(test_muse_spark.load(team_warps=1, workers=48), test_muse_spark, launches=1)


@pytest.mark.parametrize("case", test_muse_spark.HOSTILE)
def test_hostile_routing_equals_the_oracle(case: str) -> None:
    test_muse_spark.test_hostile_routing_equals_the_oracle(case, CLAIMED)


def test_prefill_and_decode_in_one_step_equal_each_alone() -> None:
    test_muse_spark.mixed_equals_alone(policy=CLAIMED, **TWO)


# ---- matvec's ways ---------------------------------------------------------------------------
MATVEC = [
    test_matvec.Case(64, 80, norm=True),
    test_matvec.Case(96, 192, norm=True, residual=True, swiglu=True, scale=0.6, softcap=1.5),
    test_matvec.Case(4800, 64, dtype="bf16"),
]


@pytest.mark.parametrize("case", MATVEC, ids=str)
def test_matvec_equals_its_reference(case: Any) -> None:
    for rows in (1, 5, 16) if case.n < 1000 else (5,):
        test_matvec.test_products_equal_the_reference_within_bf16(case, rows)


def test_bits_of_matvec_do_not_depend_on_rows_team_or_edges() -> None:
    want = test_matvec.run(MATVEC[1], 16)
    variants: list[tuple[int, str, dict[str, int]]] = [
        (1, "payload", {}),
        (5, "counter", {"workers": 2}),
        (16, "payload", {"team_warps": 1}),
    ]
    for rows, edges, target in variants:
        got = test_matvec.run(MATVEC[1], rows, edges, **target)
        assert got.tobytes() == want[:rows].tobytes(), f"{rows} {edges} {target}"


def test_warps_that_share_x_make_the_bits_of_one_warp() -> None:
    """Four row tiles a task, four K groups, of columns that end inside a chunk."""
    case = test_matvec.Case(4800, 336)
    want = test_matvec.run(case, 16, team_warps=1, workers=3)
    for rows, edges in ((16, "payload"), (11, "counter")):
        got = test_matvec.run(case, rows, edges, workers=3)
        assert got.tobytes() == want[:rows].tobytes(), f"{rows} {edges}"


# ---- dynamic segments, drafts, faults --------------------------------------------------------
@pytest.mark.parametrize("policy", test_dynamic.POLICIES)
def test_dynamic_segments_equal_their_model(policy: str) -> None:
    experts = test_dynamic.Experts(layers=2, slots=6, tiles=3)
    with test_dynamic.driven(experts, test_dynamic.POLICIES[policy], team_warps=1) as driver:
        for steps in (1, 30, 29):
            driver.run(max_tokens=steps)
        assert driver.executor.read("sum")[0] == experts.expected_sum(60)
        counters = driver.executor.counters().tolist()
        assert counters == [60 * c.signals_per_step for c in driver.executor.plan.counters]


def test_absent_experts_leave_no_span() -> None:
    test_dynamic.test_absent_tasks_leave_no_span()


def test_more_live_slots_than_the_plan_has_are_a_fault() -> None:
    test_dynamic.test_more_live_slots_than_the_plan_has_are_a_fault()


def test_ngram_keeps_the_text() -> None:
    test_draft_ngram.test_the_text_is_that_without_a_drafter(1, {})


def test_dflash_keeps_the_text_of_a_prompt_of_several_steps() -> None:
    test_dflash.test_a_step_that_samples_nothing_streams_no_weights_of_the_drafter(16)


def test_a_tree_keeps_the_text() -> None:
    test_draft_tree.test_a_tree_that_holds_the_text_gives_it_at_once(16)


def test_dflash_keeps_the_text_with_a_tree() -> None:
    test_draft_tree.test_the_text_is_that_without_a_drafter(1, {}, 4)


def test_a_block_is_less_than_half_of_its_table() -> None:
    """Matvecs take their way by the table's room, and one sequence has 4 rows of 16."""
    plain = {"conv_taps": 0, "conv_group": 1, "selector_rank": 0, "selector_top_k": 1}
    model = tiny_dflash.tiny_dflash(replace(DRAFT, **plain))
    drafted = tiny_dflash.drafted_muse(3, model, slots=4)
    with Runtime("cuda:0", team_warps=16, edges="payload") as runtime:
        got, want = (
            runtime.submit(graph, PROMPT, max_tokens=3).result(60)
            for graph in (drafted, tiny_muse.tiny_muse())
        )
    assert got == want


def test_dflash_proposes_what_the_host_does() -> None:
    test_dflash.test_proposals_are_those_of_the_host_where_scores_are_clear("claim", "payload")


@pytest.mark.parametrize("policy", ["static", "claim", "ready"])
def test_a_missing_signal_is_named(policy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_faults.test_an_edge_that_is_never_signalled_is_named_within_the_time_out(policy, patch)


def test_a_body_that_waits_for_its_edges_itself_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    test_faults.test_a_body_that_waits_for_its_edges_itself_gives_up_within_the_time_out(
        monkeypatch
    )


@pytest.mark.parametrize("edges", ["counter", "payload"])
def test_nan_is_a_fault(edges: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_llama, "CONFIG", replace(LLAMA, hidden=256, heads=4, kv_heads=1))
    with pytest.MonkeyPatch.context() as patch:
        test_faults.test_nan_in_a_weight_is_a_fault_of_sample_and_never_a_hang(edges, patch)


@pytest.mark.parametrize("policy", ["static", CLAIMED, "ready"], ids=["static", "dynamic", "ready"])
def test_a_router_that_makes_nan_is_a_fault(policy: Any) -> None:
    test_muse_spark.test_a_router_that_makes_nan_is_a_fault_and_no_hang(policy)


def test_a_struct_of_a_users_own_runs() -> None:
    test_faults.test_a_users_struct_runs_and_its_outputs_come_back()


def test_a_second_launch_while_one_runs_is_refused() -> None:
    test_faults.test_a_second_launch_while_one_runs_is_refused()


def test_more_workers_than_sms_are_refused() -> None:
    test_faults.test_more_workers_than_sms_are_refused_with_both_numbers()
