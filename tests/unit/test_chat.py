"""The chat's turns and commands, with a model and a runtime that answer as they are told."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import pytest

from gpurt.chat import Chat, Settings
from gpurt.chat.screen import PlainScreen
from gpurt.errors import FaultError, TraceError
from gpurt.graph import Graph
from gpurt.reply import Part
from tests.helpers.chat_double import FakeModel, FakeRequest, FakeRuntime


class Never:
    """A gate that does not open."""

    def exists(self):
        return False


NEVER = Never()


def talk(lines, runtime=None, context=400, system=None, **settings):
    """(what is written, the runtime) of a chat; `lines` may hold functions of the draft."""
    runtime = runtime or FakeRuntime()
    out = io.StringIO()
    graph = Graph("fake", context=context, vocab=200)
    chat = Chat(runtime, FakeModel(), graph, PlainScreen(out), Settings(**settings), system=system)
    left = iter(lines)

    def source(draft):
        line = next(left, None)
        return line(draft) if callable(line) else line

    chat.run(source)
    return out.getvalue(), runtime


# ---- turns -----------------------------------------------------------------------------------
def test_every_turn_carries_the_whole_conversation():
    out, runtime = talk(["hi", "more"], system="S")
    assert out == "ok1\nok2\n"
    assert runtime.prompts == ["s:S\nu:hi\n", "s:S\nu:hi\na:ok1\nu:more\n"]


def test_clear_forgets_and_system_sets_the_frame():
    out, runtime = talk(["hi", "/clear", "b", "/system Be brief", "/system", "again"])
    assert runtime.prompts[1:] == ["u:b\n", "s:Be brief\nu:again\n"]
    assert "Be brief\n" in out


def test_ctrl_c_stops_the_reply_and_keeps_the_chat():
    runtime = FakeRuntime()
    request = FakeRequest("ab", gate=NEVER, during=lambda: os.kill(os.getpid(), signal.SIGINT))
    runtime.next = [request]
    out, _ = talk(["hi", "go on"], runtime)
    assert out == "ab (stopped)\nok2\n"
    assert request.cancelled.is_set()
    assert runtime.prompts[1] == "u:hi\na:ab\nu:go on\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_ctrl_c_ends_a_reply_that_does_not_stop():
    class Deaf(FakeRequest):
        def cancel(self):
            os.kill(os.getpid(), signal.SIGINT)

    runtime = FakeRuntime()
    runtime.next = [Deaf("ab", during=lambda: os.kill(os.getpid(), signal.SIGINT), gate=NEVER)]
    with pytest.raises(KeyboardInterrupt):
        talk(["hi"], runtime)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_failed_reply_is_one_line_and_its_message_is_forgotten():
    runtime = FakeRuntime()
    runtime.next = [FakeRequest("ab", error=FaultError("task 1 waited - at x - look"))]
    out, _ = talk(["hi", "again"], runtime)
    assert out == "ab (failed)\ngpurt: task 1 waited - at x - look\nok2\n"
    assert runtime.prompts[1] == "u:again\n"


def test_a_reply_that_its_limit_cut_says_so():
    runtime = FakeRuntime()
    runtime.next = [FakeRequest("ab", reason="length")]
    out, _ = talk(["hi"], runtime)
    assert out == "ab (ends after 2 tokens; /max-tokens sets the limit)\n"


def test_full_context_leaves_the_oldest_exchanges_out_and_keeps_the_system_message():
    lines = ["a" * 20, "b" * 20, "c" * 20]
    out, runtime = talk(lines, context=104, max_tokens=40, system="S")
    assert "(context full: 1 exchange left out, the oldest first)\n" in out
    assert runtime.prompts[2] == f"s:S\nu:{'b' * 20}\na:ok2\nu:{'c' * 20}\n"


def test_message_that_cannot_fit_is_refused_and_nothing_is_forgotten():
    out, runtime = talk(["first", "x" * 200, "short"], context=100)
    assert "gpurt: the message has 203 tokens with its frame, room is 37" in out
    assert runtime.prompts == ["u:first\n", "u:first\na:ok1\nu:short\n"]


def test_reply_never_asks_for_more_than_the_context_has():
    _, runtime = talk(["x" * 30], context=100)
    assert runtime.options["max_tokens"] == 101 - 33


# ---- commands --------------------------------------------------------------------------------
def test_commands_before_any_reply_say_so_and_unknown_ones_are_named():
    out, runtime = talk(["/stats", "/trace", "/retry", "/nope x", "/help", "", "/quit", "never"])
    lines = out.splitlines()
    assert lines[:2] == ["gpurt: no reply so far - at chat - send a message first"] * 2
    assert lines[2] == "gpurt: no message so far - at chat - send one first"
    assert lines[3].startswith("gpurt: /nope is no command - at chat - /help lists them")
    assert "the system message stays" in out
    assert runtime.prompts == []


def test_a_message_can_begin_with_a_slash():
    assert talk(["//usr/bin is what?"])[1].prompts == ["u:/usr/bin is what?\n"]


def test_sampling_is_set_by_command_and_shown():
    lines = ["/temperature 0.7", "/top-k 40", "/top-p 0.9", "/seed 5", "/max-tokens 9", "hi"]
    out, runtime = talk([*lines, "/top-k"])
    options = {k: runtime.options[k] for k in ("temperature", "top_k", "top_p", "seed")}
    assert options == {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "seed": 5}
    assert runtime.options["max_tokens"] == 9
    assert out.startswith("(temperature is 0.7)\n")
    assert out.endswith("(top-k is 40)\n")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("/temperature -1", "gpurt: temperature is -1.0 - at /temperature - 0 is greedy"),
        ("/temperature nan", "gpurt: temperature is nan - at /temperature"),
        ("/top-k 2.5", "gpurt: '2.5' is no whole number - at /top-k"),
        ("/top-p 0", "gpurt: top_p is 0 - at /top-p"),
        ("/max-tokens 0", "gpurt: max_tokens is 0 - at /max-tokens"),
    ],
)
def test_a_bad_value_is_refused_and_the_old_one_stays(line, text):
    out, runtime = talk([line, "hi"], temperature=0.5)
    assert out.startswith(text)
    assert (runtime.options["temperature"], runtime.options["top_k"]) == (0.5, 0)


def test_retry_answers_again_and_takes_the_next_seed_if_it_samples():
    out, runtime = talk(["hi", "/retry"], temperature=0.7, seed=3)
    assert out == "ok1\nok2\n"
    assert runtime.prompts == ["u:hi\n", "u:hi\n"]
    assert runtime.options["seed"] == 4
    assert talk(["hi", "/retry"])[1].options["seed"] == 0


def test_edit_replaces_the_last_message_and_its_answer():
    _, runtime = talk(["one", "two", "/edit three", "four"])
    assert runtime.prompts[2] == "u:one\na:ok1\nu:three\n"
    assert runtime.prompts[3] == "u:one\na:ok1\nu:three\na:ok3\nu:four\n"


def test_edit_without_text_offers_the_last_message():
    _, runtime = talk(["one", "two", "/edit", lambda draft: draft + "!", "end"])
    assert runtime.prompts[2] == "u:one\na:ok1\nu:two!\n"
    assert runtime.prompts[3] == "u:one\na:ok1\nu:two!\na:ok3\nu:end\n"


def test_edit_that_is_cleared_or_fails_changes_nothing():
    out, runtime = talk(["one", "/edit", "", "two"])
    assert "(the message stays as it was)" in out
    assert runtime.prompts[1] == "u:one\na:ok1\nu:two\n"
    runtime = FakeRuntime()
    runtime.next = [FakeRequest("ok1"), FakeRequest("", error=FaultError("x - at y - z"))]
    talk(["one", "/retry", "two"], runtime)
    assert runtime.prompts[2] == "u:one\na:ok1\nu:two\n"


def test_stats_of_the_last_reply():
    out, _ = talk(["hi", "/stats"])
    assert "3 prompt tokens, 3 tokens, first after 1.5 ms, 42.0 tokens/s, no launch" in out


def test_trace_is_written_by_its_ending_or_shown_here(tmp_path, monkeypatch):
    names = [tmp_path / n for n in ("a.trace", "a.html", "a.json")]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    out, _ = talk(["hi", "/trace -", *(f"/trace {n}" for n in names), "/trace"])
    assert "critical path" in out
    assert [n.read_bytes()[:9] for n in names] == [b"GPURTTRC\2", b"<!doctype", b'{"display']
    page = out.split("(wrote ")[-1].removesuffix(": open it in a browser)\n")
    assert tmp_path in Path(page).parents
    assert "hand - gpurt trace" in Path(page).read_text(encoding="utf-8")


def test_trace_that_is_gone_or_cannot_be_written_is_one_line(tmp_path):
    class Gone(FakeRequest):
        def trace(self):
            raise TraceError("the spans of request 3 are gone - at Request.trace - ask before")

    runtime = FakeRuntime()
    runtime.next = [Gone("ok")]
    out, _ = talk(["hi", "/trace", "more", f"/trace {tmp_path}/no/a.html"], runtime)
    assert "gpurt: the spans of request 3 are gone - at Request.trace - ask before\n" in out
    assert "gpurt: cannot write the page: No such file" in out


# ---- save and load ---------------------------------------------------------------------------
def test_saved_chat_goes_on_in_another_one(tmp_path):
    path = tmp_path / "chat.json"
    talk(["hi é", f"/save {path}"], system="S", temperature=0.7, seed=9)
    out, runtime = talk([f"/load {path}", "more"])
    assert out.startswith("(loaded 1 exchange; temperature 0.7, seed 9)\n")
    assert runtime.prompts == ["s:S\nu:hi é\na:ok1\nu:more\n"]
    assert runtime.options["seed"] == 9


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "x"}, 'no "format": "gpurt chat"'),
        ({"version": 2}, "chat file of version 2, this gpurt reads up to 1"),
        ({"version": "1"}, "chat file of version 1, this gpurt reads"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages[0] is "),
        ({"messages": [{"role": "user", "content": "a"}]}, "message 0 has no answer"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content is 1"),
        ({"messages": "hi"}, 'messages is "hi"'),
        ({"system": 3}, "system is 3"),
        ({"settings": {"heat": 1}}, 'settings is {"heat": 1}'),
        ({"settings": {"temperature": "hot"}}, "temperature is 'hot' - at settings of"),
    ],
)
def test_damaged_chat_file_is_refused_and_the_chat_goes_on(tmp_path, change, text):
    path = tmp_path / "chat.json"
    talk(["hi", f"/save {path}"])
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    out, runtime = talk(["first", f"/load {path}", "more"])
    assert out.splitlines()[1].startswith(f"gpurt: {text}")
    assert runtime.prompts[1] == "u:first\na:ok1\nu:more\n"


def test_missing_and_foreign_files_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe")
    names = [tmp_path / "none", tmp_path / "a.txt", tmp_path / "b.bin"]
    out, _ = talk([*(f"/load {n}" for n in names), "/save", f"/save {tmp_path}/no/a"])
    lines = out.splitlines()
    assert lines[0].startswith("gpurt: cannot read the chat: No such file")
    assert lines[1].startswith("gpurt: no JSON: ")
    assert lines[2].startswith("gpurt: no JSON: ")
    assert lines[3] == "gpurt: no file - at /save - use /save FILE"
    assert lines[4].startswith("gpurt: cannot write the chat: No such file")


# ---- channels --------------------------------------------------------------------------------
def test_reasoning_is_one_line_until_it_is_asked_for(monkeypatch):
    parts = [Part("reasoning", "Hm, two "), Part("reasoning", "words."), Part("answer", "Yes")]

    def scripted(reply):
        reply.answer, reply.finish_reason = "Yes", "stop"
        yield from parts

    monkeypatch.setattr("gpurt.reply.Reply.parts", scripted)
    out, runtime = talk(["hi", "/reasoning", "more"])
    assert out.startswith("(reasoning, 3 words; /reasoning shows it)\nYes\n")
    assert "[reasoning]\nHm, two words.\n" in out
    assert runtime.prompts[1] == "u:hi\na:Yes\nu:more\n"
    assert "an answer alone" in talk(["/reasoning"])[0]
