"""muse-spark-nano as it lies in the package: its answers, its drafter, and how a reply ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from gpurt.channels import ANSWER
from gpurt.cli import main
from gpurt.graphs.muse_spark import build
from gpurt.loaders import load_model
from gpurt.loaders.hf_dflash import load_draft
from gpurt.loaders.nano import nano_path
from gpurt.reply import Reply
from gpurt.runtime import Runtime
from gpurt.serving import Drafting, encode_chat, model_graph
from tests.helpers.hostile_drafters import (
    Follower,
    add_python_drafter,
    constant,
    repeats,
    scattered,
)
from tools.train.evaluate import answer_text
from tools.train.problem import is_right, make

SEED = 107  # none that the model card reports
PROBLEMS = [make((SEED << 32) + i, test=True) for i in range(12)]
CONTEXT, MAX_TOKENS = 256, 150
BF16_NAN = 0x7FC0


@pytest.fixture(scope="module")
def model():
    return load_model("nano")


@pytest.fixture(scope="module")
def runtime():
    with Runtime("host", workers=2) as opened:
        yield opened


def graph_of(model, draft="none", proposals=None):
    drafting = Drafting(draft, proposals=proposals)
    return model_graph(model, "host", rows=16, context=CONTEXT, drafting=drafting)


def prompt_of(model, problem):
    return encode_chat(model, [{"role": "user", "content": problem.question}])


def ask(runtime, graph, model, problem, **options):
    settings = {"max_tokens": MAX_TOKENS, "stop_ids": model.stop_ids} | options
    return runtime.submit(graph, prompt_of(model, problem), **settings)


@pytest.fixture(scope="module")
def wanted(runtime, model):
    """Every problem's reply without a drafter."""
    graph = graph_of(model)
    return [list(ask(runtime, graph, model, problem)) for problem in PROBLEMS]


# ---- answers -------------------------------------------------------------------------------
def test_held_out_problems_are_answered_right(model, wanted):
    for problem, tokens in zip(PROBLEMS, wanted, strict=True):
        assert tokens[-1] in model.stop_ids
        assert is_right(problem, answer_text(model, tokens)), problem.question
        assert answer_text(model, tokens) == problem.reply
        assert problem.solution in model.tokenizer.decode(tokens)


def test_what_streams_is_the_text_in_its_channels(runtime, model, wanted):
    graph = graph_of(model, "dflash")
    for problem, tokens in zip(PROBLEMS[:4], wanted, strict=False):
        reply = Reply(ask(runtime, graph, model, problem), model.tokenizer, channels=model.chat)
        assert "".join(reply) == reply.text
        assert reply.text == f"[reasoning]\n{problem.solution}\n\n[answer]\n{problem.reply}"
        assert (reply.answer, reply.token_ids) == (problem.reply, tokens)


# ---- the drafter ---------------------------------------------------------------------------
@pytest.mark.parametrize("proposals", range(1, 16))
def test_text_is_the_same_for_every_number_of_proposals(runtime, model, wanted, proposals):
    graph = graph_of(model, "dflash", proposals)
    for problem, tokens in zip(PROBLEMS[:3], wanted, strict=False):
        request = ask(runtime, graph, model, problem)
        assert list(request) == tokens
        assert request.stats.accepted_per_step > 0.7 * (1 + proposals)


def test_text_is_the_same_and_five_tokens_a_step_are_accepted(runtime, model, wanted):
    drafted, looked_up = graph_of(model, "dflash"), graph_of(model, "ngram")
    steps = 0.0
    for problem, tokens in zip(PROBLEMS, wanted, strict=True):
        request = ask(runtime, drafted, model, problem)
        assert list(request) == tokens
        assert list(ask(runtime, looked_up, model, problem)) == tokens
        steps += (len(tokens) - 1) / request.stats.accepted_per_step
    assert sum(len(tokens) - 1 for tokens in wanted) / steps > 5


def test_sampled_text_is_the_same_for_the_same_seed(runtime, model):
    plain, drafted = graph_of(model), graph_of(model, "dflash")
    options = {"temperature": 3.0, "top_k": 50}
    texts = set()
    for seed in range(4):
        text = list(ask(runtime, plain, model, PROBLEMS[0], seed=seed, **options))
        assert list(ask(runtime, drafted, model, PROBLEMS[0], seed=seed, **options)) == text
        texts.add(tuple(text))
    assert len(texts) > 1


HOSTILE = {
    "always wrong": lambda vocab, text: Follower(text, vocab, 15, 0),
    "wrong from the third on": lambda vocab, text: Follower(text, vocab, 15, 2),
    "constant": lambda vocab, _: constant(vocab - 1),
    "repeats": lambda *_: repeats,
    "scattered": lambda vocab, _: scattered(vocab),
    "past the end": lambda *_: constant(9, 0xFFFFFFFF),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_drafter_can_change_the_text(runtime, model, wanted, kind):
    plain = build(model.config, model.weights, rows=16, context=CONTEXT)
    graph = add_python_drafter(plain, HOSTILE[kind](model.config.vocab, wanted[0]), 15)
    assert list(ask(runtime, graph, model, PROBLEMS[0])) == wanted[0]


@pytest.mark.parametrize("tensor", ["fc.weight", "hidden_norm.weight"])
def test_features_that_are_no_numbers_end_the_proposals(runtime, model, wanted, tensor):
    drafter = load_draft(nano_path() / "draft")
    source = drafter.weights[tensor]
    spoilt = replace(source, load=lambda: np.full(source.shape, BF16_NAN, np.uint16))
    drafter = replace(drafter, weights={**drafter.weights, tensor: spoilt})
    options = {"rows": 16, "context": CONTEXT, "draft": "dflash", "draft_model": drafter}
    request = ask(runtime, build(model.config, model.weights, **options), model, PROBLEMS[0])
    assert list(request) == wanted[0]
    assert sum(request.accepted) == 0


# ---- ends ----------------------------------------------------------------------------------
def test_a_stop_token_within_a_block_ends_the_text_exactly_there(runtime, model, wanted):
    graph, text = graph_of(model, "dflash"), wanted[1]
    ends = {token: text.index(token) + 1 for token in text}
    whole = ask(runtime, graph, model, PROBLEMS[1])
    assert list(whole) == text
    assert whole.stats.accepted_per_step > 5  # so most ends lie within a block
    for token, end in ends.items():
        request = ask(runtime, graph, model, PROBLEMS[1], stop_ids=[token])
        assert request.result(30).token_ids == text[:end]
        assert request.finish_reason == "stop"


def test_a_stop_string_within_a_block_ends_the_text_exactly_there(runtime, model):
    graph, reasoning = graph_of(model, "dflash"), PROBLEMS[1].solution
    for begin in range(0, len(reasoning) - 3, 5):
        stop = reasoning[begin : begin + 3]
        request = ask(runtime, graph, model, PROBLEMS[1])
        parts = list(Reply(request, model.tokenizer, [stop], model.chat).parts())
        assert all(part.channel != ANSWER for part in parts)
        assert "".join(part.text for part in parts) == reasoning[: reasoning.index(stop)]


def test_max_tokens_ends_the_text_exactly_there(runtime, model, wanted):
    graph = graph_of(model, "dflash")
    for count in range(1, len(wanted[2]), 3):
        request = ask(runtime, graph, model, PROBLEMS[2], max_tokens=count)
        assert request.result(30).token_ids == wanted[2][:count]


# ---- the command line ------------------------------------------------------------------------
def test_run_drafts_without_being_asked(capsys, monkeypatch, wanted):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # `main` sets it
    records = []
    for options in ([], ["--draft", "none"]):
        command = ["run", "--device", "host", "--chat", "--prompt", PROBLEMS[0].question, "--json"]
        assert main([*command, *options]) == 0
        records.append(json.loads(capsys.readouterr().out))
    drafted, plain = records
    assert (drafted["model"], drafted["draft"], plain["draft"]) == ("nano", "dflash", "none")
    assert drafted["token_ids"] == plain["token_ids"] == wanted[0]
    assert drafted["accepted_per_step"] > 5
    assert plain["accepted_per_step"] is None


def test_a_prompt_that_nano_cannot_go_on_with_is_told_how_it_would_be_a_question(capsys):
    assert main(["run", "--device", "host", "--prompt", PROBLEMS[0].question]) == 0
    assert "the reply is empty; --chat frames the prompt as a message" in capsys.readouterr().err


def test_a_piped_chat_answers_from_any_folder_and_reads_only_what_is_new(tmp_path):
    lines = f"{PROBLEMS[0].question}\n{PROBLEMS[1].question}\n/stats\n/reasoning\n"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GPURT_")}
    done = subprocess.run(
        [sys.executable, "-m", "gpurt", "chat", "--device", "host"],
        input=lines,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
        env={**kept, "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": str(nano_path().parents[2])},
    )
    assert (done.returncode, done.stderr) == (0, "")
    out = done.stdout
    for problem, after in pairwise([*PROBLEMS[:2], None]):
        assert problem.reply in out
        assert after is None or out.index(problem.reply) < out.index(after.reply)
    assert "; /reasoning shows it)" in out
    assert "tokens a step" in out
    assert out.rstrip().endswith(PROBLEMS[1].solution)


# ---- the release -----------------------------------------------------------------------------
def test_the_card_tells_of_the_files_beside_it():
    files = [path for path in nano_path().rglob("*") if path.is_file() and path.suffix != ".md"]
    size = sum(path.stat().st_size for path in files)
    assert size < 16_000_000
    card = (nano_path() / "README.md").read_text(encoding="utf-8")
    assert f"{size:,} bytes together" in card
    assert "Outputs that differ with a drafter from those without: 0 (dflash)" in card
