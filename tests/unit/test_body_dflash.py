"""The host bodies of the dflash drafter against their references, and those against the rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt.body import Target
from gpurt.buffer import bf16
from gpurt.errors import GraphError
from gpurt.graph import Graph
from gpurt.graphs.ops.block_conv import block_conv
from gpurt.graphs.ops.candidates import candidates
from gpurt.graphs.ops.draft_rows import table_rows
from gpurt.graphs.ops.draft_walk import draft_walk
from gpurt.graphs.ops.dtypes import to_bf16, to_float32
from gpurt.graphs.ops.sample import sample_row
from tests.gpu.one_op import reference, step_rows
from tests.helpers.draft_ops import (
    BLOCKS,
    CAPACITY,
    VOCAB,
    Case,
    candidates_case,
    conv_case,
    rows_case,
    walk_case,
)
from tests.helpers.host_bodies import bodies, levels
from tests.helpers.trees import depths

LEVELS = levels()


def run(case: Case, level: str = "portable") -> dict[str, NDArray[Any]]:
    op, arrays, step = case
    made = {name: array.copy() for name, array in arrays.items()}
    assert op.body.tile is not None
    kind, _ = bodies(level).run(
        op.body,
        made,
        op.params,
        step_rows(step),
        coords=[tile.coords for tile in op.body.tile(op, Target("host", 2))],
        slots=step.slot_states,
        plan_rows=CAPACITY,
        proposal_rows=[row for row, flag in enumerate(step.flags) if flag & 2],
    )
    assert kind == 0
    return made


# ---- block_conv ------------------------------------------------------------------------------
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("normed", ["", "f32", "bf16"])
@pytest.mark.parametrize(("hidden", "taps", "group"), [(48, 2, 16), (700, 3, 7), (513, 1, 1)])
def test_block_conv_equals_its_reference(level, blocks, normed, hidden, taps, group):
    case = conv_case(blocks, hidden, taps, group, int(not normed), normed)
    rows = len(case[2].slots)
    made, wanted = run(case, level), reference(*case)
    for name in ("y", "normed") if normed else ("y",):
        is_bf16 = made[name].dtype == np.uint16
        seen = to_float32(made[name], bf16) if is_bf16 else made[name]
        within = 4e-3 if is_bf16 else 1e-5
        assert np.allclose(seen[:rows], wanted[name][:rows], rtol=within, atol=1e-5), name
        assert np.isnan(seen[rows:]).all()


def test_block_conv_in_bf16_is_that_of_rounded_rows():
    op, arrays, step = conv_case("two", 48, 2, 16, 0, dtype="bf16")
    rows, floats = len(step.slots), conv_case("two", 48, 2, 16, 0)
    floats[1]["x"] = to_float32(arrays["x"], bf16)
    seen = run((op, arrays, step))["y"]
    assert np.array_equal(seen[:rows], to_bf16(run(floats)["y"][:rows]))
    assert np.isnan(to_float32(seen[rows:], bf16)).all()


def test_a_row_sees_no_row_of_another_block():
    op, arrays, step = conv_case("next", 48, 2, 16, 0)
    before = run((op, arrays, step))["y"]
    arrays["x"][2] += 1  # the last row of the first block
    after = run((op, arrays, step))["y"]
    rows = len(step.slots)
    assert [row for row in range(rows) if not np.array_equal(before[row], after[row])] == [2]


# ---- candidates ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("n", "count", "chunk"), [(300, 16, 64), (7, 16, 8192), (129, 1, 32), (64, 32, 64)]
)
def test_candidates_equal_their_reference(n, count, chunk):
    case = candidates_case(n, count, chunk)
    rows = len(case[2].sample_rows)
    seen, wanted = run(case), reference(*case)
    for name in ("scores", "ids"):
        assert np.array_equal(seen[name][:rows], wanted[name][:rows]), name
    assert np.isnan(seen["scores"][rows:]).all()


# ---- draft_walk ------------------------------------------------------------------------------
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(
    ("n", "top_k", "rank", "dtype"),
    [
        (48, 16, 10, "f32"),
        (48, 16, 256, "bf16"),
        (16, 16, 8, "f16"),
        (40, 1, 8, "f32"),
        (40, 8, 0, ""),
    ],
)
def test_a_greedy_walk_equals_its_reference(blocks, n, top_k, rank, dtype):
    case = walk_case(n, top_k, rank, dtype, blocks)
    seen, wanted = run(case)["proposals"], reference(*case)["proposals"]
    assert np.array_equal(seen, wanted)
    untouched = set(range(4)) - set(case[2].slots)
    assert all((seen[slot] == 77).all() for slot in untouched)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("nodes", [1, 6, 15])
@pytest.mark.parametrize(("top_k", "rank", "dtype"), [(16, 10, "f32"), (1, 8, "bf16"), (8, 0, "")])
def test_a_tree_equals_its_reference(blocks, nodes, top_k, rank, dtype):
    case = walk_case(48, top_k, rank, dtype, blocks, nodes=nodes)
    seen, wanted = run(case), reference(*case)
    for name in ("proposals", "parents"):
        assert np.array_equal(seen[name], wanted[name]), name
    for slot in set(case[2].slots):
        count = seen["proposals"][slot, 0]
        assert all(parent <= row for row, parent in enumerate(seen["parents"][slot, :count]))
        if top_k == 1:
            assert seen["parents"][slot, :count].tolist() == list(range(count))  # a chain
    if blocks == "two" and top_k > 1:
        assert seen["proposals"][:2, 0].tolist() == [nodes, nodes]  # more than the four masks


def test_a_tree_without_numbers_behind_some_depth_ends_there():
    case = walk_case(48, 16, 10, "f32", nodes=15)
    case[1]["hidden"][2:] = np.nan
    seen = run(case)
    assert seen["proposals"][0, 0] == 15
    assert max(depths(seen["parents"][0].tolist())) == 2
    case[1]["scores"][0] = np.nan
    assert run(case)["proposals"][0, 0] == 0


def test_a_sampled_request_keeps_its_chain():
    tree = walk_case(48, 16, 10, "f32", temperature=0.7, nodes=15)
    seen, chain = run(tree), run(walk_case(48, 16, 10, "f32", temperature=0.7))
    assert np.array_equal(seen["proposals"], chain["proposals"])
    assert seen["parents"][0].tolist() == list(range(15))


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.8}])
def test_a_sampled_walk_draws_as_sample_does_with_the_number_of_the_row_before(options):
    op, arrays, step = walk_case(48, 16, 0, "", "two", temperature=0.7)
    for name, value in options.items():
        step.slot_states[name] = value
    seen = run((op, arrays, step))["proposals"]
    for slot, first in ((0, 0), (1, 4)):
        for i in range(4):
            row = first + i
            logits = np.full(VOCAB, -np.inf, np.float32)
            logits[arrays["ids"][row]] = arrays["scores"][row]
            best = np.argsort(-logits, kind="stable")[16:]
            logits[best] = -np.inf
            seed = int(step.slot_states["seed"][slot])
            position = step.positions[step.sample_rows[row]] - 1
            settings = {"temperature": 0.7, "seed": seed, "position": position, **options}
            assert seen[slot, 1 + i] == sample_row(logits, **settings)


def test_a_slot_whose_values_are_no_numbers_ends_the_proposals():
    op, arrays, step = walk_case(48, 16, 10, "f32")
    whole = run((op, arrays, step))["proposals"][0]
    assert whole[0] == 15
    for row, spoil in ((0, "scores"), (4, "hidden"), (14, "scores")):
        spoilt = {name: array.copy() for name, array in arrays.items()}
        spoilt[spoil][row] = np.nan
        seen = run((op, spoilt, step))["proposals"][0]
        assert seen[0] == row
        assert np.array_equal(seen[1 : 1 + row], whole[1 : 1 + row])


# ---- draft_rows ------------------------------------------------------------------------------
@pytest.mark.parametrize("block", [2, 5, 8])
def test_a_table_holds_a_block_for_every_sequence_that_sampled(block):
    case = rows_case(block)
    rows = table_rows(run(case)["table"])
    wanted = table_rows(reference(*case)["table"])
    for name in ("token", "slot", "position", "sample_rows"):
        assert np.array_equal(getattr(rows, name), getattr(wanted, name)), name
    anchors = slice(0, None, block)
    assert rows.slot[anchors].tolist() == [2, 0, 3]
    assert rows.position[anchors].tolist() == [13, 33, 5]  # two accepted, two, none
    assert rows.token[anchors].tolist() == [99, 23, 50]
    masks = [i for i in range(3 * block) if i % block]
    assert rows.sample_rows.tolist() == masks
    assert set(rows.token[masks].tolist()) == {VOCAB - 1}


def blocks_of(case: Case) -> list[int]:
    return table_rows(run(case)["table"]).slot[:: case[0].params["block"]].tolist()


def test_sequences_that_end_here_get_no_block():
    for change, left in (
        (("max_tokens", 2, 4), [0, 3]),  # three committed; one more comes without a proposal
        (("max_tokens", 2, 5), [2, 0, 3]),
        (("max_tokens", 3, 2), [2, 0]),
        (("produced", 0, 46), [2, 3]),
        (("produced", 0, 45), [2, 0, 3]),
        (("stop_ids", 0, 22), [2, 3]),
        (("stop_ids", 2, 13), [2, 0, 3]),  # sampled behind the commit
    ):
        op, arrays, step = rows_case(4)
        name, slot, value = change
        step.slot_states["stop_count"][slot] = name == "stop_ids"
        if name == "stop_ids":
            step.slot_states[name][slot, 0] = value
        else:
            step.slot_states[name][slot] = value
        assert blocks_of((op, arrays, step)) == left, change
    op, arrays, step = rows_case(4)
    step.slot_states["stop_count"][0], step.slot_states["stop_ids"][0, 0] = 1, 22
    step.slot_states["flags"][0] = 1  # goes past stop tokens
    assert blocks_of((op, arrays, step)) == [2, 0, 3]


def test_a_table_and_a_context_that_are_full_leave_blocks_out():
    assert blocks_of(rows_case(8, capacity=16)) == [2, 0]
    assert blocks_of(rows_case(8, capacity=23)) == [2, 0]
    assert blocks_of(rows_case(4, context=33)) == [2, 3]
    assert blocks_of(rows_case(4, context=34)) == [2, 0, 3]


# ---- errors ----------------------------------------------------------------------------------
def test_operands_that_do_not_fit_are_refused():
    graph = Graph(rows=4, vocab=VOCAB)
    f32 = {n: graph.activation(n, [4, w], "f32") for n, w in (("x", 48), ("y", 48), ("d", 11))}
    base = graph.weight("base", [2, 2, 48], "f32", lambda: None)
    with pytest.raises(GraphError, match=r"^d has 11 columns and base 48, x has 48"):
        block_conv(graph, f32["x"], f32["d"], base, f32["y"], side=0)
    norm, halves = (
        graph.weight("norm", [48], "f32", lambda: None),
        graph.activation("halves", [4, 48], "bf16"),
    )
    rest = {"d": graph.activation("d12", [4, 12], "f32"), "base": base, "side": 0}
    with pytest.raises(GraphError, match=r"^norm alone"):
        block_conv(graph, f32["x"], y=f32["y"], norm=norm, **rest)
    with pytest.raises(GraphError, match=r"^y is bf16 beside normed"):
        block_conv(graph, f32["x"], y=halves, norm=norm, normed=f32["y"], **rest)
    of_48 = graph.activation("d4", [4, 4], "f32")  # a row's channels share one coefficient
    op = block_conv(graph, f32["x"], of_48, base, f32["y"], side=0)
    with pytest.raises(GraphError, match=r"^48 columns in groups of 48, the CUDA body takes"):
        op.body.tile(op, Target("cuda", 2))
    ids = graph.activation("ids", [4, 48], "u32")
    with pytest.raises(GraphError, match=r"^scores and ids of \[48, 48\] columns for 8 of each 16"):
        candidates(graph, f32["x"], f32["y"], ids, count=8, chunk=16)
    with pytest.raises(GraphError, match=r"^top_k is 33"):
        draft_walk(graph, f32["x"], ids, graph.draft(), top_k=33)
    walk = walk_case(48, 16, 10, "f32")[0]
    with pytest.raises(GraphError, match=r"^a selector of rank 10, the CUDA body takes"):
        walk.body.tile(walk, Target("cuda", 2))
    book = graph.weight("book", [VOCAB, 12], "f32", lambda: None)
    with pytest.raises(GraphError, match=r"^a selector of widths \[48, 12, 12\]"):
        draft_walk(graph, f32["x"], ids, ids, top_k=8, selector=(f32["y"], book, book))
