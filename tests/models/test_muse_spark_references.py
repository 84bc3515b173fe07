"""Muse Spark's references against transformers in float32: plain torch, and composed numpy ops.

Every layer is fed transformers' own stream, so that an error shows in the layer that makes it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gpurt.graphs import muse_spark
from gpurt.graphs.muse_spark import build
from gpurt.graphs.muse_spark_config import MuseSparkConfig
from gpurt.graphs.ops import combine as combine_op
from gpurt.graphs.ops.combine import COMBINE, combine_reference
from gpurt.graphs.reference import muse_spark as plain
from gpurt.loaders import load_model
from tests.helpers.muse import CASES, make_muse, save_muse, states_and_logits
from tests.helpers.oracle import GraphOracle, step_rows

pytestmark = [pytest.mark.reference, pytest.mark.timeout(120)]

LENGTH, ROWS, PAGE = 41, 9, 4
TOLERANCE = 1e-5  # of a layer's largest output: float32 sums in another order


@dataclasses.dataclass
class Case:
    """A loaded folder, and what transformers makes of one sequence."""

    config: MuseSparkConfig
    weights: dict
    tokens: list[int]
    states: list[np.ndarray]
    logits: np.ndarray


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    made: dict[str, Case] = {}

    def case(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = save_muse(make_muse(**CASES[name]), folder)
            loaded = load_model(folder)
            tokens = np.random.default_rng(1).integers(0, 211, LENGTH).tolist()
            states, logits = states_and_logits(model, tokens)
            made[name] = Case(loaded.config, loaded.weights, tokens, states, logits)
        return made[name]

    return case


def relative_error(seen, wanted):
    return np.abs(np.asarray(seen) - wanted).max() / np.abs(wanted).max()


def layer_errors(case, config=None, weights=None):
    """The error of every layer of the composed references, chunk by chunk through the cache."""
    graph = build(config or case.config, weights or case.weights, rows=ROWS, context=64, page=PAGE)
    oracle, errors = GraphOracle(graph), []
    for layer in range(case.config.layers):
        ops = [op for op in graph.operators if f".layers[{layer}]." in op.path]
        before = "embed.s" if layer == 0 else f"layers[{layer - 1}].s"
        worst = 0.0
        for begin in range(0, LENGTH, ROWS):
            positions = list(range(begin, min(begin + ROWS, LENGTH)))
            oracle.arrays[before][: len(positions)] = case.states[layer][positions]
            oracle.run(ops, step_rows([case.tokens[p] for p in positions], positions))
            seen = oracle.arrays[f"layers[{layer}].s"][: len(positions)]
            worst = max(worst, relative_error(seen, case.states[layer + 1][positions]))
        errors.append(worst)
    return errors


@pytest.mark.parametrize("name", CASES)
def test_every_layer_of_the_composed_references_equals_transformers(name, cases):
    assert max(layer_errors(cases(name))) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_every_layer_of_the_plain_torch_model_equals_transformers(name, cases):
    case = cases(name)
    weights = plain.dequantised(case.weights)
    for layer in range(case.config.layers):
        own = plain.layer_weights(weights, layer)
        seen = plain.layer_forward(case.config, layer, own, torch.from_numpy(case.states[layer]))
        assert relative_error(seen, case.states[layer + 1]) < TOLERANCE, f"layer {layer}"


@pytest.mark.parametrize("name", CASES)
def test_whole_models_equal_transformers_from_tokens_to_logits(name, cases):
    case = cases(name)
    seen = plain.forward(case.config, plain.dequantised(case.weights), case.tokens)
    assert relative_error(seen, case.logits) < 1e-3  # errors of all layers add up
    graph = build(case.config, case.weights, rows=LENGTH, context=64, page=PAGE)
    oracle, rows = GraphOracle(graph), list(range(LENGTH))
    oracle.step(step_rows(case.tokens, rows, sample_rows=rows))
    assert relative_error(oracle.arrays["logits"], case.logits) < 1e-3
    first = oracle.arrays["embed.s"]
    assert relative_error(first, case.states[0]) < TOLERANCE


def test_bf16_of_the_plain_torch_model_stays_within_one_percent(cases):
    case = cases("dense-and-sparse")
    weights = plain.dequantised(case.weights)
    half = {
        n: w.bfloat16() if w.ndim > 1 and "mlp.gate." not in n else w for n, w in weights.items()
    }
    for layer in range(case.config.layers):
        own = plain.layer_weights(half, layer)
        rounded = {name: w.float() for name, w in own.items()}
        state = torch.from_numpy(case.states[layer])
        wanted = plain.layer_forward(case.config, layer, rounded, state)
        seen = plain.layer_forward(case.config, layer, own, state)
        error_T = (seen - wanted).norm(dim=-1)
        # where two experts' scores nearly tie, the rounding of f chooses; such rows are few
        typical = error_T <= error_T.quantile(0.9)
        assert error_T[typical].norm() / wanted[typical].norm() < 1e-2, f"layer {layer}"


# ---- planted mistakes: each must be seen -------------------------------------------------------
def test_a_router_without_its_bias_is_seen(cases):
    case, weights = cases("plain"), dict(cases("plain").weights)
    for name, source in weights.items():
        if name.endswith("e_score_correction_bias"):
            zeros = np.zeros(source.shape, np.float32)
            weights[name] = dataclasses.replace(source, load=lambda zeros=zeros: zeros)
    assert min(layer_errors(case, weights=weights)) > 100 * TOLERANCE


@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_that_is_off_by_one_is_seen(off, cases):
    case = cases("plain")
    windows = tuple(window and window + off for window in case.config.windows)
    errors = layer_errors(case, dataclasses.replace(case.config, windows=windows))
    for window, error in zip(windows, errors, strict=True):
        assert (error > 100 * TOLERANCE) == bool(window)


def test_a_norm_after_the_sum_is_seen(cases, monkeypatch):
    def norm_last(op, arrays, step):
        bare = {name: region for name, region in op.args.items() if name != "gain"}
        combine_reference(dataclasses.replace(op, args=bare), arrays, step)
        y = arrays["y"] * arrays["gain"]
        arrays["y"][...] = y / np.sqrt((y * y).mean(-1, keepdims=True) + op.params["eps"])

    case = cases("plain")
    monkeypatch.setattr(combine_op, "COMBINE", dataclasses.replace(COMBINE, reference=norm_last))
    assert min(layer_errors(case)) > 100 * TOLERANCE


def test_a_gate_without_its_floor_is_seen(cases, monkeypatch):
    monkeypatch.setattr(muse_spark, "_GATE_FLOOR", 0.0)
    assert min(layer_errors(cases("plain"))) > 100 * TOLERANCE
