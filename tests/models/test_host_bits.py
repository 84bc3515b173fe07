"""Bits on the host do not depend on workers, policy or rows per step: tokens and every buffer.

A cut of SmolLM2 (two layers, quantised) and a tiny float model; what is compared is the whole K/V
cache, which holds a trace of every position, and all activations of the last step.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gpurt.graphs.llama import build
from gpurt.loaders import load_model
from gpurt.runtime import Runtime
from tests.helpers.tiny import tiny_folder

pytestmark = pytest.mark.timeout(240)

PROMPT = [504, 3575, 282, 4649, 314, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46]
TOKENS = 12
MIXED = {"attention": "ready", "down": "claim", "gate_up": "claim"}


@pytest.fixture(scope="module")
def quantised():
    model = load_model("smollm2")
    return dataclasses.replace(model.config, layers=2), model.weights, PROMPT


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    sizes = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 777, "head_dim": 32}
    folder = tiny_folder(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3, **sizes)
    model = load_model(folder)
    return model.config, model.weights, [token % 777 for token in PROMPT]


def run(parts, workers=1, policy="static", rows=16, slots=1, prefill_rows=None):
    """(tokens, {buffer: its array}) of one request; activations cut to the last step's one row."""
    config, weights, prompt = parts
    graph = build(config, weights, rows=rows, slots=slots, context=64)
    with Runtime("host", workers=workers, policy=policy, prefill_rows=prefill_rows) as runtime:
        tokens = list(runtime.submit(graph, prompt, max_tokens=TOKENS, ignore_eos=True))
        arrays = {}
        for buffer in graph.buffers:
            if buffer.role == "activation":
                arrays[buffer.name] = runtime.read(graph, buffer.name)[0]
            elif buffer.name.endswith("_cache"):
                arrays[buffer.name] = runtime.read(graph, buffer.name)
    return tokens, arrays


def assert_same_bits(seen, wanted):
    assert seen[0] == wanted[0]
    assert seen[1].keys() == wanted[1].keys()
    for name, array in wanted[1].items():
        same = seen[1][name].view(np.uint32) == array.view(np.uint32)
        first = np.argwhere(~same)[:1].tolist()
        assert same.all(), f"{name} differs at {first}, {(~same).sum()} elements"


@pytest.fixture(scope="module")
def wanted(quantised, floats):
    return {"quantised": run(quantised), "floats": run(floats)}


@pytest.mark.parametrize("policy", ["static", "claim", "ready", MIXED], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["quantised", "floats"])
def test_bits_do_not_depend_on_workers_or_policy(kind, workers, policy, wanted, request):
    assert_same_bits(run(request.getfixturevalue(kind), workers, policy), wanted[kind])


@pytest.mark.parametrize("rows", [1, 3, 32])
@pytest.mark.parametrize("kind", ["quantised", "floats"])
def test_bits_do_not_depend_on_rows_per_step(kind, rows, wanted, request):
    assert_same_bits(run(request.getfixturevalue(kind), 2, rows=rows), wanted[kind])


@pytest.mark.parametrize("kind", ["quantised", "floats"])
def test_bits_do_not_depend_on_prefill_chunks(kind, wanted, request):
    assert_same_bits(run(request.getfixturevalue(kind), 2, prefill_rows=5), wanted[kind])
