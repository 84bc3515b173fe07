"""Tiny random Muse Sparks on host threads: layers, tokens, bits, and hostile routing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gpurt.errors import FaultError
from gpurt.graphs import expert_sum, muse_spark
from gpurt.graphs.muse_spark import build
from gpurt.graphs.ops.route import RoutesLayout
from gpurt.graphs.reference import muse_spark as plain
from gpurt.loaders import load_model
from gpurt.runtime import Runtime
from tests.helpers.muse import CASES, TEXT, choices, make_muse, quantise_folder, save_muse
from tests.helpers.oracle import GraphOracle
from tests.helpers.parity import compare

pytestmark = [pytest.mark.reference, pytest.mark.timeout(180)]

PAGE = 4
PROMPT = np.random.default_rng(3).integers(0, 211, 41).tolist()
TOKENS = 24  # beyond every window, and around its ring


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(loaded, transformers) by case, made once."""
    made = {}

    def model(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            changes = CASES[name.removesuffix("-nvfp4")]
            reference = save_muse(make_muse(**changes), folder)
            if name.endswith("-nvfp4"):
                reference.load_state_dict(quantise_folder(folder, [1, 2]), strict=False)
            made[name] = (load_model(folder), reference)
        return made[name]

    return model


def run(parts, prompts, *, workers=2, policy="static", rows=16, slots=1, tokens=TOKENS, **options):
    """(tokens of every prompt, {activation: its array after the last step})."""
    config, weights = parts
    graph = build(config, weights, rows=rows, slots=slots, context=96, page=PAGE)
    with Runtime("host", workers=workers, policy=policy, **options) as runtime:
        requests = [
            runtime.submit(graph, prompt, max_tokens=tokens, ignore_eos=True) for prompt in prompts
        ]
        seen = [list(request) for request in requests]
        arrays = {
            buffer.name: runtime.read(graph, buffer.name)
            for buffer in graph.buffers
            if buffer.role == "activation"
        }
    return seen, arrays


def parts_of(model):
    return model.config, model.weights


# ---- against the references --------------------------------------------------------------------
@pytest.mark.parametrize("name", [*CASES, "plain-nvfp4"])
def test_every_layer_on_the_host_equals_the_plain_torch_model(name, models):
    model, _ = models(name)
    _, arrays = run(parts_of(model), [PROMPT], rows=len(PROMPT), tokens=1)
    weights = plain.dequantised(model.weights)
    before = arrays["embed.s"]
    for layer in range(model.config.layers):
        own = plain.layer_weights(weights, layer)
        wanted = plain.layer_forward(model.config, layer, own, torch.from_numpy(before)).numpy()
        before = arrays[f"layers[{layer}].s"]
        assert np.abs(before - wanted).max() < 1e-5 * np.abs(wanted).max(), f"layer {layer}"


@pytest.mark.parametrize("name", [*CASES, "plain-nvfp4"])
def test_tokens_equal_transformers_past_the_window(name, models):
    model, reference = models(name)
    for prompt in (PROMPT, [7]):
        (seen,), _ = run(parts_of(model), [prompt])
        report = compare(seen, *choices(reference, prompt, seen))
        assert report.holds(1e-3), f"prompt of {len(prompt)}: {report}"


def test_bf16_weights_equal_transformers_on_rounded_weights(tmp_path):
    reference = save_muse(make_muse(), tmp_path, "bfloat16")
    model = load_model(tmp_path)
    graph = build(model.config, model.weights, rows=4)
    assert {b.dtype.name for b in graph.buffers if b.name.endswith(".up.w")} == {"bf16"}
    (seen,), _ = run(parts_of(model), [PROMPT])
    assert compare(seen, *choices(reference, PROMPT, seen)).holds(1e-3)


# Logits reach 1 here. Of every key and value bf16 keeps 8 bits, fp8 4, so its margin is wider.
@pytest.mark.parametrize(("kv_dtype", "margin"), [("bf16", 0.05), ("f16", 0.05), ("fp8", 0.2)])
def test_a_smaller_cache_keeps_tokens_where_the_margin_is_wide(kv_dtype, margin, models):
    model, reference = models("plain")
    graph = build(model.config, model.weights, context=96, page=PAGE, kv_dtype=kv_dtype)
    with Runtime("host", workers=2) as runtime:
        seen = list(runtime.submit(graph, PROMPT, max_tokens=TOKENS, ignore_eos=True))
    assert compare(seen, *choices(reference, PROMPT, seen)).holds(margin)


def plant_option(monkeypatch, function, module=muse_spark, **wrong):
    true = getattr(module, function)
    monkeypatch.setattr(module, function, lambda *a, **k: true(*a, **(k | wrong)))


def plant_no_bias(monkeypatch):
    plant_option(monkeypatch, "route", bias=None)


def plant_window(monkeypatch):
    plant_option(monkeypatch, "attention", window=TEXT["sliding_window"] - 1)


def plant_norm_after_the_sum(monkeypatch):
    plant_option(monkeypatch, "combine", expert_sum, gain=None, eps=0.0)


def plant_no_floor(monkeypatch):
    monkeypatch.setattr(muse_spark, "_GATE_FLOOR", 0.0)


@pytest.mark.parametrize(
    "plant", [plant_no_bias, plant_window, plant_norm_after_the_sum, plant_no_floor]
)
def test_a_mistake_in_the_graph_is_seen_layer_by_layer(plant, models, monkeypatch):
    """The comparison of every layer fails for the mistakes that are easy to make."""
    models("plain")
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="layer"):
        test_every_layer_on_the_host_equals_the_plain_torch_model("plain", models)


# ---- bits --------------------------------------------------------------------------------------
DYNAMIC = {"expert_up": "claim", "expert_down": "claim"}


@pytest.fixture(scope="module")
def wanted(models):
    return run(parts_of(models("plain-nvfp4")[0]), [PROMPT], workers=1)


def assert_same_bits(seen, wanted, rows=1):
    assert seen[0] == wanted[0]
    for name, array in wanted[1].items():
        if name.endswith(("routes", ".h", ".d")) or array.ndim < 2:
            continue  # rows of pairs, and words whose tail is of other steps
        same = seen[1][name][:rows].view(np.uint32) == array[:rows].view(np.uint32)
        assert same.all(), f"{name} differs at {np.argwhere(~same)[:1].tolist()}"


@pytest.mark.parametrize("policy", ["static", "claim", "ready", DYNAMIC], ids=str)
@pytest.mark.parametrize("workers", [1, 3])
def test_bits_do_not_depend_on_workers_or_policy(workers, policy, models, wanted):
    model, _ = models("plain-nvfp4")
    seen = run(parts_of(model), [PROMPT], workers=workers, policy=policy)
    assert_same_bits(seen, wanted)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_bits_do_not_depend_on_rows_per_step(rows, models, wanted):
    model, _ = models("plain-nvfp4")
    assert_same_bits(run(parts_of(model), [PROMPT], rows=rows), wanted)


@pytest.mark.parametrize("policy", ["ready", DYNAMIC], ids=str)
def test_tokens_do_not_depend_on_step_sizes(policy, models):
    """Rings of pages, experts by steps of other slots, and sequences that come and go."""
    model, _ = models("plain")
    prompts = [PROMPT[:5], PROMPT[5:38], PROMPT[3:4], PROMPT[10:30]]
    seen, _ = run(parts_of(model), prompts, slots=3, step_rows=(2, 5, 16), policy=policy)
    for prompt, tokens in zip(prompts, seen, strict=True):
        (alone,), _ = run(parts_of(model), [prompt])
        assert tokens == alone


@pytest.mark.parametrize("policy", ["static", DYNAMIC], ids=str)
def test_prefill_and_decode_in_one_step_equal_each_alone(policy, models):
    model, _ = models("plain")
    prompts = [PROMPT[:5], PROMPT[5:38], PROMPT[3:4], PROMPT[10:30]]
    seen, _ = run(parts_of(model), prompts, slots=3, prefill_rows=7, policy=policy)
    for prompt, tokens in zip(prompts, seen, strict=True):
        (alone,), _ = run(parts_of(model), [prompt])
        assert tokens == alone


# ---- hostile routing ---------------------------------------------------------------------------
def routed(model, weight=None, bias=None):
    """The model with another router in every layer. weight, bias: of [E, H] and [E] zeros."""
    weights = dict(model.weights)
    for name, source in weights.items():
        change = {"gate.weight": weight, "gate.e_score_correction_bias": bias}.get(
            name.split(".mlp.")[-1]
        )
        if change is not None:
            array = change(np.zeros(source.shape, np.float32))
            weights[name] = dataclasses.replace(source, load=lambda array=array: array)
    return model.config, weights


def ramp(array, at, value):
    array[at] = value
    return array


HOSTILE = {
    "all-rows-to-the-same-experts": {"bias": lambda b: ramp(b, [1, 4, 6], 9.0)},
    "all-ties": {"weight": lambda w: w, "bias": lambda b: b},
    "two-tied-for-the-last-place": {"weight": lambda w: w, "bias": lambda b: ramp(b, [2, 5], 1.0)},
    "every-score-at-one": {"weight": lambda w: w + 1e4, "bias": lambda b: b},
    "every-score-at-zero": {"weight": lambda w: w - 1e4, "bias": lambda b: b},
    "experts-that-no-one-uses": {"bias": lambda b: ramp(b, [0, 3, 6], -9.0)},
    "rows-apart": {"weight": lambda w: np.random.default_rng(0).normal(0, 9, w.shape).astype("f4")},
}
EXPERTS = {
    "all-rows-to-the-same-experts": [1, 4, 6],
    "all-ties": [0, 1, 2],
    "two-tied-for-the-last-place": [0, 2, 5],
    "every-score-at-one": [0, 1, 2],
    "every-score-at-zero": [0, 1, 2],
}


@pytest.mark.parametrize("policy", ["static", DYNAMIC], ids=str)
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_routing_equals_the_composed_references(case, policy, models):
    config, weights = routed(models("plain")[0], **HOSTILE[case])
    oracle = GraphOracle(build(config, weights, rows=16, context=96, page=PAGE))
    expected = oracle.generate(PROMPT, 4)
    (seen,), arrays = run((config, weights), [PROMPT], tokens=4, policy=policy)
    layout = RoutesLayout(16, config.experts, config.top_k)
    for layer in range(config.layers):
        name = f"layers[{layer}].routes"
        experts, wanted = (
            [int(a[name][layout.slot(slot)]) for slot in range(int(a[name][0]))]
            for a in (arrays, oracle.arrays)
        )
        assert experts == EXPERTS.get(case, wanted) == wanted
    assert seen == expected


@pytest.mark.parametrize("policy", ["static", "claim", "ready", DYNAMIC], ids=str)
def test_rows_that_share_no_expert_fill_every_slot(policy, tmp_path):
    sizes = {"num_hidden_layers": 1, "num_local_experts": 40, "num_experts_per_tok": 2}
    save_muse(make_muse(**sizes), tmp_path)
    model, prompt = load_model(tmp_path), PROMPT[:16]
    config, weights = model.config, plain.dequantised(model.weights)
    own = plain.layer_weights(weights, 0)
    # What the router reads, then a router that gives row r the experts 2 r and 2 r + 1.
    s = plain.embedded(config, weights, prompt)
    b = plain.attention(config, 0, own, plain.centred(s, own["input_layernorm.weight"], 1e-5))
    gate = own["post_attention_residual_gate.gate"]
    t = plain.gated(config, gate, s, plain.rms(b, config.post_eps))
    f = plain.centred(t, own["pre_feedforward_layernorm.weight"], config.eps)
    wanted = 40 * torch.eye(20).repeat_interleave(2, dim=0)[:, :16]
    router = (torch.linalg.pinv(f.double()) @ wanted.T.double()).T.float().numpy()
    parts = routed(model, weight=lambda _: router, bias=lambda b: b)
    _, arrays = run(parts, [prompt], tokens=1, policy=policy)
    routes, layout = arrays["layers[0].routes"], RoutesLayout(16, 40, 2)
    assert routes[0] == layout.slots == 32
    own |= {"mlp.gate.weight": torch.from_numpy(router)}
    own["mlp.gate.e_score_correction_bias"] = torch.zeros(40)
    expected = plain.layer_forward(config, 0, own, s).numpy()
    seen = arrays["layers[0].s"]
    assert np.abs(seen - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("policy", ["static", "ready", DYNAMIC], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_a_fault_and_no_hang(value, policy, models):
    parts = routed(models("plain")[0], weight=lambda w: ramp(w, (2, 5), value))
    with pytest.raises(FaultError, match="route"):
        run(parts, [PROMPT], tokens=4, policy=policy)
