"""--draft on the command line, what it adds to --json and chat, and drafting times of traces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpurt.cli import main
from gpurt.graphs.llama import build
from gpurt.loaders import load_model
from gpurt.reply import stats_line
from gpurt.runtime import Runtime
from gpurt.serving import Drafting
from gpurt.trace import SPAN, STEP, OperatorInfo, StepSpans, Trace
from gpurt.trace.draft import draft_times
from tests.helpers.hand_trace import hand_trace
from tests.helpers.tiny import tiny_folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model of 20 tokens without a tokenizer, context 64."""
    return str(tiny_folder(tmp_path_factory.mktemp("tiny")))


def record_of(capsys, tiny, *options):
    arguments = ["--prompt-ids", "3,4,5,3,4,5,3", "--max-tokens", "40", "--ignore-eos", "--json"]
    assert main(["run", "--model", tiny, "--device", "host", *arguments, *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_says_what_the_drafter_gained(capsys, tiny):
    plain, drafted = record_of(capsys, tiny), record_of(capsys, tiny, "--draft", "ngram")
    assert plain["token_ids"] == drafted["token_ids"]
    keys = ("accepted_per_step", "accepted_by_position", "draft_ms", "verify_ms")
    assert plain["draft"] == "none"
    assert [plain[key] for key in keys] == [None] * 4
    assert drafted["draft"] == "ngram"
    shares = drafted["accepted_by_position"]
    assert len(shares) == 15
    assert sorted(shares, reverse=True) == shares
    assert drafted["accepted_per_step"] == pytest.approx(1 + sum(shares)) != 1
    assert drafted["draft_ms"] > 0
    assert drafted["verify_ms"] > 0


def test_an_unknown_drafter_is_one_line_and_exit_code_2(capsys, tiny):
    assert main(["run", "--model", tiny, "--prompt-ids", "1", "--draft", "bigram"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("gpurt: draft is 'bigram' - at llama - use one of none, ngram, dflash")


@pytest.mark.parametrize("count", [1, 4])
def test_proposals_bound_what_a_step_verifies(capsys, tiny, count):
    record = record_of(capsys, tiny, "--draft", "ngram", "--proposals", str(count))
    assert len(record["accepted_by_position"]) == count


@pytest.mark.parametrize(
    ("options", "start"),
    [
        (["--draft", "ngram", "--proposals", "16"], "16 proposals a step - at "),
        (["--draft", "dflash"], "--draft dflash without a drafter's folder - at --draft-model"),
        (["--draft", "ngram", "--draft-model", "."], "--draft ngram with a drafter's folder"),
        (["--draft", "dflash", "--draft-model", "nowhere"], "no such folder - at nowhere"),
    ],
)
def test_a_drafter_that_cannot_be_is_one_line_and_exit_code_2(capsys, tiny, options, start):
    assert main(["run", "--model", tiny, "--prompt-ids", "1", "--device", "host", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"gpurt: {start}")
    assert err.count("\n") == 1


def test_auto_is_the_drafter_in_the_models_folder_or_none(tiny, tmp_path):
    model, auto = load_model(tiny), Drafting("auto", proposals=3)
    assert auto.beside(model) == Drafting("none", None, 3)
    assert auto.beside(replace(model, path="no/such.gguf")) == Drafting("none", None, 3)
    own = tmp_path / "draft"
    own.mkdir()
    model = replace(model, path=str(tmp_path))
    assert auto.beside(model) == Drafting("dflash", own, 3)
    other = Path("other")
    assert Drafting("auto", other).beside(model) == Drafting("dflash", other)
    for name, folder in (("none", None), ("ngram", None), ("dflash", own)):
        assert Drafting(name).beside(model) == Drafting(name, folder)


def test_plan_shows_the_drafter(capsys, tiny):
    assert main(["plan", "--model", tiny, "--device", "host", "--draft", "ngram"]) == 0
    assert "draft_ngram" in capsys.readouterr().out


def test_a_chat_shows_tokens_a_step(tiny):
    model = load_model(tiny)
    with Runtime("host", workers=1) as runtime:
        lines = []
        for draft in ("none", "ngram"):
            graph = build(model.config, model.weights, draft=draft)
            request = runtime.submit(graph, [1, 2, 1, 2], max_tokens=9, ignore_eos=True)
            request.result(30)
            lines.append(stats_line(request.stats))
    assert "tokens a step" not in lines[0]
    assert f"{request.stats.accepted_per_step:.2f} tokens a step" in lines[1]


def test_without_spans_there_are_no_drafting_times(tiny):
    model = load_model(tiny)
    graph = build(model.config, model.weights, draft="ngram")
    with Runtime("host", workers=1, trace=False) as runtime:
        request = runtime.submit(graph, [1, 2, 1, 2], max_tokens=9, ignore_eos=True)
        request.result(30)
        stats = request.stats
    assert stats.accepted_per_step >= 1
    assert (stats.draft_ms, stats.verify_ms) == (None, None)


# ---- traces ----------------------------------------------------------------------------------
def drafted_trace() -> Trace:
    """Three steps: a prompt's, and two that decode; the drafter has two operators."""
    spans, steps = [], []
    for step, (phase, longer) in enumerate([(1, 0), (2, 0), (2, 100_000)]):
        at = step * 1_000_000
        spans += [
            (at, 0, 300_000, 0, step, 0, 0, 0, 0, 0, 0),
            (at, 400_000, 50_000, 0, step, 1, 1, 1, 0, 0, 0),  # runs from 400 to 450 us
            (at + 450_000, 10_000, 40_000 + longer, 0, step, 2, 2, 0, 0, 0, 0),  # to 500, or 600
        ]
        steps.append((step, at, at + 700_000 + longer, 4, phase, 0))
    operators = ("g.layers[0].up", "g.draft.block", "g.draft.select", "g.drafty")
    return replace(
        hand_trace(),
        operators=tuple(OperatorInfo("x", "x", path, 0) for path in operators),
        task_op=np.array([0, 1, 2, 3]),
        kept=StepSpans(np.array(spans, SPAN)),
        steps=np.array(steps, STEP),
    )


def test_a_drafters_time_is_from_its_first_start_to_its_last_end_in_decode_steps():
    draft_ms, verify_ms = draft_times(drafted_trace())
    assert draft_ms == pytest.approx((0.1 + 0.2) / 2)
    assert verify_ms == pytest.approx((0.7 + 0.8) / 2 - 0.15)


def test_a_trace_without_a_drafter_has_no_drafting_times():
    assert draft_times(hand_trace(3)) == (None, None)
