"""The dflash drafter on several ranks: one rank's text, and the same proposals on every rank."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gpurt.cli import main
from gpurt.errors import GraphError
from gpurt.graphs import muse_spark
from gpurt.loaders import load_model
from gpurt.loaders.hf_dflash import load_draft
from gpurt.ranks import group
from gpurt.runtime import Runtime
from tests.helpers.dflash import make_dflash, save_dflash
from tests.helpers.muse import make_muse, save_muse
from tests.helpers.oracle import GraphOracle

pytestmark = [pytest.mark.reference, pytest.mark.timeout(180)]

VOCAB = 8  # any proposal is often right
PROMPT = np.random.default_rng(3).integers(0, VOCAB, 41).tolist()
BOUNDS = {"context": 96, "page": 4}
DRAFT = {
    "vocab": VOCAB,
    "mask_token": 7,
    "taps": (0, 2),
    "windows": (5, 0),
    "layers": 2,
    "causal": (False, True),
    "selector_rank": 12,
}
PLAIN = {"conv_taps": 0, "conv_group": 1, "selector_rank": 0, "selector_top_k": 1}  # DFlash 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 3, "moe_intermediate_size": 32}
    save_muse(make_muse(**sizes), folder)
    return load_model(folder)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    """By name, as loaded from a folder."""
    folder = tmp_path_factory.mktemp("drafters")
    made = {"dflash-2": DRAFT, "dflash-1": DRAFT | PLAIN}
    return {
        name: load_draft(save_dflash(make_dflash(0, **changes), folder / name))
        for name, changes in made.items()
    }


def graph_of(model, drafter=None, ranks=1, **options):
    if drafter is not None:
        options |= {"draft": "dflash", "draft_model": drafter}
    made = [
        muse_spark.build(
            model.config, model.weights, tp_size=ranks, tp_rank=rank, **BOUNDS, **options
        )
        for rank in range(ranks)
    ]
    return group(made)


def run(graph, policy="static", names=(), **options):
    """(the request, at its end each rank's content of the named buffers)."""
    devices = ["host"] * len(graph.group)
    settings = {"max_tokens": 40, "ignore_eos": True} | options
    with Runtime(devices if len(devices) > 1 else "host", workers=1, policy=policy) as runtime:
        request = runtime.submit(graph, PROMPT, **settings)
        request.result(60)
        runtime.park()  # rank 0 has ended its last step; now the others have, too
        ranks = runtime._find(graph).executor.ranks
        return request, [[one.read(name) for name in names] for one in ranks]


# ---- the same text -----------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["dflash-1", "dflash-2"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_text_is_that_of_one_rank_and_every_rank_proposes_the_same(
    ranks, name, tree, model, drafters
):
    wanted, _ = run(graph_of(model))
    drafter, policy = drafters[name], "claim" if tree else "static"
    alone, _ = run(graph_of(model, drafter, draft_tree=tree))
    graph = graph_of(model, drafter, ranks, draft_tree=tree)
    names = ["step.proposals", "draft.scores.all", "draft.ids.all", "draft.layers[1].k_cache"]
    request, seen = run(graph, policy, names)
    assert list(request) == list(alone) == list(wanted)
    assert request.accepted == alone.accepted
    assert sum(request.accepted) > 0
    assert np.unique(seen[0][2]).size > VOCAB // ranks, "ids of other ranks are among them"
    for other in seen[1:]:
        for ours, theirs, buffer in zip(seen[0][:3], other, names, strict=False):
            assert ours.tobytes() == theirs.tobytes(), buffer
    caches = [of_rank[3].tobytes() for of_rank in seen]
    assert len(set(caches)) == min(ranks, 2), "ranks have the keys of their own heads: there are 2"


def test_a_prompt_of_several_steps_that_samples_keeps_its_text(model, drafters):
    settings = {"temperature": 0.8, "seed": 5, "max_tokens": 30}
    wanted, _ = run(graph_of(model), **settings)
    for policy in ("ready", "claim"):
        graph = graph_of(model, drafters["dflash-2"], 2, rows=9, slots=2, proposals=6)
        request, _ = run(graph, policy, **settings)
        assert list(request) == list(wanted)
        assert sum(request.accepted) > 0


def test_a_looped_back_rank_proposes_what_its_references_do(model, drafters):
    graph = graph_of(model, drafters["dflash-2"], 2).group[1]
    graph.group = (graph,)
    oracle = GraphOracle(graph)
    names = ["step.proposals"]
    request, [[seen]] = run(graph, names=names, max_tokens=3)  # later steps draft no more
    assert oracle.generate(PROMPT, 1) == list(request)[:1]
    assert oracle.arrays["step.proposals"].tolist() == seen.tolist()
    assert seen[0, 0] == 15


# ---- shares that cannot be ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"intermediate": 58}, "58 inner width have no 4"),
        ({"heads": 6, "kv_heads": 6}, "6 heads, 6 kv heads have no 4"),
        ({"selector_rank": 10}, "10 selector rank have no 4"),
        ({"conv_taps": 1, "conv_group": 48}, "2 convolution coefficients have no 4"),
    ],
)
def test_a_drafter_without_equal_shares_is_refused_with_numbers(changes, what, model, tmp_path):
    drafter = load_draft(save_dflash(make_dflash(0, **(DRAFT | changes)), tmp_path))
    with pytest.raises(
        GraphError, match=rf"^{what} equal shares - at muse_spark\.draft - use a tp"
    ):
        graph_of(model, drafter, 4)


# ---- nano, command line ------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [2, 4])
def test_nano_drafts_on_ranks_without_being_asked(ranks, capsys):
    question = "Anna has 3 apples and buys 4 more. How many apples does she have?"
    arguments = ["run", "--chat", "--device", "host", "--prompt", question, "--json"]
    records = []
    for options in (["--draft", "none"], ["--draft", "dflash"], ["--tp", str(ranks)]):
        assert main([*arguments, "--workers", "1", *options]) == 0
        records.append(json.loads(capsys.readouterr().out))
    plain, alone, shared = records
    assert shared["draft"] == "dflash"
    assert shared["token_ids"] == alone["token_ids"] == plain["token_ids"]
    assert shared["accepted_by_position"] == alone["accepted_by_position"]
    assert shared["accepted_per_step"] > 5
    assert shared["draft_ms"] > 0
    assert main([*arguments, "--tp", "3"]) == 2
    assert "4 heads" in capsys.readouterr().err
