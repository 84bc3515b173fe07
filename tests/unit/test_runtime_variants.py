"""A Runtime with several step sizes gives the tokens of one size, whoever comes and goes."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.graphs import llama
from gpurt.loaders import load_model
from gpurt.runtime import Runtime
from gpurt.trace import Trace
from gpurt.trace.page import pack
from gpurt.trace.view import summary
from tests.helpers.gate import Gate
from tests.helpers.tiny import tiny_folder
from tests.unit.test_trace_html import unpacked

CONTEXT, ROWS, SIZES = 64, 16, (2, 4, 16)
RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(0, 20, n).tolist() for n in (1, 2, 5, 17, 40, CONTEXT)]
WAIT_S = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(str(tiny_folder(tmp_path_factory.mktemp("tiny"))))


def build(model, **bounds):
    bounds = {"rows": ROWS, "slots": 3, "context": CONTEXT} | bounds
    return llama.build(model.config, model.weights, **bounds)


def room(prompt):
    return min(9, CONTEXT - len(prompt) + 1)


def serve(graph, prompts=PROMPTS, temperature=0.0, **options):
    """The tokens of all prompts, submitted at once; and the requests."""
    with Runtime("host", **options) as runtime:
        requests = [
            runtime.submit(graph, p, max_tokens=room(p), temperature=temperature, seed=i)
            for i, p in enumerate(prompts)
        ]
        return [list(r) for r in requests], requests


@pytest.fixture(scope="module")
def wanted(model):
    return serve(build(model), workers=1)[0]


@pytest.mark.parametrize("policy", ["static", "claim", "ready"])
@pytest.mark.parametrize("workers", [1, 3])
def test_tokens_do_not_depend_on_step_sizes(model, wanted, workers, policy):
    got, _ = serve(build(model), workers=workers, policy=policy, step_rows=SIZES)
    assert got == wanted


def test_tokens_do_not_depend_on_chunks_or_on_one_smaller_size(model, wanted):
    graph = build(model)
    assert serve(graph, workers=2, step_rows=SIZES, prefill_rows=3)[0] == wanted
    assert serve(graph, workers=2, step_rows=(2,))[0] == wanted


def test_tokens_do_not_depend_on_step_sizes_with_a_drafter_and_sampling(model):
    plain, _ = serve(build(model), temperature=0.9, workers=1)
    drafted, requests = serve(build(model, draft="ngram"), temperature=0.9, step_rows=SIZES)
    assert drafted == plain
    assert sum(r.verify_steps for r in requests) > 0


def test_a_long_prompt_takes_wide_steps_and_decoding_narrow_ones(model):
    graph = build(model, slots=1)
    with Runtime("host", workers=2, step_rows=SIZES) as runtime:
        request = runtime.submit(graph, PROMPTS[4], max_tokens=5, ignore_eos=True)
        request.result()
        # 40 = 16 + 16 + 8 tokens; the first token came with the last of them.
        assert request.steps == 3 + 4
        trace = request.trace()
    assert trace.variant_rows == SIZES
    assert trace.steps["rows"].tolist() == [16, 16, 8, 1, 1, 1, 1]
    assert trace.steps["variant"].tolist() == [2, 2, 2, 0, 0, 0, 0]
    assert len(trace.whole_steps) == 7
    assert summary(trace)["step_sizes"] == {"2": 4, "4": 0, "16": 3}
    limits = unpacked(pack(trace))[1]["step_limit"]
    assert limits.tolist() == [16, 16, 16, 2, 2, 2, 2]
    for step in trace.steps:
        spans = trace.spans_of(int(step["step"]))
        assert set(trace.task_variant[spans["task"]]) == {step["variant"]}


def test_a_prompt_behind_a_last_token_begins_with_a_wide_step(model):
    """The turn of its first step is fixed while no other sequence has a step left."""
    graph = build(model, slots=1)
    with Runtime("host", workers=2, step_rows=SIZES) as runtime:
        both = [runtime.submit(graph, PROMPTS[4], max_tokens=2, ignore_eos=True) for _ in "ab"]
        for request in both:
            request.result()
        rows = [request.trace().steps["rows"].tolist() for request in both]
    assert rows == [[16, 16, 8, 1]] * 2


def test_a_trace_file_keeps_the_variants(model, tmp_path):
    with Runtime("host", workers=1, step_rows=SIZES) as runtime:
        request = runtime.submit(build(model), PROMPTS[4], max_tokens=3)
        request.result()
        trace = request.trace()
    trace.save(tmp_path / "a.trace")
    loaded = Trace.load(tmp_path / "a.trace")
    assert loaded.variant_rows == SIZES
    assert np.array_equal(loaded.task_variant, trace.task_variant)
    assert np.array_equal(loaded.steps, trace.steps)


def test_a_prompt_that_comes_later_delays_no_decoding(model):
    """The other sequence gets a token in every step of the prompt's."""
    graph = build(model, slots=2)
    gate = Gate(graph)
    with Runtime("host", workers=2, step_rows=(2, 8), wait_timeout_ms=60_000) as runtime:
        first = runtime.submit(graph, PROMPTS[0], max_tokens=30, ignore_eos=True)
        gate.wait()  # in its first step, whose end admits the second one
        second = runtime.submit(graph, PROMPTS[4], max_tokens=2, ignore_eos=True)
        gate.open()
        first.result()
        second.result()
        trace = second.trace()
    rows = trace.steps["rows"].tolist()
    # A decode step that was fixed before, then 7 prompt rows beside the decode row.
    assert rows[:7] == [2, 8, 8, 8, 8, 8, 5]
    assert trace.steps["variant"].tolist()[:8] == [0, 1, 1, 1, 1, 1, 1, 0]
    assert len(first.tokens) == 30


def test_a_request_cancelled_within_its_prompt_ends_there(model, wanted):
    graph = build(model, slots=1)
    gate = Gate(graph)
    with Runtime("host", workers=2, step_rows=(2, 8), wait_timeout_ms=60_000) as runtime:
        request = runtime.submit(graph, PROMPTS[4], max_tokens=9)
        gate.wait()
        gate.open(steps=1)
        gate.wait()  # in its second step of five
        request.cancel()
        gate.open()
        assert list(request) == []
        assert (request.finish_reason, request.steps) == ("cancelled", 2)
        assert list(runtime.submit(graph, PROMPTS[3], max_tokens=9)) == wanted[3]


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT])
def test_a_prompt_may_fill_the_context(model, length):
    prompt = RNG.integers(0, 20, length).tolist()
    results = [
        serve(build(model), [prompt], workers=2, step_rows=sizes)[0] for sizes in (None, SIZES)
    ]
    assert results[0] == results[1]
    assert len(results[0][0]) == CONTEXT - length + 1
