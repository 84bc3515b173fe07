"""Trees of proposals on the GPU: bodies bit for bit, and that no text changes."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpurt.body import body
from gpurt.graph import Graph
from gpurt.graphs.ops.attention import SPAN
from gpurt.graphs.ops.attention_commit import attention_commit, commit_paths
from gpurt.runtime import Runtime
from tests.gpu import test_attention_extras as extras
from tests.gpu import test_attention_split as split
from tests.gpu.one_op import TEAMS, Arrays, reference, run_op, runner
from tests.gpu.one_task import Step
from tests.gpu.test_attention_extras import Case
from tests.gpu.tiny_dflash import DRAFT, drafted_muse, tiny_dflash
from tests.gpu.tiny_muse import tiny_muse
from tests.helpers.draft_ops import BLOCKS, walk_case
from tests.helpers.trees import ancestor_bits, depths, random_parents

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPT = [int(t) for t in np.random.default_rng(1).integers(0, 2048, 37)]
COUNT = 60
PROPOSALS = (1, 7, 15)
TREES = ("GPURT_TREES",)
SLOT = 1


# ---- bodies ----------------------------------------------------------------------------------
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("nodes", [1, 15])
@pytest.mark.parametrize(("top_k", "rank", "dtype"), [(16, 256, "bf16"), (1, 8, "f32"), (8, 0, "")])
@pytest.mark.parametrize("team", TEAMS)
def test_a_tree_equals_its_reference(
    blocks: str, nodes: int, top_k: int, rank: int, dtype: str, team: int
) -> None:
    op, arrays, step = walk_case(48, top_k, rank, dtype, blocks, nodes=nodes)
    seen = run_op(op, arrays, step, runner("draft_walk", team, TREES))
    want = reference(op, arrays, step)
    for name in ("proposals", "parents"):
        assert np.array_equal(seen[name], want[name]), name


def test_a_sampled_request_keeps_its_chain() -> None:
    op, arrays, step = walk_case(48, 16, 0, "", "two", temperature=0.7, nodes=15)
    seen = run_op(op, arrays, step, runner("draft_walk", 16, TREES))
    assert seen["proposals"][:2, 0].tolist() == [4, 4]
    assert seen["parents"][:2, :4].tolist() == [[0, 1, 2, 3]] * 2


def tree_step(parents: list[int], anchor: int) -> Step:
    """One block; all of its rows are sampled, and each row's token is its own."""
    rows = len(parents) + 1
    positions = [anchor + depth for depth in depths(parents)]
    flags = [bits << 16 | (3 if row else 1) for row, bits in enumerate(ancestor_bits(parents))]
    tokens = [100 + row for row in range(rows)]
    return Step([SLOT] * rows, positions, tokens, list(range(rows)), flags=flags)


def path_of(row: int, parents: list[int]) -> list[int]:
    path = [row]
    while path[0]:
        path.insert(0, parents[path[0] - 1])
    return path


def cut(arrays: Arrays, path: list[int], anchor: int) -> tuple[Arrays, Step]:
    """The rows of a path alone, as a chain."""
    alone = {name: array.copy() for name, array in arrays.items()}
    for name in ("q", "kv"):
        alone[name][: len(path)] = arrays[name][path]
    positions = [anchor + i for i in range(len(path))]
    return alone, Step([SLOT] * len(path), positions)


SHAPES = [
    (Case(norm=0, gated=False, out_eps=0), "bf16", 70),
    (Case(window=20), "f32", 45),
    (Case(heads=9, kv_heads=1, dim=128, rope=False, norm=0), "e4m3", 0),
]


@pytest.mark.parametrize(("case", "dtype", "anchor"), SHAPES, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_of_a_tree_have_the_bits_of_their_paths(
    case: Case, dtype: str, anchor: int, seed: int
) -> None:
    parents = random_parents(random.Random(seed), 15)
    graph = Graph(rows=16, slots=extras.SLOTS, context=extras.CONTEXT, vocab=300)
    step, op = tree_step(parents, anchor), extras.operator(case, dtype, graph)
    arrays = extras.inputs(op, step, dtype, seed)
    made = [run_op(op, arrays, step, extras.runner(case, dtype, team, TREES)) for team in TEAMS]
    assert made[0]["out"].tobytes() == made[1]["out"].tobytes()
    for row in (1, 4, 9, 15):
        path = path_of(row, parents)
        alone = run_op(op, *cut(arrays, path, anchor), extras.runner(case, dtype))
        assert made[0]["out"][row].tobytes() == alone["out"][len(path) - 1].tobytes(), path
    check_commit(graph, op, made[0], arrays, parents, step, (case, dtype))


def check_commit(
    graph: Graph,
    op: Any,
    made: Arrays,
    arrays: Arrays,
    parents: list[int],
    step: Step,
    way: tuple[Case, str],
) -> None:
    """The cache, with a path committed, is that of the path alone."""
    anchor = step.positions[0]
    path = path_of(max(range(16), key=depths(parents).__getitem__), parents)
    sampled = np.zeros(16, np.uint32)
    for before, after in itertools.pairwise(path):
        sampled[before] = step.tokens[after]
    commit = attention_commit(graph, op)
    caches = {name: made[name] for name in ("k_cache", "v_cache", "page_table")}
    got = run_op(
        commit, {"sampled": sampled, **caches}, step, runner("attention_commit", 16, TREES)
    )
    alone = run_op(op, *cut(arrays, path, anchor), extras.runner(*way))
    table = made["page_table"][SLOT]
    first = max(0, anchor + 1 - way[0].window) if way[0].window else 0
    for position in range(first, anchor + len(path)):
        page, at = table[position // extras.PAGE % len(table)], position % extras.PAGE
        for name in ("k_cache", "v_cache"):
            seen, want = got[name][page, :, at], alone[name][page, :, at]
            assert seen.tobytes() == want.tobytes(), (name, position)


def test_a_tree_over_a_border_of_spans_has_the_bits_of_its_paths() -> None:
    case, dtype, anchor = split.CASES[0], "bf16", SPAN - 3
    parents = random_parents(random.Random(5), 15)
    step = tree_step(parents, anchor)
    op = extras.operator(case, dtype, Graph(rows=16, slots=3, context=split.CONTEXT), 2)
    arrays = extras.inputs(op, step, dtype)
    arrays["partials"][...] = 0
    seen = run_op(op, arrays, step, split.split_runner(case, dtype, 16, TREES))["partials"]
    for row in (2, 7, 15):
        path = path_of(row, parents)
        alone = run_op(op, *cut(arrays, path, anchor), split.split_runner(case, dtype))
        assert seen[row].tobytes() == alone["partials"][len(path) - 1].tobytes(), path


# ---- whole requests --------------------------------------------------------------------------
@pytest.mark.parametrize("team", TEAMS)
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 4}])
@pytest.mark.parametrize("block", [4, 16])  # 4: fewer masks than nodes
def test_the_text_is_that_without_a_drafter(
    team: int, settings: dict[str, Any], block: int
) -> None:
    model = tiny_dflash(replace(DRAFT, block=block))
    with Runtime("cuda:0", team_warps=team) as runtime:
        wanted = runtime.submit(tiny_muse(), PROMPT, max_tokens=COUNT, **settings).result(30)
        for proposals in PROPOSALS:
            graph = drafted_muse(proposals, model, draft_tree=True)
            request = runtime.submit(graph, PROMPT, max_tokens=COUNT, **settings)
            assert request.result(30) == wanted
            assert request.stats.launches <= 1
            assert len(request.accepted) == proposals


# Proposes the text, and in front of each of its tokens a sibling that is wrong.
GROWER = """
struct grower {
  __device__ static void run(const gpurt::TaskRecord& task, const gpurt::BodyContext& context) {
    if (context.thread != 0) return;
    const unsigned text[] = {TEXT};
    const unsigned first = context.sample_rows[0], count = context.step->sample_count;
    const unsigned* sampled = context.address<const unsigned>(task, 0);
    const unsigned accepted =
        gpurt::accepted_rows(context.rows, context.sample_rows, sampled, count, 0);
    unsigned at = context.rows[first].position + gpurt::bit_count(accepted) - PROMPT + 1;
    gpurt::Proposals& to = *context.address<gpurt::Proposals>(task, 1);
    unsigned* parents = context.address<unsigned>(task, 2);
    unsigned made = 0, right = 0;
    for (; at < COUNT && made + 2 <= 14; ++at) {
      to.tokens[made] = (text[at] + 1) % VOCAB, parents[made++] = right;
      to.tokens[made] = text[at], parents[made++] = right;
      right = made;
    }
    to.count = made;
  }
};
"""


@pytest.mark.parametrize("team", TEAMS)
def test_a_tree_that_holds_the_text_gives_it_at_once(team: int) -> None:
    with Runtime("cuda:0", team_warps=team) as runtime:
        wanted = runtime.submit(tiny_muse(), PROMPT, max_tokens=COUNT, ignore_eos=True).result(30)
        graph = tiny_muse()
        written = graph.draft(15, tree=True)
        assert graph.parents is not None
        names = {"TEXT": ", ".join(map(str, wanted.token_ids)), "PROMPT": str(len(PROMPT))}
        source = GROWER
        for name, value in (names | {"COUNT": str(COUNT), "VOCAB": str(graph.vocab)}).items():
            source = source.replace(name, value)
        with graph.at("draft"):
            commit_paths(graph)
            own = body("grower", print, source)
            graph.task(own, [graph.sampled], [written, graph.parents])
        request = runtime.submit(graph, PROMPT, max_tokens=COUNT, ignore_eos=True)
        assert request.result(30) == wanted
        assert request.accepted[0] > 0
        assert request.steps < COUNT
