"""`gpurt run` and `gpurt chat` on Muse Spark and Qwen3-MoE folders."""

from __future__ import annotations

import io
import json
import warnings

import pytest

from gpurt.chat import Chat, Settings
from gpurt.chat.screen import PlainScreen
from gpurt.cli import main
from gpurt.loaders import load_model
from gpurt.runtime import Runtime
from gpurt.serving import model_graph
from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.muse import make_muse, save_muse

pytestmark = [pytest.mark.reference, pytest.mark.timeout(120)]

EOM, EOT = 258, 259


@pytest.fixture(autouse=True)
def keep_warnings(monkeypatch):
    """`main` decides how warnings are shown, for its process."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("muse")
    save_muse(make_muse(num_hidden_layers=2, vocab_size=260, eos_token_id=EOM), path)
    byte_tokenizer(path)
    return path


def test_run_answers_and_notes_what_is_skipped(folder, capsys):
    command = ["run", "--model", str(folder), "--device", "host", "--max-tokens", "5", "--json"]
    assert main([*command, "--prompt", "Hello", "--ignore-eos"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["prompt_token_ids"] == list(b"Hello")
    assert len(record["token_ids"]) == 5
    assert "vision and audio towers skipped (69 tensors)" in err


def test_a_chat_prompt_is_framed_in_channels(folder, capsys):
    command = ["run", "--model", str(folder), "--device", "host", "--max-tokens", "5", "--json"]
    assert main([*command, "--prompt", "Hi", "--chat"]) == 0
    ids = json.loads(capsys.readouterr().out)["prompt_token_ids"]
    assert ids == [256, *b"user", 257, *b"Hi", EOT, 256, *b"assistant"]


def test_a_turn_ends_at_eot_even_if_the_config_names_another_end(folder):
    assert load_model(folder).stop_ids == (EOM, EOT)


def test_plan_prints_the_operators_of_a_mixture(folder, capsys):
    assert main(["plan", "--model", str(folder), "--device", "host"]) == 0
    out = capsys.readouterr().out
    for name in ("gated_residual", "expert_matvec", "route", "combine"):
        assert name in out


def test_chat_goes_on_with_the_answer_alone(folder, monkeypatch):
    model = load_model(folder)
    reply = (
        *b" to=self", 257, *b"Hm", EOM, 256, *b"assistant to=user", 257, *b"Yes", EOT
    )  # fmt: skip
    out = io.StringIO()
    with Runtime("host", workers=1) as runtime:
        graph = model_graph(model, "host", rows=4, context=128)
        chat = Chat(runtime, model, graph, PlainScreen(out), Settings(max_tokens=1))
        submit, sent = runtime.submit, []

        def scripted(graph, prompt, **options):
            sent.append(prompt)
            request = submit(graph, prompt, **options)
            monkeypatch.setattr(type(request), "__iter__", lambda _: iter(reply))
            return request

        monkeypatch.setattr(runtime, "submit", scripted)
        lines = iter(["One?", "Two?", "/reasoning", "/quit"])
        chat.run(lambda _: next(lines))
    assert "(reasoning, 1 word; /reasoning shows it)\nYes" in out.getvalue()
    assert "[reasoning]\nHm" in out.getvalue()
    said = bytes(token for token in sent[1] if token < 256)
    assert said == b"userOne?assistant to=userYesuserTwo?assistant"
