"""The dflash drafter on the GPU: its bodies against their references, and that no text changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpurt.buffer import DTYPES
from gpurt.graphs.ops.draft_rows import table_rows
from gpurt.graphs.ops.dtypes import to_bf16, to_float32
from gpurt.runtime import Runtime
from tests.gpu.one_op import TEAMS, reference, run_op, runner
from tests.gpu.one_task import first_difference
from tests.gpu.tiny_dflash import DRAFT, drafted_muse, tiny_dflash
from tests.gpu.tiny_muse import tiny_muse
from tests.helpers.draft_ops import (
    BLOCKS,
    VOCAB,
    Case,
    candidates_case,
    conv_case,
    rows_case,
    walk_case,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPT = [int(t) for t in np.random.default_rng(1).integers(0, 2048, 37)]
COUNT = 60
PROPOSALS = (1, 7, 15)


def run(case: Case, team: int = 16) -> dict[str, Any]:
    op, arrays, step = case
    return run_op(op, arrays, step, runner(op.body.name, team))


# ---- bodies ----------------------------------------------------------------------------------
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("normed", ["", "f32", "bf16"])
@pytest.mark.parametrize(("hidden", "taps", "group"), [(192, 2, 16), (2052, 3, 4), (64, 1, 1)])
def test_block_conv_equals_its_reference(
    blocks: str, normed: str, hidden: int, taps: int, group: int
) -> None:
    case = conv_case(blocks, hidden, taps, group, int(not normed), normed)
    rows = len(case[2].slots)
    seen, want = [run(case, team) for team in TEAMS], reference(*case)
    for name in ("y", "normed") if normed else ("y",):
        one, other = (made[name] for made in seen)
        assert one.tobytes() == other.tobytes()
        of = to_float32(one, DTYPES["bf16"]) if one.dtype == np.uint16 else one
        within = 4e-6 if of is one else 4e-3
        assert first_difference(of[:rows], want[name][:rows], within) is None, name
        assert np.isnan(of[rows:]).all(), "rows past the table's were written"


def test_block_conv_in_bf16_is_that_of_rounded_rows() -> None:
    op, arrays, step = conv_case("two", 192, 2, 16, 0, dtype="bf16")
    rows, floats = len(step.slots), conv_case("two", 192, 2, 16, 0)
    floats[1]["x"] = to_float32(arrays["x"], DTYPES["bf16"])
    seen, want = run((op, arrays, step))["y"], run(floats)["y"]
    assert seen[:rows].tobytes() == to_bf16(want[:rows]).tobytes()
    assert np.isnan(to_float32(seen[rows:], DTYPES["bf16"])).all()


@pytest.mark.parametrize(
    ("n", "count", "chunk"), [(300, 16, 64), (7, 16, 8192), (129, 1, 32), (64, 32, 64)]
)
@pytest.mark.parametrize("team", TEAMS)
def test_candidates_equal_their_reference(n: int, count: int, chunk: int, team: int) -> None:
    case = candidates_case(n, count, chunk)
    rows = len(case[2].sample_rows)
    seen, want = run(case, team), reference(*case)
    assert np.array_equal(seen["scores"][:rows], want["scores"][:rows])
    there = want["scores"][:rows] > -np.inf
    assert np.array_equal(seen["ids"][:rows][there], want["ids"][:rows][there])
    assert np.isnan(seen["scores"][rows:]).all()


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(
    ("n", "top_k", "rank", "dtype"),
    [
        (48, 16, 264, "f32"),
        (48, 16, 256, "bf16"),
        (16, 16, 8, "f16"),
        (40, 1, 8, "f32"),
        (40, 8, 0, ""),
    ],
)
@pytest.mark.parametrize("team", TEAMS)
def test_a_greedy_walk_equals_its_reference(
    blocks: str, n: int, top_k: int, rank: int, dtype: str, team: int
) -> None:
    case = walk_case(n, top_k, rank, dtype, blocks)
    seen, want = run(case, team)["proposals"], reference(*case)["proposals"]
    assert np.array_equal(seen, want)


def test_a_sampled_walk_draws_with_the_number_of_the_row_before() -> None:
    from gpurt.graphs.ops.sample import sample_row

    for options in ({}, {"top_k": 3}, {"top_p": 0.6}):
        op, arrays, step = walk_case(48, 16, 0, "", "two", temperature=0.7)
        for name, value in options.items():
            step.slot_states[name] = value
        seen = run((op, arrays, step))["proposals"]
        for row in range(8):
            slot = row // 4
            logits = np.full(VOCAB, -np.inf, np.float32)
            logits[arrays["ids"][row]] = arrays["scores"][row]
            logits[np.argsort(-logits, kind="stable")[16:]] = -np.inf
            seed = int(step.slot_states["seed"][slot])
            position = step.positions[step.sample_rows[row]] - 1
            settings = {"temperature": 0.7, "seed": seed, "position": position, **options}
            assert seen[slot, 1 + row % 4] == sample_row(logits, **settings)


def test_a_slot_whose_values_are_no_numbers_ends_the_proposals() -> None:
    op, arrays, step = walk_case(48, 16, 264, "f32")
    for row, spoil in ((0, "scores"), (4, "hidden"), (14, "scores")):
        spoilt = {name: array.copy() for name, array in arrays.items()}
        spoilt[spoil][row] = np.nan
        assert run((op, spoilt, step))["proposals"][0, 0] == row


@pytest.mark.parametrize("block", [2, 5, 8])
def test_a_table_holds_a_block_for_every_sequence_that_sampled(block: int) -> None:
    case = rows_case(block)
    rows, want = (table_rows(made["table"]) for made in (run(case), reference(*case)))
    for name in ("token", "slot", "position", "sample_rows"):
        assert np.array_equal(getattr(rows, name), getattr(want, name)), name


# ---- whole requests --------------------------------------------------------------------------
@pytest.mark.parametrize("team", TEAMS)
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 4}])
def test_the_text_is_that_without_a_drafter(team: int, settings: dict[str, Any]) -> None:
    with Runtime("cuda:0", team_warps=team) as runtime:
        wanted = runtime.submit(tiny_muse(), PROMPT, max_tokens=COUNT, **settings).result(30)
        for proposals in PROPOSALS:
            request = runtime.submit(drafted_muse(proposals), PROMPT, max_tokens=COUNT, **settings)
            assert request.result(30) == wanted
            assert request.stats.launches <= 1
            assert request.stats.accepted_per_step is not None


@pytest.mark.parametrize("policy", ["static", "claim", "ready"])
@pytest.mark.parametrize("edges", ["counter", "payload"])
def test_proposals_are_those_of_the_host_where_scores_are_clear(policy: str, edges: str) -> None:
    """bf16 here, float32 there: half of the proposals agree at least, and the first one does."""
    made = []
    for device, options in (("host", {}), ("cuda:0", {"policy": policy, "edges": edges})):
        with Runtime(device, **options) as runtime:
            graph = drafted_muse()
            # only the first token's step drafts
            runtime.submit(graph, PROMPT, max_tokens=3, ignore_eos=True).result(30)
            made.append(runtime.read(graph, "step.proposals")[0])
    host, device = made
    count = host[0]
    assert device[0] == count == tiny_dflash().config.block - 1
    assert host[1] == device[1]
    assert (host[1 : 1 + count] == device[1 : 1 + count]).mean() >= 0.5


def test_several_sequences_and_a_plain_drafter() -> None:
    plain = replace(
        DRAFT, conv_taps=0, conv_group=1, selector_rank=0, selector_top_k=1, input_scale=1.0
    )
    prompts = [PROMPT[: 5 + 9 * i] for i in range(4)]
    with Runtime("cuda:0") as runtime:
        graph = tiny_muse()
        wanted = [runtime.submit(graph, p, max_tokens=COUNT).result(30) for p in prompts]
        for model in (tiny_dflash(), tiny_dflash(plain)):
            drafted = drafted_muse(3, model, slots=4)  # four blocks of four rows
            requests = [runtime.submit(drafted, p, max_tokens=COUNT) for p in prompts]
            assert [request.result(30) for request in requests] == wanted


@pytest.mark.parametrize("team", TEAMS)
def test_a_step_that_samples_nothing_streams_no_weights_of_the_drafter(team: int) -> None:
    """A long prompt's chunks: each of them passes by the drafter's tasks, and the text is right."""
    prompt = PROMPT * 3
    with Runtime("cuda:0", team_warps=team) as runtime:
        wanted = runtime.submit(tiny_muse(context=256), prompt, max_tokens=COUNT).result(30)
        request = runtime.submit(drafted_muse(context=256), prompt, max_tokens=COUNT)
        assert request.result(30) == wanted


def test_steps_of_many_rows_keep_the_text() -> None:
    """A drafter's cache is written for all rows of a prompt's chunk; its own blocks stay small."""
    prompt = PROMPT * 2
    with Runtime("cuda:0") as runtime:
        wanted = runtime.submit(tiny_muse(context=256), prompt, max_tokens=COUNT).result(30)
    with Runtime("cuda:0", step_rows=(16, 40)) as runtime:
        request = runtime.submit(drafted_muse(rows=40, context=256), prompt, max_tokens=COUNT)
        assert request.result(30) == wanted
        assert request.stats.accepted_per_step is not None
