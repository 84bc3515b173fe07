"""Channels: how a chat is framed, and a reply cut into reasoning, commentary and answer."""

from __future__ import annotations

import pytest

from gpurt.channels import ChannelFormat
from gpurt.reply import Reply
from gpurt.request import Result
from gpurt.tokenizer import ChatTemplate, chat_format
from tests.helpers.byte_tokenizer import CONTROL, byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"), CONTROL)


class Tokens(list):
    """A request that has ended."""

    def result(self):
        return Result(list(self), "stop")


def reply(tokenizer, text):
    """(what is shown, the answer) of a reply, token by token."""
    ids = tokenizer.encode(text) if isinstance(text, str) else text
    found = Reply(Tokens(ids), tokenizer, channels=ChannelFormat())
    shown = "".join(found)
    assert shown == found.text
    return shown, found.answer


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
    ids = [*tokenizer.encode(" to=user<|message|>"), 0xC3, 258]
    assert reply(tokenizer, ids)[0] == "[answer]\n\ufffd"


def test_parts_name_the_channel_of_all_text(tokenizer):
    text = " to=self<|message|>Hm<|eom|><|start|>assistant to=user<|message|>Yes<|eot|>"
    found = Reply(Tokens(tokenizer.encode(text)), tokenizer, channels=ChannelFormat())
    said = {}
    for part in found.parts():
        said[part.channel] = said.get(part.channel, "") + part.text
    assert said == {"reasoning": "Hm", "answer": "Yes"}


def test_a_stop_string_lies_within_one_channel(tokenizer):
    class Cancelled(Tokens):
        def cancel(self):
            self.cancelled = True

    text = " to=self<|message|>EN<|eom|><|start|>assistant to=user<|message|>D ENDED<|eot|>"
    found = Reply(Cancelled(tokenizer.encode(text)), tokenizer, ["END"], ChannelFormat())
    assert "".join(found) == "[reasoning]\nEN\n\n[answer]\nD "
    assert (found.answer, found.finish_reason) == ("D ", "stop")
