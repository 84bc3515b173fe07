"""The main claim: SmolLM2 on host threads gives transformers' float32 greedy tokens.

The reference lies in smollm2_reference.json, made by tools/reference_tokens.py from transformers
on the dequantised weights of the same GGUF file; so this needs no torch and runs everywhere.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from gpurt.graphs.llama import build
from gpurt.loaders import load_model
from gpurt.runtime import Runtime
from tests.helpers.parity import compare

pytestmark = pytest.mark.timeout(300)

HERE = Path(__file__).parent
CASES = json.loads((HERE / "smollm2_reference.json").read_text())["cases"]
BF16_CASES = json.loads((HERE / "smollm2_bf16_reference.json").read_text())["cases"]
LEAST_MARGIN = 0.02  # of the reference's top two logits: below it, order of sums may decide
TOKENS = 64


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2")


@pytest.fixture(scope="module")
def graph(model):
    return build(model.config, model.weights, context=256)


@pytest.fixture(scope="module")
def runtime():
    with Runtime(device="host", workers=2) as opened:
        yield opened


def generate(runtime, graph, prompt, count=TOKENS):
    return list(runtime.submit(graph, prompt, max_tokens=count, ignore_eos=True))


def test_greedy_tokens_equal_transformers_wherever_its_margin_decides(runtime, graph, capsys):
    assert len(CASES) >= 10
    reports = []
    for case in CASES:
        assert len(case["tokens"]) == TOKENS
        tokens = generate(runtime, graph, case["prompt"])
        reports.append(compare(tokens, case["tokens"], case["margins"]))
    with capsys.disabled():
        exact = sum(report.margin is None for report in reports)
        print(f"\nparity: {exact} of {len(reports)} prompts equal in all {TOKENS} tokens")
    for case, report in zip(CASES, reports, strict=True):
        assert report.holds(LEAST_MARGIN), f"{case['text']!r}: {report}"


@pytest.mark.parametrize("position", [0, 1, 17, 40, 63])
def test_teacher_forced_logits_are_within_a_thousandth(runtime, graph, position):
    for case in CASES:
        prefix = case["prompt"] + case["tokens"][:position]
        token = generate(runtime, graph, prefix, 1)[0]
        logits = runtime.read(graph, "logits")[0]
        if case["margins"][position] > LEAST_MARGIN:
            assert token == case["tokens"][position]
        for index, value in case["top"][position]:
            error = abs(float(logits[index]) - value) / case["scales"][position]
            assert error < 1e-3, f"{case['text']!r} token {index}: {logits[index]} != {value}"


def test_weights_rounded_to_bf16_equal_transformers_on_the_same(model):
    graph = build(model.config, model.weights, context=256, weight_dtype="bf16")
    with Runtime(device="host", workers=2) as runtime:
        for case in BF16_CASES[:3]:
            report = compare(
                generate(runtime, graph, case["prompt"]), case["tokens"], case["margins"]
            )
            assert report.holds(LEAST_MARGIN), f"{case['text']!r}: {report}"


def test_prefill_of_one_row_a_step_gives_the_same_tokens(model):
    graph = build(model.config, model.weights, rows=1, context=256)
    with Runtime(device="host", workers=2) as runtime:
        tokens = generate(runtime, graph, CASES[0]["prompt"], 24)
    assert compare(tokens, CASES[0]["tokens"][:24], CASES[0]["margins"][:24]).holds(LEAST_MARGIN)


def test_two_requests_in_two_slots_equal_the_same_two_alone(model, runtime, graph):
    pair = build(model.config, model.weights, slots=2, context=256)
    first, second = CASES[0]["prompt"], CASES[12]["prompt"]  # 5 and 59 tokens: prefill meets decode
    alone = [generate(runtime, graph, prompt, 40) for prompt in (first, second)]
    with Runtime(device="host", workers=2) as both:
        requests = [both.submit(pair, p, max_tokens=40, ignore_eos=True) for p in (first, second)]
        assert [list(request) for request in requests] == alone


def test_stop_ids_end_a_chat_reply(model, runtime, graph):
    case = CASES[9]  # a one-sentence answer
    assert set(case["tokens"]) & set(model.stop_ids)
    request = runtime.submit(graph, case["prompt"], max_tokens=TOKENS, stop_ids=model.stop_ids)
    tokens = list(request)
    assert tokens == case["tokens"][: len(tokens)]
    assert tokens[-1] in model.stop_ids
    assert not set(tokens[:-1]) & set(model.stop_ids)
    assert request.result().finish_reason == "stop"


def test_a_cut_of_the_model_still_reads_the_same_weights(model):
    config = dataclasses.replace(model.config, layers=2)
    graph = build(config, model.weights, context=64)
    assert len({op.layer for op in graph.operators if op.name == "down"}) == 2
