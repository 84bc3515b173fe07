"""Request's own promises, and text that is cut at stop strings."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.arrays import as_array, from_storage, to_storage
from gpurt.buffer import bf16
from gpurt.errors import RequestError
from gpurt.graph import Graph
from gpurt.reply import Reply, StopMatcher
from gpurt.request import Result


class FakeRequest:
    """Yields tokens; ends early once it was cancelled, as the device would a few tokens late."""

    def __init__(self, tokens, late=2):
        self.tokens, self.late, self.cancelled_at = tokens, late, None
        self.given = 0

    def __iter__(self):
        for token in self.tokens:
            self.given += 1
            yield token

    def cancel(self):
        self.cancelled_at = self.given

    def result(self):
        cancelled = self.cancelled_at is not None
        return Result(self.tokens, "cancelled" if cancelled else "length")


class Letters:
    """A tokenizer whose token 1 is "a", 2 "b" and so on."""

    def stream(self):
        return self

    def push(self, token):
        return chr(96 + token)

    def finish(self):
        return ""


def reply_of(text, stops):
    request = FakeRequest([ord(c) - 96 for c in text])
    reply = Reply(request, Letters(), stops)
    return list(reply), reply, request


def test_nothing_of_a_stop_string_or_beyond_it_is_shown():
    pieces, reply, request = reply_of("hellostopworld", ["stop"])
    assert "".join(pieces) == reply.text == "hello"
    assert reply.finish_reason == "stop"
    assert request.cancelled_at == 9
    assert len(reply.token_ids) == 9


def test_what_only_began_like_a_stop_string_is_shown_late_but_whole():
    pieces, reply, _ = reply_of("ststostay", ["stop"])
    assert "".join(pieces) == "ststostay"
    assert "" not in pieces
    assert reply.finish_reason == "length"


def test_held_back_end_of_the_text_is_shown_when_the_request_ends():
    pieces, _, _ = reply_of("gosto", ["stop"])
    assert pieces == ["g", "o", "sto"]


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("abcabcd", ["abcd"], "abc"),
        ("aaab", ["aab"], "a"),
        ("xyz", ["yz", "xyz"], ""),
        ("xyz", ["z", "y"], "x"),
        ("abc", [], "abc"),
        ("abc", ["abc"], ""),
    ],
)
def test_stop_matcher_finds_the_first_place_of_any_stop_string(text, stops, shown):
    for size in (1, 2, 3, len(text)):
        matcher = StopMatcher(stops)
        parts = [matcher.push(text[i : i + size]) for i in range(0, len(text), size)]
        assert "".join(parts) + matcher.finish() == shown


def test_stop_strings_need_a_tokenizer_and_a_character():
    with pytest.raises(RequestError, match=r"^a stop string is empty"):
        StopMatcher(["a", ""])
    with pytest.raises(RequestError, match=r"^a stop string needs a tokenizer"):
        Reply(FakeRequest([1]), None, ["a"])


def test_reply_without_a_tokenizer_is_its_ids():
    reply = Reply(FakeRequest([5, 17, 2]), None)
    assert "".join(reply) == "5 17 2"


def test_bf16_inputs_are_rounded_and_read_back_as_float():
    buffer = Graph("g").input("x", [3], "bf16")
    stored = to_storage(buffer, np.array([1.0, 1.00390625, -2.5]))
    assert stored.dtype == np.uint16
    assert from_storage(stored, bf16).tolist() == [1.0, 1.0, -2.5]


def test_integer_array_fits_a_float_input_and_not_the_other_way():
    graph = Graph("g")
    assert to_storage(graph.input("x", [2], "f32"), [1, 2]).dtype == np.float32
    with pytest.raises(RequestError, match=r"^float64 elements do not fit k \[2\] u32"):
        to_storage(graph.input("k", [2], "u32"), np.ones(2))


def test_object_without_numbers_is_refused():
    with pytest.raises(RequestError, match=r"^str of dtype"):
        as_array("abc")


def test_tensor_of_another_device_is_refused():
    class OnGpu:
        def __dlpack__(self):
            raise AssertionError("must not be asked")

        def __dlpack_device__(self):
            return (2, 0)

    with pytest.raises(RequestError, match=r"^a tensor on DLPack device type 2"):
        as_array(OnGpu())
