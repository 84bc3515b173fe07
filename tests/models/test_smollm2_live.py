"""SmolLM2's GGUF, read by gpurt, against transformers on the same dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gpurt.graphs.llama import build
from gpurt.loaders import load_model
from tests.helpers.checkpoints import transformers_model
from tests.helpers.oracle import GraphOracle, step_rows

pytestmark = [pytest.mark.reference, pytest.mark.timeout(300)]

REFERENCE = json.loads((Path(__file__).parent / "smollm2_reference.json").read_text())


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2")


def test_the_graph_of_the_gguf_equals_transformers_on_its_dequantised_weights(model):
    case = REFERENCE["cases"][0]
    tokens = (case["prompt"] + case["tokens"])[:32]
    with torch.no_grad():
        wanted = transformers_model(model)(torch.tensor([tokens])).logits[0].numpy()
    oracle = GraphOracle(build(model.config, model.weights, rows=32, context=64))
    oracle.step(step_rows(tokens, range(32), sample_rows=range(32)))
    error = np.abs(oracle.arrays["logits"] - wanted).max() / np.abs(wanted).max()
    assert error < 1e-4
    # and the checked-in reference is what transformers says today
    first = len(case["prompt"]) - 1
    assert wanted[first:].argmax(-1).tolist()[:-1] == case["tokens"][: 31 - first]
    for position, top in enumerate(case["top"][:20]):
        for index, value in top:
            assert abs(wanted[first + position, index] - value) < 1e-3 * case["scales"][position]
