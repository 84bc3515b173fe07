"""GPU tests of cold bodies, run on the CPU: the same functions as in tests/gpu, small cases."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

MODULES = {
    name: importlib.import_module(f"tests.gpu.{name}")
    for name in (
        "one_op",
        "test_attention_extras",
        "test_attention_split",
        "test_chain",
        "test_collectives",
        "test_combine",
        "test_combine_columns",
        "test_dflash",
        "test_draft_tree",
        "test_embed",
        "test_expert_matvec",
        "test_gated_residual",
        "test_matvec_f32",
        "test_reduce_squares",
        "test_route",
        "test_sample",
    )
}
experts = MODULES["test_expert_matvec"]
extras = MODULES["test_attention_extras"]
split = MODULES["test_attention_split"]
trees = MODULES["test_draft_tree"]
# As (module, test, arguments): one or two of each kind, none of them wide.
CASES: list[tuple[str, str, tuple[Any, ...]]] = [
    ("test_chain", "test_row_0_has_the_same_bits_every_way", (16, 16, "payload")),
    ("test_chain", "test_row_0_has_the_same_bits_every_way", (16, 1, "counter")),
    ("test_chain", "test_every_layer_is_its_matrix_times_the_one_before", ()),
    ("test_sample", "test_greedy_takes_the_largest_and_the_lowest_of_equals", (512,)),
    ("test_sample", "test_rows_of_several_slots_use_their_own_values", ()),
    ("test_combine", "test_combine_equals_its_reference", ((144, 3, 13), True, True, 5)),
    ("test_combine", "test_bits_do_not_depend_on_rows_or_team", ((64, 32, 40),)),
    *(
        ("test_combine_columns", "test_combine_columns_equals_its_reference", (shape, 5))
        for shape in ((36, 3, 4), (64, 12, 8))
    ),
    ("test_combine_columns", "test_bits_do_not_depend_on_rows_or_team", ((36, 3, 4),)),
    ("test_reduce_squares", "test_reduce_squares_equals_its_reference", ((36, 3, 4), 5)),
    ("test_reduce_squares", "test_reduce_squares_equals_its_reference", ((1156, 2, 2), 1)),
    ("test_reduce_squares", "test_bits_do_not_depend_on_rows_or_team", ((36, 3, 4),)),
    ("test_gated_residual", "test_gated_residual_equals_its_reference", (192, True, 3)),
    ("test_gated_residual", "test_bits_do_not_depend_on_rows_or_team", (192,)),
    ("test_gated_residual", "test_what_is_normed_equals_its_reference", (2052, "f32", 3)),
    ("test_gated_residual", "test_what_is_normed_equals_its_reference", (192, "bf16", 3)),
    (
        "test_gated_residual",
        "test_bits_of_what_is_normed_do_not_depend_on_rows_or_team",
        (2052, "bf16"),
    ),
    *(
        ("test_collectives", "test_each_part_equals_its_reference", (kind, width, rows, 0))
        for width, rows in ((36, 1), (16, 3))
        for kind in MODULES["test_collectives"].KINDS
    ),
    ("test_collectives", "test_a_gated_residual_adds_up_its_branch", (48,)),
    ("test_combine", "test_pairs_of_other_ranks_are_left_out", (True,)),
    *(
        ("test_route", "test_only_own_experts_get_slots", (own, 16))
        for own in ((0, 13), (13, 57), (69, 1))
    ),
    ("test_route", "test_softmax_equals_its_reference", ((13, 1), True)),
    ("test_route", "test_equal_scores_go_to_the_lower_ids", (16,)),
    ("test_route", "test_all_rows_may_choose_one_expert_and_every_row_others", ()),
    ("test_route", "test_a_forced_table_chooses_by_position_and_slot", ()),
    ("test_expert_matvec", "test_slots_that_no_expert_took_do_nothing", ()),
    ("test_matvec_f32", "test_bits_do_not_depend_on_rows_or_team", ((13, 192),)),
    *(
        ("test_dflash", "test_block_conv_equals_its_reference", (blocks, normed, 192, 2, 16))
        for blocks, normed in (("one", "bf16"), ("next", ""))
    ),
    ("test_dflash", "test_block_conv_equals_its_reference", ("two", "f32", 68, 3, 2)),
    ("test_dflash", "test_block_conv_in_bf16_is_that_of_rounded_rows", ()),
    ("test_dflash", "test_candidates_equal_their_reference", (300, 16, 64, 16)),
    ("test_dflash", "test_candidates_equal_their_reference", (129, 1, 32, 1)),
    ("test_dflash", "test_a_greedy_walk_equals_its_reference", ("two", 48, 16, 40, "bf16", 16)),
    ("test_dflash", "test_a_greedy_walk_equals_its_reference", ("next", 40, 8, 0, "", 1)),
    ("test_dflash", "test_a_sampled_walk_draws_with_the_number_of_the_row_before", ()),
    ("test_dflash", "test_a_slot_whose_values_are_no_numbers_ends_the_proposals", ()),
    ("test_dflash", "test_a_table_holds_a_block_for_every_sequence_that_sampled", (5,)),
    ("test_embed", "test_embed_norms_what_it_made_beside_it", (64,)),
    ("test_draft_tree", "test_a_tree_equals_its_reference", ("two", 15, 16, 256, "bf16", 16)),
    ("test_draft_tree", "test_a_tree_equals_its_reference", ("next", 15, 8, 0, "", 1)),
    ("test_draft_tree", "test_a_sampled_request_keeps_its_chain", ()),
    *(
        ("test_draft_tree", "test_rows_of_a_tree_have_the_bits_of_their_paths", (*shape, 1))
        for shape in trees.SHAPES
    ),
    ("test_draft_tree", "test_a_tree_over_a_border_of_spans_has_the_bits_of_its_paths", ()),
    ("test_attention_extras", "test_attention_equals_its_reference", (extras.CASES[0], "f32")),
    ("test_attention_extras", "test_attention_equals_its_reference", (extras.CASES[0], "bf16")),
    ("test_attention_extras", "test_attention_equals_its_reference", (extras.CASES[6], "e4m3")),
    (
        "test_attention_extras",
        "test_bits_do_not_depend_on_team_or_on_the_rows_beside",
        (extras.CASES[0],),
    ),
    ("test_attention_extras", "test_attention_equals_its_reference", (extras.CASES[-2], "f32")),
    (
        "test_attention_extras",
        "test_bits_do_not_depend_on_how_many_tasks_share_the_rows",
        (extras.CASES[6], 24),
    ),
    ("test_attention_extras", "test_without_queries_the_caches_get_what_attention_writes", (16,)),
    (
        "test_attention_split",
        "test_spans_equal_the_reference",
        (split.CASES[1], tuple(split.STEPS)[4]),
    ),
    ("test_attention_split", "test_bits_do_not_depend_on_splits_or_team", (split.CASES[1],)),
]


@pytest.fixture(autouse=True)
def forgotten(emulated: None) -> Iterator[None]:
    """The modules' runners are built for the emulated GPU, and forgotten afterwards."""
    del emulated
    named = [getattr(m, "runner", None) for m in MODULES.values()] + [split.split_runner]
    runners = [runner for runner in named if hasattr(runner, "cache_clear")]
    for runner in runners:
        runner.cache_clear()
    yield
    for runner in runners:
        runner.cache_clear()


@pytest.mark.parametrize(("module", "test", "arguments"), CASES, ids=lambda v: str(v)[:60])
def test_body_passes_its_gpu_test(module: str, test: str, arguments: tuple[Any, ...]) -> None:
    function: Callable[..., None] = getattr(MODULES[module], test)
    function(*arguments)


@pytest.mark.parametrize("case", [c for c in experts.CASES if c.k <= 256], ids=str)
def test_experts_equal_their_reference(case: Any) -> None:
    experts.test_expert_matvec_equals_its_reference(case, "random", 3)


@pytest.mark.parametrize(("case", "rows"), [(-2, 2), (-2, 5), (-2, 16), (-1, 2), (-1, 5), (-1, 16)])
def test_experts_of_any_number_of_users_equal_their_reference(case: int, rows: int) -> None:
    experts.test_expert_matvec_equals_its_reference(experts.CASES[case], "one", rows)


@pytest.mark.parametrize("case", experts.CASES[-2:], ids=str)
def test_bits_of_experts_depend_neither_on_team_nor_on_users(case: Any) -> None:
    experts.test_bits_do_not_depend_on_team_or_on_who_shares_the_expert(case)


def test_a_wrong_body_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: a reference that is off by one part in a hundred is no match."""
    combine = MODULES["test_combine"]
    true = combine.reference

    def off(*arguments: Any) -> Any:
        arrays = true(*arguments)
        return {name: np.asarray(a) * (1.01 if name == "y" else 1) for name, a in arrays.items()}

    monkeypatch.setattr(combine, "reference", off)
    with pytest.raises(AssertionError, match="differ"):
        combine.test_combine_equals_its_reference((32, 1, 5), True, False, 2)
