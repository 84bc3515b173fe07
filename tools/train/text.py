"""Text: the tokenizer, and chats as token ids with the weight that each has in the loss.

A byte-level BPE with digits one by one, trained on chats of the generator from one seed: the same
vocabulary wherever it is made. A chat is framed as gpurt frames it (gpurt/channels.py): the prompt
by the same code, the reply as a Muse model writes it, reasoning first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.channels import ChannelFormat
from gpurt.tokenizer import Tokenizer, tokenizer_from_json
from tools.train.dialogue import Exchange, chat

PAD, MASK = "<|pad|>", "<|MASK|>"
CHANNELS = ChannelFormat()
SPECIAL = (PAD, MASK, *CHANNELS.tokens)
PROMPT_WEIGHT = 0.1  # of a prompt's tokens in the loss: most of them are not to be foreseen
_SAMPLE_CHATS = 30_000
_SAMPLE_SEED = 1 << 41  # beyond the chats that training draws


def train_tokenizer(path: Path, vocab: int, chats: int = _SAMPLE_CHATS) -> None:
    """Write tokenizer.json with exactly `vocab` tokens. Raises: ValueError if text runs out."""
    import tokenizers

    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers
    engine.pre_tokenizer = split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
    )
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(split.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(_sample(chats), trainer)
    if engine.get_vocab_size() != vocab:
        msg = f"{chats} chats give {engine.get_vocab_size()} tokens, not {vocab}"
        raise ValueError(f"{msg} - at train_tokenizer - use a smaller vocabulary")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Sorted and without the package's whims, so that equal vocabularies are equal files.
    path.write_text(json.dumps(json.loads(engine.to_str()), ensure_ascii=True), encoding="utf-8")


def _sample(chats: int) -> Iterator[str]:
    for seed in range(_SAMPLE_SEED, _SAMPLE_SEED + chats):
        for exchange in chat(seed, talk=0.2):
            yield from (exchange.user, exchange.thought, exchange.answer)
    yield from ["assistant to=self", " to=self", "assistant to=user", "user", "system"] * chats


@dataclass(frozen=True)
class Document:
    """A chat as ids. reply: which tokens the model has to say itself."""

    ids: NDArray[np.uint16]
    reply: NDArray[np.bool_]


class Encoder:
    """Chats to documents, by a trained tokenizer."""

    def __init__(self, path: Path) -> None:
        """path: a tokenizer.json that `train_tokenizer` wrote."""
        self.tokenizer: Tokenizer = tokenizer_from_json(path)
        self.vocab = self.tokenizer.vocab_size
        self._id = {name: self._named(name) for name in SPECIAL}
        self._to_self = self._plain(" to=self")
        self._to_user = self._plain("assistant to=user")

    def special(self, name: str) -> int:
        """The id of one of SPECIAL."""
        return self._id[name]

    def prompt(self, exchanges: list[Exchange]) -> list[int]:
        """Ids up to where the last exchange's reply begins: what gpurt feeds a model."""
        messages: list[dict[str, str]] = []
        for exchange in exchanges[:-1]:
            messages.append({"role": "user", "content": exchange.user})
            messages.append({"role": "assistant", "content": exchange.answer})
        messages.append({"role": "user", "content": exchanges[-1].user})
        return CHANNELS.encode(self.tokenizer, messages)

    def document(self, exchanges: list[Exchange]) -> Document:
        """A whole chat; only the last reply is to be said, the others are history."""
        prompt, last = self.prompt(exchanges), exchanges[-1]
        reply = [
            *self._to_self,
            self._id[CHANNELS.message],
            *self._plain(last.thought),
            self._id[CHANNELS.eom],
            self._id[CHANNELS.start],
            *self._to_user,
            self._id[CHANNELS.message],
            *self._plain(last.answer),
            self._id[CHANNELS.eot],
        ]
        said = np.zeros(len(prompt) + len(reply), np.bool_)
        said[len(prompt) :] = True
        return Document(np.array([*prompt, *reply], np.uint16), said)

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, control=False)

    def _named(self, name: str) -> int:
        found: Any = self.tokenizer.id_of(name)
        if found is None:
            msg = f"the tokenizer has no {name}"
            raise ValueError(f"{msg} - at tools.train.text.Encoder - make it with train_tokenizer")
        return int(found)
