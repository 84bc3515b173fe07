"""A release: gpurt reads it, says what the torch reference says, and the figures are its own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from gpurt.channels import ChannelFormat
from gpurt.graphs.reference import muse_spark as plain
from gpurt.graphs.reference.dflash import DFlash
from gpurt.loaders import load_model
from gpurt.loaders.hf_dflash import load_draft
from gpurt.runtime import Runtime
from gpurt.serving import Drafting, encode_chat, model_graph
from tests.helpers.training import MICRO, StopAfter, new_run
from tools.train import evaluate as evaluation
from tools.train.draft import DraftJob
from tools.train.export import SIZE_MAX_BYTES, export
from tools.train.loop import save, train
from tools.train.problem import is_reserved, make
from tools.train.recipe import (
    RECIPES,
    draft_config,
    parameters_in_use,
    quantised_layers,
    read_recipe,
    target_config,
)
from tools.train.target import TargetJob, target_model

pytestmark = [pytest.mark.reference, pytest.mark.timeout(120)]

TOKENS, MARGIN = 40, 0.02


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = new_run(tmp_path_factory.mktemp("train") / "run")
    recipe = replace(MICRO, steps=24)
    assert train(TargetJob(recipe, folder, "cpu"), folder, StopAfter(10**9))
    assert train(DraftJob(recipe, folder, "cpu"), folder, StopAfter(10**9))
    return folder


@pytest.fixture(scope="module")
def release(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("release") / "micro"
    assert export(run, folder) < SIZE_MAX_BYTES
    return folder


@pytest.fixture(scope="module")
def model(release):
    return load_model(release)


def test_the_loader_finds_what_the_recipe_says(model):
    assert model.config == replace(
        target_config(MICRO), quantised=frozenset(quantised_layers(MICRO))
    )
    assert model.stop_ids == (model.tokenizer.id_of("<|eot|>"),)
    assert isinstance(model.chat, ChannelFormat)
    assert model.notices == ()
    assert not any(name.endswith("input_scale") for name in model.weights)


def test_the_release_multiplies_out_to_what_training_used(run, model):
    trained = target_model(MICRO, "cpu")
    trained.load_state_dict(torch.load(run / "target.pt", weights_only=True)["job"]["model"])
    trained.quantised = quantised_layers(MICRO)
    used, stored = trained.used(), plain.dequantised(model.weights)
    assert used.keys() == stored.keys()
    for name, tensor in used.items():
        exact = tensor.ndim == 3 and stored[name].ne(tensor.bfloat16().float()).any()
        float32 = name.endswith(("mlp.gate.weight", "correction_bias", "residual_gate.gate"))
        wanted = tensor if exact or float32 else tensor.bfloat16().float()
        assert torch.allclose(stored[name], wanted, rtol=1e-6, atol=0), name


def test_gpurt_says_what_the_reference_says(model):
    weights = plain.dequantised(model.weights)
    graph = model_graph(model, "host", context=192)
    with Runtime("host", workers=1) as runtime:
        for seed in range(3):
            prompt = encode_chat(model, [{"role": "user", "content": make(seed).question}])
            said = runtime.submit(graph, prompt, max_tokens=TOKENS, ignore_eos=True).result()
            with torch.no_grad():
                ids = [*prompt, *said.token_ids]
                logits = plain.forward(model.config, weights, ids)[len(prompt) - 1 : -1]
            best = logits.topk(2)
            sure = best.values[:, 0] - best.values[:, 1] > MARGIN
            assert sure.sum() > TOKENS // 2
            wanted = best.indices[:, 0]
            assert torch.equal(torch.tensor(said.token_ids)[sure], wanted[sure])


def test_the_drafter_loads_as_its_config_says(run, release):
    assert load_draft(release / "draft").config == draft_config(MICRO)
    stored = load_file(release / "draft" / "model.safetensors")
    assert {name: tuple(w.shape) for name, w in stored.items()} == draft_config(MICRO).tensors()
    module = DFlash(draft_config(MICRO))
    module.load_state_dict({name: w.float() for name, w in stored.items()})
    trained = torch.load(run / "draft.pt", weights_only=True)["job"]["model"]
    for name, w in module.state_dict().items():
        assert torch.equal(w, trained[name].bfloat16().float()), name


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^no checkpoint of a target - at "):
        export(new_run(tmp_path / "run"), tmp_path / "release")


def test_nano_and_its_drafter_fit_their_size(tmp_path):
    recipe = RECIPES["nano"]
    total, active = parameters_in_use(target_config(recipe))
    assert 9e6 < total < 11e6
    assert active < total / 2
    run = tmp_path / "run"
    new_run(run, recipe)
    save(TargetJob(recipe, run, "cpu"), run / "target.pt", 0)
    save(DraftJob(recipe, run, "cpu"), run / "draft.pt", 0)
    (run / "tokenizer.json").write_bytes(b" " * 80_000)  # more than its vocabulary needs
    assert export(run, tmp_path / "release") < SIZE_MAX_BYTES


# ---- evaluation ------------------------------------------------------------------------------
def test_problems_are_grouped_by_held_out_seed():
    groups = evaluation.groups_of([5, 6, 7], 20, ())
    assert [group.name for group in groups] == ["seed 5", "seed 6", "seed 7", evaluation.UNSEEN]
    assert [len(group.problems) for group in groups] == [7, 7, 7, 5]
    questions = [p.question for group in groups[:3] for p in group.problems]
    assert len(set(questions)) == 21
    assert all(is_reserved(p) for group in groups for p in group.problems)


def test_the_answer_is_what_stands_in_the_users_channel(model):
    encoder = model.tokenizer
    start, message, eom, eot = (encoder.id_of(name) for name in model.chat.tokens)
    reply = [
        *encoder.encode(" to=self"), message, *encoder.encode("3 + 4 = 7."), eom, start,
        *encoder.encode("assistant to=user"), message, *encoder.encode("It is 8."), eot,
    ]  # fmt: skip
    assert evaluation.answer_text(model, reply) == "It is 8."


def test_figures_and_card_come_from_the_run(release, capsys, tmp_path):
    arguments = [str(release), "--problems", "4", "--seeds", "1", "2"]
    arguments += ["--drafts", "dflash", "ngram"]
    arguments += ["--device", "host", "--card", "--json", str(tmp_path / "figures.json")]
    assert evaluation.main(arguments) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures == json.loads((tmp_path / "figures.json").read_text())
    assert figures["problems"] == 4
    assert figures["different_outputs"] == {"dflash": 0, "ngram": 0}
    assert figures["tokens_per_step"]["dflash"] >= 1
    assert list(figures["tokens_per_second"]) == ["none", "dflash", "ngram"]
    card = (release / "README.md").read_text()
    rates = figures["groups"]["seed 2"]["tokens_per_step"]
    row = f"| seed 2 | 0 of 2 | 0.0% | {rates['dflash']:.2f} | {rates['ngram']:.2f} |"
    assert row in card
    assert read_recipe(release) == MICRO


def test_drafters_are_named_with_a_tree_and_a_number():
    assert evaluation.drafting_of("ngram") == Drafting("ngram")
    assert evaluation.drafting_of("dflash:3") == Drafting("dflash", proposals=3)
    assert evaluation.drafting_of("tree:15") == Drafting("dflash", proposals=15, tree=True)


def test_an_output_that_differs_fails_the_evaluation(release, monkeypatch, capsys):
    answers = iter(range(10**6))
    monkeypatch.setattr(
        evaluation, "_answer", lambda *_: evaluation.Answer([next(answers), 0], 1.0, 0.1)
    )
    arguments = [str(release), "--problems", "2", "--seeds", "1", "--drafts", "ngram"]
    assert evaluation.main([*arguments, "--device", "host"]) == 1
    assert '"different_outputs": {"ngram": 3}' in capsys.readouterr().out
