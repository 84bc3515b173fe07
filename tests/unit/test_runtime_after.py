"""`submit(after=...)`: the K/V of an earlier request serve the tokens that both begin with."""

from __future__ import annotations

import re
import threading

import pytest

from gpurt.body import body
from gpurt.errors import RequestError
from gpurt.graph import Graph
from gpurt.graphs import llama
from gpurt.graphs.drafters import add_drafter
from gpurt.loaders import load_model
from gpurt.runtime import Runtime
from tests.gpu.tiny_muse import tiny_muse
from tests.helpers.gate import Gate
from tests.helpers.tiny import tiny_folder

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random model of 20 tokens, context 64."""
    return load_model(tiny_folder(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def runtime():
    with Runtime("host", workers=2, linger_ms=20_000, wait_timeout_ms=60_000) as runtime:
        yield runtime


def graph_of(model, **bounds):
    return llama.build(model.config, model.weights, **bounds)


def run(runtime, graph, prompt, after=None, **options):
    options = {"max_tokens": 9, "ignore_eos": True} | options
    request = runtime.submit(graph, prompt, after=after, **options)
    request.result(60)
    return request


def turns(runtime, graph, model, count=4, **options):
    """A chat: every prompt is all that was said, and two tokens more. Checks every text."""
    cached, prompt, last = [], PROMPT, None
    for turn in range(count):
        last = run(runtime, graph, prompt, last, **options)
        with Runtime("host", workers=1) as other:
            fresh = run(other, graph_of(model), prompt, **options)
        assert last.tokens == fresh.tokens, f"turn {turn}"
        cached.append((last.stats.cached_tokens, len(prompt)))
        prompt = [*prompt, *last.tokens, 7, turn]
    return cached


def test_a_chat_computes_only_what_is_new(runtime, tiny):
    cached = turns(runtime, graph_of(tiny), tiny)
    # The last token of an answer was never fed.
    assert cached == [(0, 8), (16, 19), (27, 30), (38, 41)]


def test_steps_are_those_of_the_new_tokens(runtime, tiny):
    graph = graph_of(tiny, rows=4)
    first = run(runtime, graph, PROMPT * 4)
    again = run(runtime, graph, [*PROMPT * 4, *first.tokens, 2], first, max_tokens=1)
    assert again.stats.cached_tokens == 40
    assert again.stats.steps == 1


@pytest.mark.parametrize("draft", ["ngram", "none"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 3}])
def test_drafts_and_sampling_go_on_too(runtime, tiny, draft, settings):
    graph = add_drafter(graph_of(tiny, slots=2), draft)
    assert all(c for c, _ in turns(runtime, graph, tiny, **settings)[1:])


def test_a_text_that_parts_is_kept_up_to_there(runtime, tiny):
    graph = graph_of(tiny)
    first = run(runtime, graph, PROMPT)
    other = [*PROMPT[:5], 8, 8, 8]
    second = run(runtime, graph, other, first)
    assert second.stats.cached_tokens == 5
    assert second.tokens == run(runtime, graph, other).tokens
    assert run(runtime, graph, [8, *PROMPT], second).stats.cached_tokens == 0


def test_the_same_prompt_computes_its_last_token(runtime, tiny):
    graph = graph_of(tiny)
    first = run(runtime, graph, PROMPT)
    second = run(runtime, graph, PROMPT, first)
    assert (second.stats.cached_tokens, second.tokens) == (7, first.tokens)


def test_a_slot_that_another_request_took_is_computed_anew(runtime, tiny):
    graph = graph_of(tiny)
    first = run(runtime, graph, PROMPT)
    run(runtime, graph, [2, 2])
    second = run(runtime, graph, PROMPT, first)
    assert (second.stats.cached_tokens, second.tokens) == (0, first.tokens)


def test_each_of_two_chats_finds_its_slot(runtime, tiny):
    graph = graph_of(tiny, slots=2)
    gate = Gate(graph)  # both are there before the first has ended
    prompts = [PROMPT, [2, 7, 1, 8]]
    pair = [runtime.submit(graph, prompt, max_tokens=6, ignore_eos=True) for prompt in prompts]
    gate.open()
    for request in pair:
        request.result(60)
    for index in (1, 0):  # not in the order of the slots
        prompt = [*prompts[index], *pair[index].tokens, 5]
        assert run(runtime, graph, prompt, pair[index]).stats.cached_tokens == len(prompt) - 2


def test_a_kernel_that_was_launched_again_still_has_them(tiny):
    graph = graph_of(tiny)
    with Runtime("host", workers=2, linger_ms=1) as runtime:
        first = run(runtime, graph, PROMPT)
        assert runtime._sessions[0].executor.join(30)
        second = run(runtime, graph, PROMPT, first)
        assert runtime.launches == 2
    assert (second.stats.cached_tokens, second.tokens) == (7, first.tokens)


def test_a_cancelled_request_can_be_gone_on_from(runtime, tiny):
    graph = graph_of(tiny)
    whole = run(runtime, graph, PROMPT, max_tokens=40).tokens
    first = runtime.submit(graph, PROMPT, max_tokens=40, ignore_eos=True)
    next(iter(first))
    first.cancel()
    first.result(60)
    prompt = [*PROMPT, *first.tokens[:1], 4]
    assert first.tokens == whole[: len(first.tokens)]
    second = run(runtime, graph, prompt, first)
    assert second.tokens == run(runtime, graph, prompt).tokens


def test_a_request_of_another_runtime_is_refused(runtime, tiny):
    graph = graph_of(tiny)
    with Runtime("host", workers=1) as other:
        foreign = run(other, graph, PROMPT)
        what = f"`after` is request {foreign.sequence}, which ran another graph - at submit"
        with pytest.raises(RequestError, match=re.escape(what)):
            runtime.submit(graph, PROMPT, max_tokens=1, after=foreign)


def test_an_unfinished_request_is_refused(runtime):
    opened = threading.Event()
    hold = body("hold", lambda out: opened.wait(30) and out.fill(1))
    graph = Graph("held")
    graph.task(hold, [], [graph.activation("x", [1], "f32")])
    request = runtime.submit(graph)
    with pytest.raises(RequestError, match=r"^`after` is request 0, which is unfinished"):
        runtime.submit(graph, after=request)
    opened.set()
    request.result(30)


def test_a_ring_of_pages_is_gone_on_from_only_at_its_end(runtime):
    graph = tiny_muse(context=128, hidden=64, heads=2, vocab=64, layers=3)  # windows of 20
    prompt = [(5 * n) % 61 for n in range(40)]
    first = run(runtime, graph, prompt)
    parted = [*prompt, *first.tokens[:4], 3, 3]
    fresh = run(runtime, graph, parted)
    first = run(runtime, graph, prompt)
    again = run(runtime, graph, parted, first)
    assert (again.stats.cached_tokens, again.tokens) == (0, fresh.tokens)
    whole = [*prompt, *first.tokens, 3, 3]
    fresh = run(runtime, graph, whole)
    first = run(runtime, graph, prompt)
    again = run(runtime, graph, whole, first)
    assert (again.stats.cached_tokens, again.tokens) == (48, fresh.tokens)


def test_a_ring_that_holds_the_whole_context_is_gone_on_from_anywhere(runtime):
    graph = tiny_muse(context=64, hidden=64, heads=2, vocab=64, layers=3)  # rings of 64 positions
    prompt = [(5 * n) % 61 for n in range(40)]
    first = run(runtime, graph, prompt)
    parted = [*prompt, *first.tokens[:4], 3, 3]
    fresh = run(runtime, graph, parted)
    first = run(runtime, graph, prompt)
    again = run(runtime, graph, parted, first)
    assert (again.stats.cached_tokens, again.tokens) == (44, fresh.tokens)
