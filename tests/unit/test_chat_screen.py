"""Screens: Markdown as it comes, at any width; what is complete is printed once."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gpurt.chat.screen import Blocks, MarkdownScreen
from gpurt.reply import Part
from tests.helpers.chat_double import LONG, MARKDOWN


def cut(text, size):
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("one\n\ntwo\n\n\n\nthree", ["one", "two", "three"]),
        ("```\na\n\nb\n```\n\nend\n", ["```\na\n\nb\n```", "end"]),
        ("~~~\n```\n\n~~~\n\nend", ["~~~\n```\n\n~~~", "end"]),
        ("- a\n\n  more\n\n- b", ["- a\n\n  more", "- b"]),
        ("```\nnever closed\n\nb", ["```\nnever closed\n\nb"]),
        ("\n\nlate", ["late"]),
        ("", []),
    ],
)
def test_blocks_end_at_blank_lines_outside_of_fences(text, blocks, size):
    cutter = Blocks()
    found = [b for piece in cut(text, size) for b in cutter.push(piece)]
    assert [b for b in [*found, cutter.finish()] if b] == blocks


def shown(parts, width=60, height=20):
    """What a terminal was sent: the whole of it, and the lines that stay, without styles."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        height=height,
        force_terminal=True,
        color_system=None,
        legacy_windows=False,
    )
    screen = MarkdownScreen(console)
    screen.begin(lambda: "the status")
    for part in parts:
        screen.add(part)
        screen.draw()
    screen.end()
    return out.getvalue(), [line.rstrip() for line in on_screen(out.getvalue())]


def on_screen(stream):
    """The lines that such a stream leaves: rich moves up and clears lines, nothing else."""
    lines, row, column = [""], 0, 0
    i = 0
    while i < len(stream):
        if stream[i] == "\x1b":
            end = next(j for j in range(i + 2, len(stream)) if stream[j].isalpha())
            code, count = stream[end], stream[i + 2 : end]
            if code == "A":
                row -= int(count or 1)
            elif code == "K":
                lines[row] = ""
            i = end + 1
            continue
        if stream[i] == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif stream[i] == "\r":
            column = 0
        else:
            lines[row] = lines[row][:column].ljust(column) + stream[i] + lines[row][column + 1 :]
            column += 1
        i += 1
    return lines


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_markdown_is_rendered_once_however_it_comes(size):
    stream, lines = shown([Part("", piece) for piece in cut(MARKDOWN, size)])
    text = "\n".join(lines)
    assert "the status" in stream
    assert "the status" not in text
    for once in ("Title", "Some bold words.", "print(1)", "print(2)", "Last line."):
        assert text.count(once) == 1, text
    assert "**" not in text
    assert "```" not in text


def test_a_block_higher_than_the_terminal_shows_its_end_and_stays_whole():
    _, lines = shown([Part("", piece) for piece in cut(LONG, 40)], width=20, height=6)
    words = " ".join(lines).split()
    assert words == LONG.split()
    assert max(map(len, lines)) <= 20


def test_reasoning_is_counted_while_it_comes_and_folded_then():
    parts = [Part("reasoning", "Hm, so "), Part("reasoning", "be it."), Part("answer", "Yes")]
    stream, lines = shown(parts)
    assert "Hm" not in stream
    assert [line for line in lines if line] == ["(reasoning, 4 words; /reasoning shows it)", "Yes"]


def test_control_characters_of_a_model_do_not_reach_the_terminal():
    stream, lines = shown([Part("", "a\x1b[2Jb\x07c\x9b1m")])
    assert "\x1b[2J" not in stream
    assert "\x07" not in stream
    assert "a\ufffd[2Jb\ufffdc\ufffd1m" in lines
