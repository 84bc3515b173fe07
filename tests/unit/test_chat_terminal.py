"""The chat through a pipe and through a pseudo-terminal. Replies are a double's, which holds still
where a test acts on a reply, so nothing here depends on how fast anything is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading

import pytest

from tests.helpers.chat_double import MARKDOWN

pexpect = pytest.importorskip("pexpect")

ASKS = r"\x1b\[6n"  # where the cursor is; once for each prompt
HERE = "\x1b[3;1R"
STATUS = r"context \d+ of \d+.*\x1b\[\?25h"  # drawn, and the cursor shown for typing
REAL = ["-m", "gpurt", "chat", "--model", "smollm2", "--device", "host", "--max-tokens", "8"]
NANO = ["-m", "gpurt", "chat", "--device", "host"]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def environment_of(folder):
    """Nobody's state folder, and no desktop."""
    told = ("DISPLAY", "WAYLAND_DISPLAY", "COLUMNS", "LINES")  # the last two by pytest-xdist
    kept = {k: v for k, v in os.environ.items() if k not in told}
    folders = {"TMPDIR": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    return {**kept, **folders, "TERM": "xterm"}


@pytest.fixture
def environment(tmp_path):
    return environment_of(tmp_path)


def double(folder, *options):
    return ["-m", "tests.helpers.chat_double", str(folder), *options]


def spawned(environment, command):
    """A chat on a terminal of its own, at its first prompt."""
    child = pexpect.spawn(
        sys.executable,
        command,
        env=environment,
        encoding="utf-8",
        codec_errors="replace",
        timeout=60,
        dimensions=(40, 100),
    )
    child.delaybeforesend = None
    ready(child)
    return child


@pytest.fixture
def terminal(tmp_path, environment):
    """Opens a chat; ends all that are left."""
    children = []

    def opened(*options, command=None):
        children.append(spawned(environment, command or double(tmp_path, *options)))
        return children[-1]

    yield opened
    for child in children:
        child.close(force=True)


@pytest.fixture(scope="module")
def shared():
    """The chat that tests share which do not end it."""
    return []


@pytest.fixture
def child(shared, tmp_path_factory):
    """A chat at its prompt, with nothing said."""
    if shared:
        shared[0].sendintr()
        try:
            ready(shared[0])
            ask(shared[0], "/clear", "forgotten")
        except (pexpect.TIMEOUT, pexpect.EOF):  # a test before failed
            shared.pop().close(force=True)
    if not shared:
        folder = tmp_path_factory.mktemp("shared")
        shared.append(spawned(environment_of(folder), double(folder)))
    return shared[0]


def ready(child):
    """The next prompt is there. Returns: what was shown until then."""
    child.expect(ASKS)
    shown = child.before
    child.send(HERE)
    child.expect(STATUS)
    return shown + child.before + child.after


def ask(child, text, answer):
    """Send a message, see its answer and the next prompt. Returns: what was shown between."""
    child.send(text + "\r")
    child.expect(answer)
    shown = child.before + child.after
    return shown + ready(child)


def leave(child):
    """Ctrl-D; nothing went wrong until then."""
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert "Traceback" not in (child.before or "")


# ---- a pipe ----------------------------------------------------------------------------------
def test_piped_chat_answers_every_line_and_refuses_what_is_no_utf8(environment):
    lines = b"Hello\n/stats\n\xff\xfe not utf-8\n/unknown\n"
    done = subprocess.run(
        [sys.executable, *REAL],
        input=lines,
        capture_output=True,
        timeout=100,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    out = done.stdout.decode().splitlines()
    assert done.stderr == b""
    assert "8 tokens" in out[-3]
    assert out[-2].startswith("gpurt: byte 0 of line 3 is not UTF-8 - at standard input")
    assert out[-1].startswith("gpurt: /unknown is no command")
    assert "> " not in done.stdout.decode()
    assert "\x1b" not in done.stdout.decode()


# ---- a terminal ------------------------------------------------------------------------------
def test_real_model_answers_on_a_terminal(terminal):
    child = terminal(command=REAL)
    ask(child, "Say hello.", "ends after 8 tokens|[Hh]ello")
    child.send("/stats\r")
    child.expect(r"8 tokens, .*tokens/s, (no|1) launch, 1 exchange|launch, 1 exchange")
    ready(child)
    leave(child)


def test_nano_folds_its_reasoning_and_drafts_on_a_terminal(terminal):
    child = terminal(command=NANO)
    question = "7 years ago Julia was twice as old as Max. Today Max is 15. What is Julia's age?"
    shown = ESCAPES.sub("", ask(child, question, r"Julia is 23 years old\."))
    assert re.search(r"\(reasoning, \d+ words; /reasoning shows it\)", shown)
    assert re.search(r"tokens/s \| \d+\.\d\d a step", shown)
    assert "8 * 2 = 16" not in shown
    assert "8 * 2 = 16" in ESCAPES.sub("", ask(child, "/reasoning", r"\[reasoning\]"))
    leave(child)


def test_reply_is_markdown_and_the_status_line_counts(child):
    shown = ask(child, "md", "Last line")
    text = ESCAPES.sub("", shown)
    assert "Some bold words." in text
    assert "**bold**" not in text
    assert "42.0 tokens/s" in text
    assert f"context {3 + len(MARKDOWN)} of 30000" in text


def test_ctrl_c_stops_a_reply_and_the_chat_goes_on(child):
    child.send("hold\r")
    child.expect("holding")
    child.sendintr()
    child.expect(r"\(stopped\)")
    ready(child)
    ask(child, "abc", "3 characters, sum 294")


def test_what_is_typed_during_a_reply_is_unseen_and_sent_after_it(terminal, tmp_path):
    child = terminal()
    child.send("hold\r")
    child.expect("holding")
    child.send("abc\rdraft")
    (tmp_path / "gate").touch()
    child.expect("released")
    assert "abc" not in child.before
    child.expect(ASKS)
    child.send(HERE)
    child.expect("3 characters, sum 294")
    child.expect(ASKS)
    child.send(HERE)
    child.expect("draft")
    child.sendintr()
    ready(child)
    leave(child)


def test_full_context_is_announced_and_a_message_too_long_alone_refused(terminal):
    child = terminal("--small")
    ask(child, "a" * 20, "20 characters")
    shown = ask(child, "b" * 20, r"left out, the oldest first\).*20 characters")
    assert "(context full: 1 exchange left out, the oldest first)" in ESCAPES.sub("", shown)
    shown = ask(child, "c" * 80, "--context")
    text = " ".join(ESCAPES.sub("", shown).split())
    assert "gpurt: the message has 83 tokens with its frame, room is 57 - at chat" in text
    ask(child, "/retry", "20 characters")  # the chat is as it was before that message
    leave(child)


def test_ctrl_c_at_the_prompt_clears_the_line(child):
    child.send("never sent")
    child.expect("sent")
    child.sendintr()
    ready(child)
    ask(child, "abc", "3 characters")


def test_history_is_kept_for_the_next_chat_unless_told_not_to(terminal, tmp_path):
    child = terminal()
    ask(child, "first words", "11 characters")
    leave(child)
    kept = tmp_path / "state" / "gpurt" / "chat_history"
    assert "first words" in kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o600
    child = terminal()
    child.send("\x1b[A")
    child.expect("first words")
    child.send("!\r")
    child.expect("12 characters")
    ready(child)
    leave(child)
    kept.unlink()
    child = terminal("--no-history")
    ask(child, "private", "7 characters")
    child.send("\x1b[A")
    child.expect("private")  # within the chat it is still there
    child.sendintr()
    ready(child)
    leave(child)
    assert not kept.exists()


def test_chat_is_saved_and_loaded(child, tmp_path):
    ask(child, "abc", "3 characters")
    ask(child, f"/save {tmp_path}/a.json", r"saved 1 exchange to")
    ask(child, "/clear", "forgotten")
    ask(child, f"/load {tmp_path}/a.json", r"loaded 1 exchange;")
    ask(child, f"/load {tmp_path}/none.json", "cannot read the chat: No such file")
    ask(child, "/retry", "3 characters, sum 294")


def test_commands_and_files_are_completed(child, tmp_path):
    (tmp_path / "only_one.json").write_text("{}")
    child.send("/tem\t")
    child.expect("perature")
    child.send(" 0.7\r")
    child.expect(r"\(temperature is 0.7\)")
    ready(child)
    child.send(f"/load {tmp_path}/only\t")
    child.expect("_one.json")
    child.send("\r")
    child.expect('no "format"')
    ready(child)


def test_last_message_is_edited_in_place(child):
    ask(child, "abc", "3 characters")
    child.send("/edit\r")
    child.expect("> .*abc")
    child.send("d\r")
    child.expect("4 characters, sum 394")
    ready(child)


def test_terminal_that_is_resized_while_a_reply_comes(terminal, tmp_path):
    child = terminal()
    child.send("hold\r")
    child.expect("holding")
    child.setwinsize(12, 40)
    (tmp_path / "gate").touch()
    child.expect("released")
    ready(child)
    shown = ask(child, "long", "word59")
    lines = ESCAPES.sub("", shown).replace("\r", "").split("\n")
    assert any("word3" in line for line in lines)
    assert max(map(len, lines)) <= 2 * 40  # a redrawn line is at most twice there
    leave(child)


def test_bytes_that_are_no_utf8_are_refused_and_the_chat_goes_on(child):
    os.write(child.child_fd, b"ab\xff\xfe\r")
    child.expect("not UTF-8 - at the terminal")
    ready(child)
    ask(child, "abc", "3 characters")


def test_paste_of_ten_thousand_characters_is_one_message(child):
    text = "".join(f"line {i:04}\n" for i in range(1000))[:-1] + "!"
    assert len(text) == 10_000
    pasted = f"\x1b[200~{text}\x1b[201~".encode()
    # From a thread: the terminal takes it in parts, and shows it meanwhile.
    writer = threading.Thread(target=write_all, args=(child.child_fd, pasted))
    writer.start()
    child.expect("line 0999!")
    writer.join()
    ask(child, "", f"10000 characters, sum {sum(map(ord, text))}")


def write_all(descriptor, data):
    while data:
        data = data[os.write(descriptor, data) :]


def test_rows_of_one_message_are_typed_with_alt_enter(child):
    child.send("ab\x1b\rcd")
    child.expect("cd")
    child.send("\x0aef\r")
    child.expect("8 characters, sum 617")
    ready(child)


@pytest.mark.parametrize("has_browser", [True, False])
def test_timeline_is_opened_in_a_browser_or_named(terminal, tmp_path, environment, has_browser):
    if has_browser:
        program = tmp_path / "browse"
        program.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
        program.chmod(0o755)
        environment["BROWSER"] = f"{program} %s"
    else:
        environment.pop("BROWSER", None)
    child = terminal()
    ask(child, "abc", "3 characters")
    ask(child, "/trace", r"\(opened " if has_browser else "open it in a browser")
    leave(child)
    assert len(list(tmp_path.glob("gpurt-*/reply.html"))) == 1
    if has_browser:
        assert (tmp_path / "opened").read_text().startswith("file://")
