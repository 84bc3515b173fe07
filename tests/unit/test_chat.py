"""The chat: commands and history with a double of the model, then a real one, piped and in a
terminal.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from gpurt.chat import Chat, ChatOptions
from gpurt.errors import FaultError, TraceError
from gpurt.graph import Graph
from gpurt.request import Result, Stats
from tests.helpers.hand_trace import hand_trace

pexpect = pytest.importorskip("pexpect")


class Words:
    """A tokenizer of single characters, and a template of one line a message."""

    def encode(self, text, *, control=True):
        del control
        return [ord(c) for c in text]

    def stream(self):
        return self

    def push(self, token):
        return chr(token)

    def finish(self):
        return ""


class Template:
    def encode(self, tokenizer, messages):
        return tokenizer.encode("".join(f"{m['role'][0]}:{m['content']}\n" for m in messages))


class FakeModel:
    name, path, stop_ids = "fake", "nowhere", ()
    tokenizer, chat = Words(), Template()


class FakeRequest:
    def __init__(self, text, error=None, interrupt=False):
        self.tokens = [ord(c) for c in text]
        self.error, self.interrupt, self.cancelled = error, interrupt, False
        self.stats = Stats(3, len(text), len(text), 0, 1.5, 42.0)

    def __iter__(self):
        for number, token in enumerate(self.tokens):
            if self.interrupt and number == 2:
                raise KeyboardInterrupt
            yield token
        if self.error is not None:
            raise self.error

    def cancel(self):
        self.cancelled = True

    def result(self):
        return Result(self.tokens, "cancelled" if self.cancelled else "stop")

    def trace(self):
        return hand_trace(3)


class FakeRuntime:
    """Answers "ok1", "ok2" ...; keeps the prompts as text."""

    def __init__(self):
        self.prompts, self.next = [], []

    def submit(self, graph, prompt, **options):
        del graph
        self.prompts.append("".join(chr(t) for t in prompt))
        self.options = options
        return self.next.pop(0) if self.next else FakeRequest(f"ok{len(self.prompts)}")


def talk(lines, runtime=None, context=400, **options):
    runtime = runtime or FakeRuntime()
    out = io.StringIO()
    graph = Graph("fake", context=context, vocab=200)
    chat = Chat(runtime, FakeModel(), graph, ChatOptions(**options), out)
    chat.run(iter(lines))
    return out.getvalue(), runtime


def test_every_turn_carries_the_whole_conversation():
    out, runtime = talk(["hi", "more"], system="S")
    assert out == "ok1\nok2\n"
    assert runtime.prompts == ["s:S\nu:hi\n", "s:S\nu:hi\na:ok1\nu:more\n"]


def test_reset_forgets_and_system_sets_the_frame():
    out, runtime = talk(["hi", "/reset", "/system Be brief", "/system", "again"])
    assert runtime.prompts[-1] == "s:Be brief\nu:again\n"
    assert "Be brief\n" in out


def test_commands_before_any_reply_say_so_and_unknown_ones_are_named():
    out, runtime = talk(["/stats", "/trace", "/nope x", "/help", "", "/quit", "never"])
    assert out.startswith("(no reply yet)\n(no reply yet)\n/nope is no command; /help lists them\n")
    assert "/system TEXT" in out
    assert runtime.prompts == []


def test_stats_of_the_last_reply():
    out, _ = talk(["hi", "/stats"])
    assert "3 prompt tokens, 3 tokens, first after 1.5 ms, 42.0 tokens/s, no launch" in out


def test_trace_shows_or_saves_the_last_reply(tmp_path):
    out, _ = talk(["hi", "/trace", f"/trace {tmp_path / 'a.trace'}"])
    assert "critical path" in out
    assert (tmp_path / "a.trace").stat().st_size > 100


def test_ctrl_c_stops_the_reply_and_keeps_the_chat():
    runtime = FakeRuntime()
    request = FakeRequest("abcdef", interrupt=True)
    runtime.next = [request]
    out, _ = talk(["hi", "go on"], runtime)
    assert out == "ab (stopped)\nok2\n"
    assert request.cancelled
    assert runtime.prompts[1] == "u:hi\na:ab\nu:go on\n"


def test_failed_reply_is_one_line_and_its_message_is_forgotten():
    runtime = FakeRuntime()
    runtime.next = [FakeRequest("ab", error=FaultError("task 1 waited - at x - look"))]
    out, _ = talk(["hi", "again"], runtime)
    assert out == "ab\ngpurt: task 1 waited - at x - look\nok2\n"
    assert runtime.prompts[1] == "u:again\n"


def test_trace_that_is_gone_is_one_line():
    class Gone(FakeRequest):
        def trace(self):
            raise TraceError("the spans of request 3 are gone - at Request.trace - ask before")

    runtime = FakeRuntime()
    runtime.next = [Gone("ok")]
    out, _ = talk(["hi", "/trace"], runtime)
    assert out.endswith("gpurt: the spans of request 3 are gone - at Request.trace - ask before\n")


def test_full_context_leaves_the_oldest_exchanges_out_and_says_so():
    out, runtime = talk(["a" * 20, "b" * 20, "c" * 20], context=100, max_tokens=40)
    assert "(context full: the oldest 1 exchange left out)\n" in out
    assert runtime.prompts[2] == f"u:{'b' * 20}\na:ok2\nu:{'c' * 20}\n"


def test_message_that_cannot_fit_is_refused_and_the_chat_goes_on():
    out, runtime = talk(["x" * 200, "short"], context=100)
    assert out.startswith("gpurt: the message has 203 tokens with its frame, room is 37")
    assert runtime.prompts == ["u:short\n"]


def test_reply_never_asks_for_more_than_the_context_has():
    _, runtime = talk(["x" * 30], context=100)
    assert runtime.options["max_tokens"] == 101 - 33


PROMPT = r">.*\x1b\[\?25h"  # the cursor is shown once the line can be typed
COMMAND = ["-m", "gpurt", "chat", "--model", "smollm2", "--device", "host"]


def test_piped_chat_answers_every_line_whatever_its_bytes():
    lines = b"Hello\n/stats\n\xff\xfe not utf-8\n/unknown\n"
    done = subprocess.run(
        [sys.executable, *COMMAND, "--max-tokens", "8"],
        input=lines,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    out = done.stdout.decode()
    assert done.stderr == b""
    assert "8 tokens" in out
    assert out.endswith("/unknown is no command; /help lists them\n")
    assert "> " not in out


@pytest.fixture
def terminal():
    environment = {**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
    child = pexpect.spawn(
        sys.executable,
        [*COMMAND, "--max-tokens", "400"],
        env=environment,
        encoding="utf-8",
        timeout=60,
        dimensions=(40, 100),
    )
    yield child
    child.close(force=True)


def test_terminal_chat_streams_stops_on_ctrl_c_and_leaves_on_ctrl_d(terminal):
    terminal.expect("/help for commands")
    terminal.expect(PROMPT)
    terminal.send("Write a very long story about a fox.\r")
    terminal.expect(" woods")
    terminal.sendintr()
    terminal.expect(r"\(stopped\)")
    terminal.expect(PROMPT)
    terminal.setwinsize(24, 60)
    terminal.send("\x1b[A")  # history: the line before
    terminal.expect("fox")
    terminal.sendintr()  # drops the line
    terminal.send("/stats\r")
    terminal.expect(r"tokens/s, (no|1) launch, 1 exchanges")
    terminal.send("/system " + "x" * 2000 + "\r")
    terminal.expect("system message set")
    terminal.expect(PROMPT)
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    assert "Traceback" not in (terminal.before or "")
