"""The dflash drafter on host threads: its numbers against plain torch, and that no text changes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from gpurt.body import body
from gpurt.cli import main
from gpurt.errors import GraphError
from gpurt.graphs import muse_spark
from gpurt.graphs.ops.draft_rows import table_rows
from gpurt.loaders import load_model
from gpurt.loaders.hf_dflash import load_draft
from gpurt.runtime import Runtime
from tests.helpers.dflash import CASES, make_dflash, save_dflash
from tests.helpers.muse import make_muse, save_muse
from tests.helpers.oracle import GraphOracle

pytestmark = [pytest.mark.reference, pytest.mark.timeout(180)]

PAGE, CONTEXT = 4, 96
PROMPT = np.random.default_rng(3).integers(0, 211, 41).tolist()
TOLERANCE = 1e-5  # of the largest value: float32 sums in another order


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    save_muse(make_muse(), folder)
    return load_model(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A target of seven tokens: any proposal is often right."""
    folder = tmp_path_factory.mktemp("small")
    save_muse(make_muse(vocab_size=7, num_hidden_layers=3), folder)
    return load_model(folder)


@pytest.fixture(scope="module")
def runtime():
    with Runtime("host", workers=2) as opened:
        yield opened


def draft_of(folder, seed=0, **changes):
    """(plain torch, as loaded from a folder)."""
    model = make_dflash(seed, **changes)
    return model, load_draft(save_dflash(model, folder))


def small_draft(folder, seed=0, **changes):
    sizes = {"vocab": 7, "mask_token": 6, "taps": (0, 2), "windows": (5, 0), "layers": 2}
    return draft_of(folder, seed, **(sizes | {"causal": (False, False)} | changes))[1]


def graph_of(model, drafter=None, **options):
    settings = {"context": CONTEXT, "page": PAGE} | options
    if drafter is not None:
        settings |= {"draft": "dflash", "draft_model": drafter}
    return muse_spark.build(model.config, model.weights, **settings)


def text_of(runtime, graph, prompt=PROMPT, **options):
    return list(runtime.submit(graph, prompt, **({"max_tokens": 24, "ignore_eos": True} | options)))


# ---- numbers -------------------------------------------------------------------------------
class Observer:
    """Sees, at each step's end, streams, table, hidden states, scores and proposals of slot 0."""

    def __init__(self, graph, taps, layers, conv):
        self.seen = []
        names = [f"layers[{tap}].s" for tap in taps]
        last = f"draft.layers.{layers - 1}.mlp.y" if conv else f"draft.layers.{layers - 1}.down"
        names += ["draft.rows", last, "step.proposals"]
        reads = [next(b for b in graph.buffers if b.name == name) for name in names]
        graph.task(body("observe", self.observe), reads, [graph.state("observed", [1], "u32")])

    def observe(self, *arrays):
        self.seen.append([np.array(a) for a in arrays[:-1]])


def check_step(plain, features, table, x, proposals, weights):
    """One block of the host against plain torch."""
    rows = table_rows(table)
    config, anchor = plain.config, int(rows.position[0])
    embedding = torch.tensor(weights["model.language_model.embed_tokens.weight"].load())
    head = torch.tensor(weights["lm_head.weight"].load())
    block = plain.embedded(embedding, torch.tensor([[int(rows.token[0])]]))
    wanted = plain(torch.from_numpy(features[None, :anchor]), torch.tensor([[anchor]]), block)
    # the graph's last norm is part of its head
    seen = plain.norm(torch.from_numpy(x[: config.block]))
    assert float((seen - wanted[0, 0]).abs().max()) < TOLERANCE * float(wanted.abs().max())
    path = plain.propose(wanted[0, 0, 1:], int(rows.token[0]), head)
    assert proposals[0, : 1 + len(path)].tolist() == [len(path), *path]


@pytest.mark.parametrize("name", CASES)
def test_every_block_equals_the_plain_torch_model(name, runtime, target, tmp_path):
    plain, drafter = draft_of(tmp_path, seed=len(name), **CASES[name])
    graph = graph_of(target, drafter, rows=16)
    config = plain.config
    observer = Observer(graph, config.taps, config.layers, config.conv_taps)
    tokens = text_of(runtime, graph, max_tokens=12)
    features = np.zeros((CONTEXT, len(config.taps) * config.hidden), np.float32)
    begin, checked = 0, 0
    with torch.no_grad():
        for *streams, table, x, proposals in observer.seen:
            rows = np.concatenate(streams, axis=-1)[: CONTEXT - begin]
            features[begin : begin + len(rows)] = rows
            begin += 16
            if table_rows(table).token.size:
                begin = int(table_rows(table).position[0])
                check_step(plain, features, table, x, proposals, target.weights)
                checked += 1
    assert checked >= 8
    assert len(tokens) == 12


def test_the_operators_references_make_the_same_proposals(runtime, target, tmp_path):
    _, drafter = draft_of(tmp_path, **CASES["mixed-causal"])
    graph = graph_of(target, drafter, rows=16)
    token = text_of(runtime, graph, max_tokens=3)[0]  # later steps draft no more
    oracle = GraphOracle(graph)
    assert oracle.generate(PROMPT, 1) == [token]
    ours = runtime.read(graph, "step.proposals")
    assert oracle.arrays["step.proposals"].tolist() == ours.tolist()


# ---- the same text ---------------------------------------------------------------------------
SMALL_PROMPT = [token % 7 for token in PROMPT]  # longer than every window and its ring of pages


@pytest.fixture(scope="module")
def wanted(runtime, small):
    """The text without a drafter."""
    return text_of(runtime, graph_of(small), SMALL_PROMPT, max_tokens=50)


@pytest.mark.parametrize("proposals", range(1, 16))
def test_greedy_text_is_the_same_for_every_number_of_proposals(
    runtime, small, wanted, tmp_path, proposals
):
    drafter = small_draft(tmp_path, seed=proposals)
    graph = graph_of(small, drafter, proposals=proposals)
    request = runtime.submit(graph, SMALL_PROMPT, max_tokens=50, ignore_eos=True)
    assert list(request) == wanted
    stats = request.stats
    assert len(stats.accepted_by_position) == proposals
    assert stats.accepted_by_position[0] > 0  # else nothing was tried
    assert stats.draft_ms > 0
    assert stats.verify_ms > 0


@pytest.mark.parametrize("policy", ["static", "claim", "ready"])
@pytest.mark.parametrize("workers", [1, 3])
def test_text_and_proposals_are_the_same_under_any_policy_and_workers(
    runtime, small, wanted, tmp_path, policy, workers
):
    drafter = small_draft(tmp_path)
    graph = graph_of(small, drafter)
    steps = runtime.submit(graph, SMALL_PROMPT, max_tokens=50, ignore_eos=True)
    assert list(steps) == wanted
    with Runtime("host", workers=workers, policy=policy) as other:
        request = other.submit(
            graph_of(small, drafter), SMALL_PROMPT, max_tokens=50, ignore_eos=True
        )
        assert list(request) == wanted
    assert request.accepted == steps.accepted


@pytest.mark.parametrize(("slots", "rows", "proposals"), [(2, 16, 15), (3, 7, 4), (4, 3, 2)])
def test_sequences_that_share_steps_do_not_touch_each_other(
    runtime, small, tmp_path, slots, rows, proposals
):
    prompts = [[(5 * i + j) % 7 for j in range(3 + 11 * i)] for i in range(5)]
    alone = [text_of(runtime, graph_of(small), prompt, max_tokens=30) for prompt in prompts]
    graph = graph_of(small, small_draft(tmp_path), slots=slots, rows=rows, proposals=proposals)
    requests = [runtime.submit(graph, p, max_tokens=30, ignore_eos=True) for p in prompts]
    assert [list(request) for request in requests] == alone


def test_a_plain_dflash_and_a_short_block_keep_the_text_too(runtime, small, wanted, tmp_path):
    plain = {"conv_taps": 0, "conv_group": 1, "selector_rank": 0, "selector_top_k": 1}
    for changes in (plain, {"block": 3}):
        graph = graph_of(small, small_draft(tmp_path, **changes))
        request = runtime.submit(graph, SMALL_PROMPT, max_tokens=50, ignore_eos=True)
        assert list(request) == wanted
    assert len(request.stats.accepted_by_position) == 2  # a block of three makes two


@pytest.mark.parametrize("context", [48, 49, 63, 64])
def test_a_text_fills_its_context_to_the_last_position(runtime, small, tmp_path, context):
    whole = text_of(runtime, graph_of(small, context=context), SMALL_PROMPT, max_tokens=None)
    assert len(whole) == context + 1 - len(SMALL_PROMPT)
    graph = graph_of(small, small_draft(tmp_path), context=context)
    assert text_of(runtime, graph, SMALL_PROMPT, max_tokens=None) == whole


def test_stop_tokens_and_max_tokens_end_the_text_exactly_there(runtime, small, wanted, tmp_path):
    graph = graph_of(small, small_draft(tmp_path))
    for stop in dict.fromkeys(wanted):
        request = runtime.submit(graph, SMALL_PROMPT, max_tokens=50, stop_ids=[stop])
        assert request.result(30).token_ids == wanted[: wanted.index(stop) + 1]
    for count in range(1, 20):
        assert text_of(runtime, graph, SMALL_PROMPT, max_tokens=count) == wanted[:count]


@pytest.mark.parametrize(
    "settings", [{"temperature": 1.0}, {"temperature": 0.6, "top_k": 4, "top_p": 0.9}], ids=str
)
def test_sampled_text_is_the_same_for_the_same_seed(runtime, small, tmp_path, settings):
    plain, drafted = graph_of(small), graph_of(small, small_draft(tmp_path))
    accepted = 0
    for seed in range(4):
        options = {"max_tokens": 30, "ignore_eos": True, "seed": seed, **settings}
        request = runtime.submit(drafted, SMALL_PROMPT, **options)
        assert list(request) == text_of(runtime, plain, SMALL_PROMPT, **options)
        accepted += sum(request.accepted)
    assert accepted > 0


# ---- hostile ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "tensor",
    ["fc.weight", "layers.1.mlp.down_proj.weight", "candidate_selector.hidden_projection.weight"],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_end_the_proposals_and_change_no_token(
    runtime, small, wanted, tmp_path, tensor, value
):
    drafter = small_draft(tmp_path)
    source = drafter.weights[tensor]
    spoilt = np.full(source.shape, value, np.float32)
    weights = {**drafter.weights, tensor: replace(source, load=lambda: spoilt)}
    graph = graph_of(small, replace(drafter, weights=weights))
    request = runtime.submit(graph, SMALL_PROMPT, max_tokens=50, ignore_eos=True)
    assert list(request) == wanted
    assert sum(request.accepted) == 0
    assert runtime.read(graph, "step.proposals")[0, 0] == 0


# ---- errors, command line --------------------------------------------------------------------
def test_a_drafter_of_another_model_is_refused(small, target, tmp_path):
    for model, changes, start in (
        (target, {"vocab": 7}, "the drafter wants a target of vocab 7, this one has 211"),
        (small, {"hidden": 32}, "the drafter wants a target of hidden 32, this one has 48"),
        (small, {"taps": (0, 3)}, "the drafter wants a target of layers up to 4, this one has 3"),
    ):
        with pytest.raises(GraphError, match=f"^{start} - at .+ - use the drafter of this model"):
            graph_of(model, small_draft(tmp_path, **changes))
    with pytest.raises(GraphError, match=r"^draft is 'dflash' without a model"):
        graph_of(small, draft="dflash")


def test_the_command_line_runs_it(capsys, target, tmp_path):
    save_dflash(make_dflash(), tmp_path)
    records = []
    for options in ([], ["--draft", "dflash", "--draft-model", str(tmp_path), "--proposals", "5"]):
        arguments = ["--model", target.path, "--device", "host", "--prompt-ids", "3,4,5", "--json"]
        assert main(["run", *arguments, "--max-tokens", "9", "--ignore-eos", *options]) == 0
        records.append(json.loads(capsys.readouterr().out))
    plain, drafted = records
    assert plain["token_ids"] == drafted["token_ids"]
    assert drafted["draft"] == "dflash"
    assert len(drafted["accepted_by_position"]) == 5
    assert drafted["draft_ms"] > 0
