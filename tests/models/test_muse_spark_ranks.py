"""Rank slices: two ranks in lock step equal the whole model, and share its weights."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.errors import GraphError
from gpurt.graphs.muse_spark import build
from gpurt.graphs.ops.route import RoutesLayout
from gpurt.loaders import load_model
from gpurt.planner.forms import left_out
from gpurt.runtime import Runtime
from tests.helpers.muse import make_muse, quantise_folder, save_muse
from tests.helpers.oracle import GraphOracle, step_rows

pytestmark = [pytest.mark.reference, pytest.mark.timeout(120)]

SIZES = {
    "num_hidden_layers": 3,
    "vocab_size": 212,
    "num_local_experts": 7,
    "moe_intermediate_size": 64,
    "mlp_layer_types": ["sparse", "dense", "sparse"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A dense layer, one in bf16 experts, one in nvfp4."""
    folder = tmp_path_factory.mktemp("ranks")
    save_muse(make_muse(**SIZES), folder)
    quantise_folder(folder, [2])
    return load_model(folder)


def graphs(model, ranks):
    return [
        build(model.config, model.weights, rows=9, context=64, tp_size=ranks, tp_rank=rank)
        for rank in range(ranks)
    ]


def run_ranks(oracles, step):
    """One step of all ranks, operator by operator; `publish` reaches every rank."""
    two_shots = left_out(oracles[0].graph)
    for ops in zip(*(oracle.graph.operators for oracle in oracles), strict=True):
        if ops[0].index in two_shots:
            continue
        for oracle, op in zip(oracles, ops, strict=True):
            oracle.run([op], step)
        if ops[0].body.name == "publish":
            slots, part = (ops[0].args[arg].buffer.name for arg in ("slots", "part"))
            parts = [oracle.arrays[part].copy() for oracle in oracles]
            beside, width = ops[0].params["beside"], int(ops[0].params["width"])
            for rank, oracle in enumerate(oracles):
                own = slice(rank * width, (rank + 1) * width)
                given = [p[:, own] for p in parts] if ops[0].params["scatter"] else parts
                oracle.arrays[slots][...] = np.hstack(given) if beside else np.stack(given)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_in_lock_step_equal_the_whole_model(ranks, model):
    tokens, positions = list(range(40, 49)), list(range(9))
    step = step_rows(tokens, positions, sample_rows=[2, 8])
    whole = GraphOracle(build(model.config, model.weights, rows=9, context=64))
    whole.step(step)
    oracles = [GraphOracle(graph) for graph in graphs(model, ranks)]
    run_ranks(oracles, step)
    wanted = whole.arrays["logits"][:2]
    name = "logits" if ranks == 1 else "logits.all"
    for oracle in oracles:
        seen = oracle.arrays[name][:2]
        assert np.abs(seen - wanted).max() < 1e-4 * np.abs(wanted).max()
        for layer in range(3):
            seen, state = (o.arrays[f"layers[{layer}].s"] for o in (oracle, whole))
            assert np.abs(seen - state).max() < 1e-4 * np.abs(state).max()


def test_ranks_share_every_cut_weight_and_repeat_the_others(model):
    halves, (whole,) = graphs(model, 2), graphs(model, 1)
    cut = {"qg", "kv", "o", "gate_up", "down", "pre", "post", "up", "head"}
    for buffer, *parts in zip(
        *([b for b in graph.buffers if b.role == "weight"] for graph in (whole, *halves)),
        strict=True,
    ):
        stem = buffer.name.removesuffix(".w").rsplit(".", 1)[-1]
        is_cut = buffer.name.endswith((".w", ".d.gain")) and (stem in cut or stem == "gain")
        share = 2 if is_cut else 1
        for part in parts:
            assert part.size_bytes * share == buffer.size_bytes, buffer.name
            assert np.asarray(part.source()).nbytes == part.size_bytes, buffer.name


@pytest.mark.parametrize("policy", ["static", "claim"])
def test_a_looped_back_rank_on_the_host_equals_its_references(policy, model):
    graph = graphs(model, 2)[1]
    prompt = list(range(40, 49))
    oracle = GraphOracle(graph)
    wanted = oracle.generate(prompt, 3)
    with Runtime("host", workers=2, policy=policy) as runtime:
        assert list(runtime.submit(graph, prompt, max_tokens=3, ignore_eos=True)) == wanted
        for layer in range(3):
            seen = runtime.read(graph, f"layers[{layer}].s")[0]
            state = oracle.arrays[f"layers[{layer}].s"][0]
            assert np.abs(seen - state).max() < 1e-4 * np.abs(state).max()
        whole = runtime.read(graph, "logits.all")[0]
        assert np.array_equal(*np.split(whole, 2))


@pytest.mark.parametrize(
    ("size", "rank", "what"),
    [
        (3, 0, "4 heads, 212 vocab, 2 kv heads have no 3 equal shares - at muse_spark.build"),
        (8, 0, "4 heads, 212 vocab have no 8 equal shares"),
        (0, 0, "4 heads, 212 vocab have no 0 equal shares"),
        (2, 2, "rank 2 of 2"),
        (2, -1, "rank -1 of 2"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(size, rank, what, model):
    with pytest.raises(GraphError, match=f"^{what}"):
        build(model.config, model.weights, tp_size=size, tp_rank=rank)


# ---- routing by a table, for benches -----------------------------------------------------------
@pytest.mark.parametrize("routing", ["random", "repeat"])
def test_forced_routing_on_the_host_equals_its_references(routing, model):
    options = {"rows": 9, "slots": 2, "context": 64, "routing": routing}
    graph = build(model.config, model.weights, **options)
    prompt = list(range(40, 49))
    wanted = GraphOracle(graph).generate(prompt, 4)
    with Runtime("host", workers=2, policy={"expert_up": "claim"}) as runtime:
        seen = list(runtime.submit(graph, prompt, max_tokens=4, ignore_eos=True))
        routes = runtime.read(graph, "layers[0].routes")
    assert seen == wanted
    layout = RoutesLayout(9, 7, 3)
    experts = [routes[layout.slot(slot)] for slot in range(routes[0])]
    table = next(b for b in graph.buffers if b.name == "layers[0].router.forced").source
    entry = 11 * 2 % len(table)  # position 11 of slot 0 of 2
    assert experts == table[entry].tolist()


def test_an_unknown_routing_is_refused(model):
    with pytest.raises(GraphError, match=r"^routing is 'fair'"):
        build(model.config, model.weights, routing="fair")
