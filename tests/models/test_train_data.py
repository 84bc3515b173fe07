"""Tokenizer and batches: the same wherever they are made, and framed as gpurt frames a chat."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.tokenizer import chat_format, tokenizer_from_json
from tools.train.data import Shape, Stream, make_batch
from tools.train.dialogue import Exchange
from tools.train.text import CHANNELS, MASK, PAD, SPECIAL, Encoder, train_tokenizer

VOCAB, CHATS = 512, 1500
TALK = Exchange("Hi <|eot|> there", "They greet.\n3 + 4 = 7.", "Hello, 17 of you!")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(found, VOCAB, CHATS)
    return found


@pytest.fixture(scope="module")
def encoder(path):
    return Encoder(path)


def test_the_same_text_gives_the_same_file(path, tmp_path):
    train_tokenizer(tmp_path / "again.json", VOCAB, CHATS)
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_any_text_comes_back(encoder):
    for text in ("Tom has 12 pens.", "  two\n\nlines ", "naïve 日本 🙂", "\x00\t~", "$1,234.50"):
        assert encoder.tokenizer.decode(encoder.tokenizer.encode(text, control=False)) == text


def test_digits_are_tokens_of_their_own(encoder):
    ids = encoder.tokenizer.encode("12345", control=False)
    assert len(ids) == 5
    assert encoder.tokenizer.vocab_size == VOCAB
    assert [encoder.special(name) for name in SPECIAL] == list(range(len(SPECIAL)))


def test_too_large_a_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^20 chats give \d+ tokens, not 5000"):
        train_tokenizer(tmp_path / "x.json", 5000, 20)


def test_a_document_begins_with_the_prompt_that_gpurt_makes(path, encoder):
    tokenizer = tokenizer_from_json(path)
    form = chat_format(tokenizer, None)
    document = encoder.document([Exchange("One?", "a", "Uno"), TALK])
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Uno"},
        {"role": "user", "content": TALK.user},
    ]
    prompt = form.encode(tokenizer, messages)
    assert document.ids[: len(prompt)].tolist() == prompt
    assert not document.reply[: len(prompt)].any()
    assert document.reply[len(prompt) :].all()


def test_a_reply_reads_back_as_reasoning_and_answer(encoder):
    document = encoder.document([TALK])
    stream = CHANNELS.stream(encoder.tokenizer)
    said = {"reasoning": "", "answer": "", "": ""}
    for token in document.ids[document.reply]:
        text = stream.push(int(token))
        said[stream.channel] += text
    assert said == {"reasoning": TALK.thought, "answer": TALK.answer, "": ""}
    assert document.ids[-1] == encoder.special(CHANNELS.eot)


def test_a_batch_follows_from_its_index_and_holds_whole_chats(path, encoder):
    shape = Shape(path, seed=3, rows=6, length=384)
    batch, again, other = (make_batch(shape, i, encoder) for i in (5, 5, 6))
    for name in ("ids", "document", "position", "reply"):
        assert np.array_equal(getattr(batch, name), getattr(again, name))
    assert not np.array_equal(batch.ids, other.ids)
    assert (batch.document > 0).mean() > 0.85
    start, eot = encoder.special(CHANNELS.start), encoder.special(CHANNELS.eot)
    for row in range(6):
        for number in range(1, int(batch.document[row].max()) + 1):
            at = np.flatnonzero(batch.document[row] == number)
            assert np.array_equal(at, np.arange(at[0], at[-1] + 1))
            assert batch.position[row, at].tolist() == list(range(len(at)))
            assert (batch.ids[row, at[0]], batch.ids[row, at[-1]]) == (start, eot)
    assert not {encoder.special(PAD), encoder.special(MASK)} & set(batch.ids[batch.document > 0])


def test_a_row_of_unpacked_batches_is_one_chat(path, encoder):
    shape = Shape(path, seed=3, rows=5, length=256, packed=False)
    batch = make_batch(shape, 0, encoder)
    assert batch.document.max(1).tolist() == [1] * 5
    assert (batch.position[:, 0] == 0).all()


def test_the_drawn_share_of_talk_and_stories_reaches_the_batch(path, encoder):
    shape = Shape(path, seed=3, rows=4, length=256, talk=0.0, stories=("few_less",))
    text = encoder.tokenizer.decode(make_batch(shape, 0, encoder).ids[0].tolist())
    assert "Left:" in text
    assert "Now:" not in text


def test_worker_processes_give_the_batches_of_one_in_order(path):
    shape = Shape(path, seed=4, rows=2, length=256)
    with Stream(shape, 7, workers=0) as alone, Stream(shape, 7, workers=2) as many:
        pairs = [(a, b) for a, b, _ in zip(alone, many, range(5), strict=False)]
    for a, b in pairs:
        assert np.array_equal(a.ids, b.ids)
    assert len({pair[0].ids.tobytes() for pair in pairs}) == 5
