"""A tree of proposals changes how fast tokens come, never which."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gpurt.cli import main
from gpurt.errors import GraphError
from gpurt.graphs import muse_spark
from gpurt.graphs.drafters import add_drafter
from gpurt.graphs.llama import build
from gpurt.loaders import load_model
from gpurt.loaders.hf_dflash import load_draft
from gpurt.runtime import Runtime
from tests.helpers.tiny import repetitive_folder
from tests.helpers.trees import Grower, add_tree_drafter, wild

pytestmark = pytest.mark.timeout(180)

PROMPT = [5, 11, 2, 7, 5, 11]
VOCAB, TOKENS, FEW = 97, 40, 7
OF_SMALL = {
    "vocab": FEW,
    "mask_token": 6,
    "taps": (0, 2),
    "windows": (5, 0),
    "layers": 2,
    "causal": (False, False),
}
# Longer than every window and its ring of pages.
LONG = [token % FEW for token in np.random.default_rng(3).integers(0, 211, 41).tolist()]


@pytest.fixture(scope="module")
def runtime():
    with Runtime("host", workers=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_model(repetitive_folder(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A muse_spark of seven tokens, with sliding layers: any proposal is often right."""
    pytest.importorskip("torch")
    from tests.helpers.muse import make_muse, save_muse

    folder = tmp_path_factory.mktemp("small")
    save_muse(make_muse(vocab_size=FEW, num_hidden_layers=3), folder)
    return load_model(folder)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    """Of `small`, by rows of a block."""
    pytest.importorskip("torch")
    from tests.helpers.dflash import make_dflash, save_dflash

    made = {}
    for block in (3, 16):
        model = make_dflash(2, block=block, **OF_SMALL)
        made[block] = load_draft(save_dflash(model, tmp_path_factory.mktemp(f"draft{block}")))
    return made


def llama_of(model, **options):
    return build(model.config, model.weights, **({"context": 128} | options))


def muse_of(model, drafter=None, **options):
    settings = {"context": 96, "page": 4} | options
    if drafter is not None:
        settings = {"draft": "dflash", "draft_model": drafter, "draft_tree": True} | settings
    return muse_spark.build(model.config, model.weights, **settings)


def text_of(runtime, graph, prompt=PROMPT, **options):
    settings = {"max_tokens": TOKENS, "ignore_eos": True} | options
    return list(runtime.submit(graph, prompt, **settings))


@pytest.fixture(scope="module")
def plain(runtime, tiny):
    """The text without a drafter."""
    return text_of(runtime, llama_of(tiny))


@pytest.fixture(scope="module")
def wanted(runtime, small):
    return text_of(runtime, muse_of(small), LONG)


# ---- any tree --------------------------------------------------------------------------------
@pytest.mark.parametrize("proposals", range(1, 16))
def test_a_tree_that_holds_the_text_gives_it_at_once(runtime, tiny, plain, proposals):
    grower = Grower(plain, VOCAB, proposals, seed=proposals)
    graph = add_tree_drafter(llama_of(tiny), grower, proposals)
    request = runtime.submit(graph, PROMPT, max_tokens=TOKENS)
    assert list(request) == plain
    # every step commits all of the text that the tree before it held
    assert sum(request.accepted) == sum(len(path) - 1 for path in grower.paths)
    assert request.steps == len(grower.paths)
    if proposals > 4:
        assert any(path != list(range(len(path))) for path in grower.paths)


@pytest.mark.parametrize("seed", range(4))
def test_no_tree_can_change_a_greedy_text(runtime, tiny, small, plain, wanted, seed):
    for proposals in (1, 6, 15):
        graph = add_tree_drafter(llama_of(tiny), wild(VOCAB, seed), proposals)
        assert text_of(runtime, graph) == plain
        graph = add_tree_drafter(muse_of(small), wild(FEW, seed), proposals)
        request = runtime.submit(graph, LONG, max_tokens=TOKENS, ignore_eos=True)
        assert list(request) == wanted
    assert sum(request.accepted) > 0


def test_the_cache_is_that_of_decoding_without_a_drafter(runtime, tiny, plain):
    trees = add_tree_drafter(llama_of(tiny), Grower(plain, VOCAB, 11), 11)
    caches = []
    for graph in (llama_of(tiny), trees):
        assert text_of(runtime, graph) == plain
        fed = len(PROMPT) + TOKENS - 1  # the last token is not
        caches.append(runtime.read(graph, "layers[1].k_cache")[:, :, :fed].copy())
    assert np.array_equal(*caches)


def test_rings_hold_a_tree_behind_their_window(runtime, small, wanted):
    for seed in range(3):
        grower = Grower(wanted, FEW, 15, seed)
        # the prompt is one step, as the grower wants it
        graph = add_tree_drafter(muse_of(small, rows=len(LONG)), grower, 15)
        assert text_of(runtime, graph, LONG) == wanted
        assert sum(len(path) for path in grower.paths) >= TOKENS


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_a_cache_of_few_bits_keeps_the_text(runtime, tiny, kv_dtype):
    expected = text_of(runtime, llama_of(tiny, kv_dtype=kv_dtype))
    graph = add_tree_drafter(llama_of(tiny, kv_dtype=kv_dtype), Grower(expected, VOCAB, 15), 15)
    assert text_of(runtime, graph) == expected


@pytest.mark.parametrize("context", [32, 33, 47])
def test_a_text_fills_its_context_to_the_last_position(runtime, tiny, context):
    whole = text_of(runtime, llama_of(tiny, context=context), max_tokens=None)
    for fill in (Grower([*whole, *[1] * 16], VOCAB, 15), wild(VOCAB)):
        graph = add_tree_drafter(llama_of(tiny, context=context), fill, 15)
        assert text_of(runtime, graph, max_tokens=None) == whole


def test_ends_inside_a_tree_are_exact(runtime, tiny, plain):
    for stop in list(dict.fromkeys(plain))[:8]:
        graph = add_tree_drafter(llama_of(tiny), Grower(plain, VOCAB, 15), 15)
        request = runtime.submit(graph, PROMPT, max_tokens=TOKENS, stop_ids=[stop])
        assert request.result(30).token_ids == plain[: plain.index(stop) + 1]
    for count in (1, 2, 9, 17):
        graph = add_tree_drafter(llama_of(tiny), Grower(plain, VOCAB, 15), 15)
        assert text_of(runtime, graph, max_tokens=count) == plain[:count]


def test_a_sampled_text_is_the_same_for_the_same_seed(runtime, small):
    plain, tree = muse_of(small), add_tree_drafter(muse_of(small), wild(FEW), 15)
    for seed in range(3):
        settings = {"temperature": 0.8, "seed": seed}
        expected = text_of(runtime, plain, LONG, **settings)
        assert text_of(runtime, tree, LONG, **settings) == expected


# ---- dflash ----------------------------------------------------------------------------------
@pytest.mark.parametrize("proposals", range(1, 16))
def test_dflash_keeps_the_text_with_every_number_of_nodes(
    runtime, small, wanted, drafters, proposals
):
    for drafter in drafters.values():
        graph = muse_of(small, drafter, proposals=proposals)
        request = runtime.submit(graph, LONG, max_tokens=TOKENS, ignore_eos=True)
        assert list(request) == wanted
        assert len(request.accepted) == proposals
    assert request.accepted[0] > 0


@pytest.mark.parametrize(("slots", "rows"), [(2, 16), (3, 7)])
def test_sequences_that_share_steps_do_not_touch_each_other(runtime, small, drafters, slots, rows):
    prompts = [[(5 * i + j) % FEW for j in range(3 + 11 * i)] for i in range(5)]
    alone = [text_of(runtime, muse_of(small), prompt) for prompt in prompts]
    graph = muse_of(small, drafters[3], slots=slots, rows=rows)
    requests = [runtime.submit(graph, p, max_tokens=TOKENS, ignore_eos=True) for p in prompts]
    assert [list(request) for request in requests] == alone


@pytest.mark.parametrize("policy", ["claim", "ready"])
def test_the_tree_is_the_same_under_any_policy(small, wanted, drafters, policy):
    accepted = []
    for kind in ("static", policy):
        with Runtime("host", workers=3, policy=kind) as other:
            request = other.submit(
                muse_of(small, drafters[3]), LONG, max_tokens=TOKENS, ignore_eos=True
            )
            assert list(request) == wanted
            accepted.append(request.accepted)
    assert accepted[0] == accepted[1]


def test_a_sampled_request_of_a_tree_has_the_chains_proposals(runtime, small, drafters):
    settings = {"temperature": 0.8, "seed": 5, "max_tokens": TOKENS, "ignore_eos": True}
    accepted = []
    for tree in (False, True):
        graph = muse_of(small, drafters[16], draft_tree=tree)
        request = runtime.submit(graph, LONG, **settings)
        accepted.append((list(request), request.accepted))
    assert accepted[0] == accepted[1]


def test_the_command_line_makes_trees(capsys, small, tmp_path):
    from tests.helpers.dflash import make_dflash, save_dflash

    folder = save_dflash(make_dflash(2, block=3, **OF_SMALL), tmp_path)
    records = []
    for options in ([], ["--draft", "dflash", "--draft-model", str(folder), "--draft-tree"]):
        arguments = ["--model", small.path, "--device", "host", "--prompt-ids", "3,4,5", "--json"]
        assert main(["run", *arguments, "--max-tokens", "9", "--ignore-eos", *options]) == 0
        records.append(json.loads(capsys.readouterr().out))
    assert records[0]["token_ids"] == records[1]["token_ids"]
    assert len(records[1]["accepted_by_position"]) == 15  # a block of three has two as a chain


def test_other_drafters_make_no_trees(tiny):
    with pytest.raises(GraphError, match=r"^draft is 'ngram', and is to make trees - at llama"):
        llama_of(tiny, draft="ngram", draft_tree=True)
    with pytest.raises(GraphError, match=r"^draft is 'none', and is to make trees"):
        add_drafter(llama_of(tiny), "none", tree=True)
