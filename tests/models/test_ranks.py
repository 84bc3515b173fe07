"""Models on several host ranks: one rank's tokens, bits where sums are of the same shares."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gpurt.cli import main
from gpurt.errors import GraphError
from gpurt.graphs.llama import build
from gpurt.graphs.muse_spark import build as build_muse
from gpurt.loaders import load_model
from gpurt.ranks import group
from gpurt.runtime import Runtime
from tests.helpers.muse import make_muse, save_muse
from tests.helpers.rank_process import BOUNDS, PROMPT
from tests.helpers.tiny import EIGHT_HEADS, tiny_folder

pytestmark = pytest.mark.timeout(120)

TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("tiny"), **EIGHT_HEADS)


def run(graph, devices="host", name="logits", requests=1, **options):
    """(tokens of each request, the last step's logits of every rank)."""
    with Runtime(devices, workers=1, **options) as runtime:
        made = [
            runtime.submit(graph, PROMPT[i:], max_tokens=TOKENS, ignore_eos=True, seed=i)
            for i in range(requests)
        ]
        tokens = [list(request) for request in made]
        runtime.park()  # rank 0 has ended its last step; now the others have, too
        ranks = runtime._find(graph).executor.ranks
        return tokens, [one.read(name)[0].view(np.uint32) for one in ranks]


def ranks_of(model, count, make=build, **options):
    weights = model.weights
    return group(
        [
            make(model.config, weights, tp_size=count, tp_rank=rank, **BOUNDS, **options)
            for rank in range(count)
        ]
    )


@pytest.mark.parametrize(("count", "policy"), [(2, "static"), (4, "ready"), (8, "claim")])
def test_ranks_have_the_bits_of_one_rank_that_sums_the_same_shares(count, policy, folder):
    model = load_model(folder)
    whole, _ = run(build(model.config, model.weights, **BOUNDS))
    wanted = run(build(model.config, model.weights, parts=count, **BOUNDS))
    devices = ["host"] * count
    seen = run(ranks_of(model, count), devices, "logits.all", policy=policy)
    assert seen[0] == wanted[0] == whole
    assert len(seen[1]) == count
    for logits in seen[1]:
        assert np.array_equal(logits, wanted[1][0])


def test_bits_repeat_fifty_times_with_drafts_and_several_requests(folder):
    model = load_model(folder)
    devices = ["host", "host"]
    wanted, _ = run(build(model.config, model.weights, **BOUNDS), requests=3)
    graph = ranks_of(model, 2, draft="ngram")
    with Runtime(devices, workers=1) as runtime:
        for _ in range(50):
            made = [
                runtime.submit(graph, PROMPT[i:], max_tokens=TOKENS, ignore_eos=True, seed=i)
                for i in range(3)
            ]
            assert [list(request) for request in made] == wanted
    sized = run(graph, devices, "logits.all", requests=3, step_rows=(2, 8))
    assert sized[0] == wanted


@pytest.mark.reference
def test_muse_spark_on_two_ranks_makes_one_ranks_tokens(tmp_path):
    sizes = {"vocab_size": 776, "num_local_experts": 7, "moe_intermediate_size": 32}
    layers = {"num_hidden_layers": 2, "mlp_layer_types": ["sparse", "dense"]}
    save_muse(make_muse(**sizes, **layers), tmp_path)
    model = load_model(tmp_path)
    wanted, _ = run(build_muse(model.config, model.weights, **BOUNDS))
    for policy in ("static", {"expert_up": "claim", "expert_down": "claim"}):
        seen = run(ranks_of(model, 2, build_muse), ["host"] * 2, "logits.all", policy=policy)
        assert seen[0] == wanted
        assert np.array_equal(*seen[1])


def test_a_rank_loads_its_share_alone(folder):
    model = load_model(folder)
    whole = build(model.config, model.weights, **BOUNDS)
    graph = ranks_of(model, 4)
    sizes = {b.name: b.size_bytes for b in whole.buffers if b.role == "weight"}
    for one in graph.group:
        for buffer in one.buffers:
            if buffer.role == "weight" and ".o.w" in buffer.name:
                assert np.asarray(buffer.source()).nbytes == sizes[buffer.name] // 4
    halves = [b for one in graph.group for b in one.buffers if b.name == "layers[0].down.w"]
    parts = [np.asarray(b.source()) for b in halves]
    source = next(b for b in whole.buffers if b.name == "layers[0].down.w").source()
    assert np.array_equal(np.concatenate(parts, axis=1), source)


@pytest.mark.parametrize(("options", "what"), [({"tp_size": 3}, "8 heads"), ({"parts": 5}, "8 h")])
def test_shares_that_are_not_equal_are_refused_with_numbers(options, what, folder):
    model = load_model(folder)
    with pytest.raises(GraphError, match=rf"^{what}.* have no [35] equal shares - at llama\.build"):
        build(model.config, model.weights, **options)


def test_the_command_line_takes_ranks(folder, capsys):
    arguments = ["run", "--model", str(folder), "--device", "host", "--prompt-ids", "5,6,7"]
    arguments += ["--max-tokens", "4", "--ignore-eos", "--json", "--tp"]
    replies = []
    for tp in ("1", "2"):
        assert main([*arguments, tp]) == 0
        replies.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert replies[0] == replies[1]
    assert main([*arguments, "3"]) == 2
    assert "have no 3 equal shares" in capsys.readouterr().err
