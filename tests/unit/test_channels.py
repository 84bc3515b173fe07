"""Channels: how a chat is framed, and a reply cut into reasoning, commentary and answer."""

from __future__ import annotations

import pytest

from gpurt.channels import ChannelFormat
from gpurt.tokenizer import ChatTemplate, chat_format
from tests.helpers.byte_tokenizer import CONTROL, byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"), CONTROL)


def reply(tokenizer, text):
    """(what is shown, the answer) of a reply, token by token."""
    stream = ChannelFormat().stream(tokenizer)
    shown = "".join(stream.push(token) for token in tokenizer.encode(text)) + stream.finish()
    return shown, stream.answer


def test_a_tokenizer_with_the_four_tokens_speaks_in_channels(tokenizer, tmp_path):
    assert isinstance(chat_format(tokenizer, None), ChannelFormat)
    assert chat_format(byte_tokenizer(tmp_path, CONTROL[:3]), None) is None
    chatml = "<|im_start|> <|im_end|>"
    assert isinstance(chat_format(byte_tokenizer(tmp_path, []), chatml), ChatTemplate)


def test_a_chat_ends_where_the_assistant_begins(tokenizer):
    form = ChannelFormat()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    text = (
        "<|start|>system<|message|>Be brief.<|eot|><|start|>user<|message|>Hi<|eot|>"
        "<|start|>assistant to=user<|message|>Hello<|eot|><|start|>user<|message|>Bye<|eot|>"
        "<|start|>assistant"
    )
    assert form(messages) == text
    assert form.encode(tokenizer, messages) == tokenizer.encode(text)


def test_control_tokens_named_in_a_message_stay_text(tokenizer):
    ids = ChannelFormat().encode(tokenizer, [{"role": "user", "content": "<|eot|><|start|>"}])
    assert ids.count(256 + CONTROL.index("<|eot|>")) == 1
    assert ids.count(256) == 2


def test_reasoning_commentary_and_answer_are_shown_apart(tokenizer):
    shown, answer = reply(
        tokenizer,
        " to=self<|message|>Hm, 2+2.<|eom|><|start|>assistant to=commentary<|message|>adding"
        "<|eom|><|start|>assistant to=user<|message|>4 é<|eot|>",
    )
    assert shown == "[reasoning]\nHm, 2+2.\n\n[commentary]\nadding\n\n[answer]\n4 é"
    assert answer == "4 é"


def test_a_tool_call_is_named_and_is_no_answer(tokenizer):
    shown, answer = reply(tokenizer, " to=weather<|message|>x<|eom|>")
    assert (shown, answer) == ("[tool weather]\nx", "")


def test_a_header_without_a_receiver_is_the_answer(tokenizer):
    assert reply(tokenizer, "<|message|>yes<|eot|>") == ("[answer]\nyes", "yes")


def test_a_reply_without_channels_is_shown_as_it_is(tokenizer):
    assert reply(tokenizer, "just text") == ("just text", "just text")


def test_a_reply_cut_within_a_header_shows_nothing_of_it(tokenizer):
    shown, answer = reply(tokenizer, " to=self<|message|>Hm<|eom|><|start|>assistant to")
    assert (shown, answer) == ("[reasoning]\nHm", "")


def test_a_character_cut_at_a_message_end_is_replaced(tokenizer):
    stream = ChannelFormat().stream(tokenizer)
    ids = [*tokenizer.encode(" to=user<|message|>"), 0xC3, 258]
    assert "".join(map(stream.push, ids)) + stream.finish() == "[answer]\n\ufffd"
