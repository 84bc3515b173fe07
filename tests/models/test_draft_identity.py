"""A drafter changes how fast tokens come, never which: greedy and sampled, ends, slots, cancel.

The models: two layers of SmolLM2, quantised, and a small float model whose greedy texts soon repeat
themselves, so that prompt look-up has something to find.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gpurt.graphs import muse_spark
from gpurt.graphs.drafters import add_drafter
from gpurt.graphs.llama import build
from gpurt.loaders import load_model
from gpurt.reply import Reply
from gpurt.runtime import Runtime
from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.gate import Gate
from tests.helpers.hostile_drafters import (
    Follower,
    add_python_drafter,
    constant,
    repeats,
    scattered,
)
from tests.helpers.tiny import repetitive_folder

pytestmark = pytest.mark.timeout(240)

PROMPT = [5, 11, 2, 7, 5, 11]
VOCAB = 97
TOKENS = 40


@pytest.fixture(scope="module")
def runtime():
    with Runtime("host", workers=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_model(repetitive_folder(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB))


@pytest.fixture(scope="module")
def smollm2():
    model = load_model("smollm2")
    return dataclasses.replace(model, config=dataclasses.replace(model.config, layers=2))


def graph_of(model, **options):
    return build(model.config, model.weights, **({"context": 128} | options))


def text_of(runtime, graph, prompt=PROMPT, **options):
    settings = {"max_tokens": TOKENS, "ignore_eos": True} | options
    return list(runtime.submit(graph, prompt, **settings))


@pytest.fixture(scope="module")
def plain(runtime, tiny):
    """The text without a drafter."""
    return text_of(runtime, graph_of(tiny))


# ---- the same tokens ---------------------------------------------------------------------
@pytest.mark.parametrize("proposals", range(1, 16))
def test_greedy_text_is_the_same_for_every_number_of_proposals(runtime, tiny, plain, proposals):
    graph = graph_of(tiny, draft="ngram", proposals=proposals)
    assert text_of(runtime, graph) == plain
    right = Follower(plain, VOCAB, proposals)
    request = runtime.submit(
        add_python_drafter(graph_of(tiny), right, proposals), PROMPT, max_tokens=TOKENS
    )
    assert list(request) == plain
    stats = request.stats
    # The first token comes from the prompt; the last step has less to do.
    steps = -(-(TOKENS - 1) // (proposals + 1))
    assert request.steps == 1 + steps
    assert stats.accepted_per_step == pytest.approx((TOKENS - 1) / steps)
    assert len(stats.accepted_by_position) == proposals
    assert 1 + sum(stats.accepted_by_position) == pytest.approx(stats.accepted_per_step)


@pytest.mark.parametrize("right", [0, 1, 2, 7, 14])
def test_what_comes_behind_a_wrong_proposal_leaves_no_trace(runtime, tiny, plain, right):
    follower = Follower(plain, VOCAB, 15, right)
    graph = add_python_drafter(graph_of(tiny), follower, 15)
    request = runtime.submit(graph, PROMPT, max_tokens=TOKENS)
    assert list(request) == plain
    shares = request.stats.accepted_by_position
    assert all(share == 0 for share in shares[right:])
    assert all(share > 0 for share in shares[:right])


HOSTILE = {
    "constant": lambda: constant(0),
    "repeats": lambda: repeats,
    "scattered": lambda: scattered(VOCAB),
    "no tokens": lambda: constant(VOCAB),
    "huge tokens": lambda: constant(0xFFFFFFFF, 0xFFFFFFFF),
    "past the end": lambda: constant(3, 0xFFFFFFFF),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_drafter_can_change_a_greedy_text(runtime, tiny, plain, kind):
    for proposals in (1, 5, 15):
        graph = add_python_drafter(graph_of(tiny), HOSTILE[kind](), proposals)
        assert text_of(runtime, graph) == plain


def test_ids_that_are_no_tokens_are_never_fed(runtime, tiny):
    graph = add_python_drafter(graph_of(tiny), constant(VOCAB), 15)
    request = runtime.submit(graph, PROMPT, max_tokens=10, ignore_eos=True)
    assert len(list(request)) == 10
    assert request.trace().steps["rows"].max() == len(PROMPT)
    assert set(request.trace().steps["rows"][1:].tolist()) == {1}


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 9}])
def test_sampled_text_is_the_same_for_the_same_seed(runtime, tiny, settings):
    plain, drafted = graph_of(tiny), graph_of(tiny, draft="ngram")
    hostile = add_python_drafter(graph_of(tiny), scattered(VOCAB), 15)
    for seed in range(4):
        wanted = text_of(runtime, plain, seed=seed, **settings)
        assert text_of(runtime, drafted, seed=seed, **settings) == wanted
        assert text_of(runtime, hostile, seed=seed, **settings) == wanted


@pytest.mark.parametrize("proposals", [3, 15])
def test_quantised_smollm2_gives_the_same_text(runtime, smollm2, proposals):
    prompt = [504, 3575, 282, 4649, 314, 504, 3575, 282]
    wanted = text_of(runtime, graph_of(smollm2, context=64), prompt, max_tokens=16)
    for graph in (
        graph_of(smollm2, context=64, draft="ngram", proposals=proposals),
        add_python_drafter(
            graph_of(smollm2, context=64), Follower(wanted, 49152, proposals, 2), proposals
        ),
    ):
        assert text_of(runtime, graph, prompt, max_tokens=16) == wanted


def test_the_cache_is_that_of_decoding_without_a_drafter(runtime, tiny, plain):
    graphs = graph_of(tiny), add_python_drafter(graph_of(tiny), Follower(plain, VOCAB, 6, 3), 6)
    caches = []
    for graph in graphs:
        assert text_of(runtime, graph) == plain
        fed = len(PROMPT) + TOKENS - 1  # the last token is not
        caches.append(runtime.read(graph, "layers[1].k_cache")[:, :, :fed].copy())
    assert np.array_equal(*caches)


# ---- ends ----------------------------------------------------------------------------------
def test_a_stop_token_inside_a_block_ends_the_text_exactly_there(runtime, tiny, plain):
    follower = Follower(plain, VOCAB, 15)
    graph = add_python_drafter(graph_of(tiny), follower, 15)
    for stop in dict.fromkeys(plain):
        follower.restart()
        request = runtime.submit(graph, PROMPT, max_tokens=TOKENS, stop_ids=[stop])
        end = plain.index(stop) + 1
        assert request.result(30).token_ids == plain[:end]
        assert request.finish_reason == "stop"


def test_a_stop_string_inside_a_block_ends_the_text_exactly_there(runtime, tiny, plain, tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    whole = tokenizer.decode(plain[:16])  # of the first block and the token before it
    follower = Follower(plain, VOCAB, 15)
    graph = add_python_drafter(graph_of(tiny), follower, 15)
    for begin in range(len(whole) - 2):
        stop = whole[begin : begin + 2]
        follower.restart()
        request = runtime.submit(graph, PROMPT, max_tokens=TOKENS)
        reply = Reply(request, tokenizer, [stop])
        assert "".join(reply) == reply.text == whole[: whole.find(stop)]
        assert reply.finish_reason == "stop"


def test_max_tokens_ends_the_text_exactly_there(runtime, tiny, plain):
    follower = Follower(plain, VOCAB, 15)
    graph = add_python_drafter(graph_of(tiny), follower, 15)
    for count in range(1, TOKENS):
        follower.restart()
        request = runtime.submit(graph, PROMPT, max_tokens=count)
        assert request.result(30).token_ids == plain[:count]
        assert request.finish_reason == "length"


@pytest.mark.parametrize("context", [32, 33, 47, 64])
def test_a_text_fills_its_context_to_the_last_position(runtime, tiny, context):
    wanted = text_of(runtime, graph_of(tiny, context=context), max_tokens=None)
    assert len(wanted) == context + 1 - len(PROMPT)
    follower = Follower(wanted + [1] * 15, VOCAB, 15)
    for graph in (
        graph_of(tiny, context=context, draft="ngram"),
        add_python_drafter(graph_of(tiny, context=context), follower, 15),
        add_python_drafter(graph_of(tiny, context=context), constant(1), 15),
    ):
        assert text_of(runtime, graph, max_tokens=None) == wanted


def test_a_cancelled_request_keeps_a_whole_beginning(runtime, tiny):
    wanted = text_of(runtime, graph_of(tiny, context=256), max_tokens=240)
    graph = graph_of(tiny, context=256, draft="ngram")
    request = runtime.submit(graph, PROMPT, max_tokens=240, ignore_eos=True)
    for _ in zip(range(3), request, strict=False):
        pass
    request.cancel()
    result = request.result(30)
    assert result.finish_reason in ("cancelled", "length")  # it may have been faster
    assert result.token_ids == wanted[: len(result.token_ids)]
    assert text_of(runtime, graph, max_tokens=240) == wanted  # the slot is free and clean


# ---- several sequences -----------------------------------------------------------------------
@pytest.mark.parametrize(("slots", "rows"), [(2, 16), (3, 4), (4, 3)])
@pytest.mark.parametrize("draft", ["ngram", "scattered"])
def test_sequences_that_share_steps_do_not_touch_each_other(runtime, tiny, slots, rows, draft):
    prompts = [[(7 * i + j) % VOCAB for j in range(3 + 9 * i)] for i in range(6)]
    plain = graph_of(tiny)
    wanted = [text_of(runtime, plain, prompt) for prompt in prompts]
    graph = graph_of(tiny, slots=slots, rows=rows)
    if draft == "ngram":
        add_drafter(graph, "ngram")
    else:
        add_python_drafter(graph, scattered(VOCAB, slots), 15)
    requests = [
        runtime.submit(graph, prompt, max_tokens=TOKENS, ignore_eos=True) for prompt in prompts
    ]
    assert [list(request) for request in requests] == wanted


def test_proposals_never_delay_a_prompt(tiny):
    """With a block of 16 rows a step, a second prompt would wait for the first text's end."""
    graph = add_python_drafter(graph_of(tiny, slots=2), constant(3), 15)
    gate = Gate(graph)
    prompts = [[1, 2, 3], [n % VOCAB for n in range(40)]]
    with Runtime("host", workers=2, wait_timeout_ms=60_000) as runtime:
        requests = [runtime.submit(graph, p, max_tokens=60, ignore_eos=True) for p in prompts]
        gate.open()
        for request in requests:
            request.result(30)
    first, second = requests
    assert second.first_step < first.last_step
    # 40 rows of a prompt, 15 a step beside the other sequence; then it decodes.
    assert second.steps - second.stats.completion_tokens + 1 <= 3


def test_muse_spark_takes_a_drafter(runtime, tmp_path):
    pytest.importorskip("torch")
    from tests.helpers.muse import make_muse, save_muse

    save_muse(make_muse(), tmp_path)
    model = load_model(tmp_path)
    prompt = [3, 4, 5, 3, 4]
    plain, drafted = (
        # Small pages, so that sliding layers go round their ring, over what proposals left there.
        muse_spark.build(model.config, model.weights, context=64, page=8, draft=draft)
        for draft in ("none", "ngram")
    )
    wanted = text_of(runtime, plain, prompt)
    assert text_of(runtime, drafted, prompt) == wanted
    hostile = muse_spark.build(model.config, model.weights, context=64, page=8)
    add_python_drafter(hostile, Follower(wanted, model.config.vocab, 15, 4), 15)
    assert text_of(runtime, hostile, prompt) == wanted
