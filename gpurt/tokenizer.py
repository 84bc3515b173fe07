"""Tokenizer: text to ids and back, the ChatML template, and text that streams in whole characters.

Owns: byte-level BPE from a GGUF vocabulary or a tokenizer.json, on the `tokenizers` package.
Knows no model. Ids equal llama.cpp's: tests/models/tokens_llama_cpp.json was made by it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurt.channels import ChannelFormat
from gpurt.errors import ModelError, RequestError

_CONTROL = 3  # GGUF token types
_USER_DEFINED = 4
_SMOLLM = "smollm"
# Ends of a reply that llama.cpp knows by name, besides the one the metadata states.
_END_NAMES = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>")
_CHAT_BEGIN, _CHAT_END = "<|im_start|>", "<|im_end|>"
_DEFAULT_SYSTEM = re.compile(
    r"messages\[0\]\['role'\] != 'system'.*?<\|im_start\|>system(?:\n|\\n)(.*?)<\|im_end\|>", re.S
)
_MAX_TAIL_TOKENS = 16  # a character is at most 4 bytes, so an honest tail is shorter


class Tokenizer:
    """Text to ids and back. Safe to use from several threads.

    stop_ids: tokens that end a reply.
    """

    def __init__(
        self,
        full: Any,
        plain: Any,
        control_ids: frozenset[int],
        stop_ids: tuple[int, ...],
        vocab_size: int = 0,
    ) -> None:
        """full, plain: `tokenizers.Tokenizer` with and without control tokens. vocab_size: ids
        from here on stand for bytes that the vocabulary lacks, and are dropped; 0: none do.
        """
        self._full, self._plain = full, plain
        self.control_ids, self.stop_ids = control_ids, stop_ids
        self.vocab_size: int = vocab_size or full.get_vocab_size(with_added_tokens=True)
        decoder = type(full.decoder).__name__ if full.decoder is not None else ""
        self._bytes_of = _byte_alphabet() if decoder == "ByteLevel" else None

    def encode(self, text: str, *, control: bool = True) -> list[int]:
        """Ids of a text. control: names of control tokens in it become those tokens.

        Raises: RequestError if the text is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            msg = f"the text holds a lone surrogate at character {error.start}"
            raise RequestError(f"{msg} - at Tokenizer.encode - pass valid UTF-8") from error
        engine = self._full if control else self._plain
        ids: list[int] = engine.encode(text, add_special_tokens=control).ids
        return [token for token in ids if token < self.vocab_size]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens left out. Bytes that are no UTF-8 become U+FFFD."""
        stream = self.stream()
        return "".join(stream.push(token) for token in ids) + stream.finish()

    def stream(self) -> TextStream:
        """A detokeniser for one reply."""
        return TextStream(self)

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name."""
        found: int | None = self._full.token_to_id(token)
        return found

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of one token, empty for a control token or an id beyond the vocabulary.

        None if this vocabulary is not byte level.
        """
        if self._bytes_of is None:
            return None
        name = self._full.id_to_token(token)
        if token in self.control_ids or token >= self.vocab_size or name is None:
            return b""
        alphabet = self._bytes_of
        if all(char in alphabet for char in name):
            return bytes(alphabet[char] for char in name)
        return str(name).encode("utf-8")  # an added token is text, not bytes

    def decode_raw(self, ids: Sequence[int]) -> str:
        """What the `tokenizers` package makes of ids."""
        text: str = self._full.decode(list(ids), skip_special_tokens=True)
        return text


class TextStream:
    """Ids in, text out, in whole characters: a character split over tokens waits for its last.

    One thread, one reply.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start with nothing seen."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._window: list[int] = []  # ids whose text may still change: not byte level only
        self._sent = ""

    def push(self, token: int) -> str:
        """The text that this token completes; often empty for a part of a character."""
        piece = self._tokenizer.token_bytes(token)
        if piece is not None:
            return self._decoder.decode(piece)
        self._window.append(token)
        return self._grow(final=False)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True) + self._grow(final=True)

    def _grow(self, *, final: bool) -> str:
        """Text of the window beyond what was sent. A vocabulary of words with spaces in front
        cannot be decoded token by token, so the last sent token stays in the window.
        """
        if not self._window:
            return ""
        text = self._tokenizer.decode_raw(self._window)
        waiting = text.endswith("\ufffd") and len(self._window) < _MAX_TAIL_TOKENS
        if (waiting and not final) or not text.startswith(self._sent):
            return ""
        fresh = text[len(self._sent) :]
        self._window = self._window[-1:]
        self._sent = self._tokenizer.decode_raw(self._window)
        return fresh


@dataclass(frozen=True)
class ChatTemplate:
    """ChatML: `<|im_start|>role`, a line end, the content, `<|im_end|>`, a line end.

    default_system: what a chat without a system message begins with, as the model was trained.
    """

    default_system: str | None = None

    def __call__(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a chat, up to where the assistant's reply begins."""
        return "".join(text for text, _ in self._pieces(messages))

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a chat. A control token's name inside a message stays text, so that no message
        can end its turn or begin another's. Otherwise equal to `encode(self(messages))`.
        """
        ids: list[int] = []
        for text, control in self._pieces(messages):
            ids += tokenizer.encode(text, control=control)
        return ids

    def _pieces(self, messages: Sequence[Mapping[str, str]]) -> Iterable[tuple[str, bool]]:
        turns = [(message["role"], message["content"]) for message in messages]
        if self.default_system is not None and (not turns or turns[0][0] != "system"):
            turns.insert(0, ("system", self.default_system))
        after = ""
        for role, content in turns:
            if after:
                yield after, False
            yield _CHAT_BEGIN, True
            yield f"{role}\n{content}", False
            yield _CHAT_END, True
            after = "\n"
        yield after, False
        yield _CHAT_BEGIN, True
        yield "assistant\n", False


def chat_template(source: str | None) -> ChatTemplate | None:
    """A ChatTemplate from a model's Jinja source, None unless it is ChatML."""
    if source is None or _CHAT_BEGIN not in source or _CHAT_END not in source:
        return None
    found = _DEFAULT_SYSTEM.search(source)
    return ChatTemplate(found.group(1).replace("\\n", "\n") if found else None)


def chat_format(tokenizer: Tokenizer, source: str | None) -> ChatTemplate | ChannelFormat | None:
    """How a model chats: in channels if its tokenizer has their tokens, else by its template."""
    channels = ChannelFormat()
    if all(tokenizer.id_of(name) is not None for name in channels.tokens):
        return channels
    return chat_template(source)


def tokenizer_from_gguf(values: Mapping[str, Any], path: str) -> Tokenizer | None:
    """A Tokenizer from GGUF metadata; None if the file carries no vocabulary.

    Raises: ModelError for a vocabulary that gpurt cannot split as llama.cpp does.
    """
    names = values.get("tokenizer.ggml.tokens")
    if names is None:
        return None
    kind, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre != _SMOLLM:
        msg = f"vocabulary {kind!r} with splitting rule {pre!r} is not supported"
        raise ModelError(f"{msg} - at {path} - gpurt reads gpt2 vocabularies with rule 'smollm'")
    merges = [tuple(merge.split(" ", 1)) for merge in values.get("tokenizer.ggml.merges", [])]
    types = values.get("tokenizer.ggml.token_type", [1] * len(names))
    special = [i for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]
    full, plain = _byte_level_bpe(names, merges), _byte_level_bpe(names, merges)
    package = _package()
    full.add_special_tokens(
        [package.AddedToken(names[i], normalized=False, special=True) for i in special]
    )
    ends = [values.get("tokenizer.ggml.eos_token_id"), values.get("tokenizer.ggml.eot_token_id")]
    ends += [full.token_to_id(name) for name in _END_NAMES]
    stop_ids = tuple(dict.fromkeys(int(end) for end in ends if end is not None))
    control = frozenset(i for i in special if types[i] == _CONTROL)
    return Tokenizer(full, plain, control, stop_ids, len(names))


def tokenizer_from_json(path: Path) -> Tokenizer:
    """A Tokenizer from a tokenizer.json. Raises: ModelError if it cannot be read."""
    package = _package()
    try:
        source = json.loads(path.read_text(encoding="utf-8"))
        full = package.Tokenizer.from_str(json.dumps(source))
        added = source.get("added_tokens", [])
        source["added_tokens"] = [token for token in added if not token.get("special")]
        source["post_processor"] = None
        plain = package.Tokenizer.from_str(json.dumps(source))
    except Exception as error:  # the package raises bare Exception
        msg = f"cannot read the tokenizer: {error}"
        raise ModelError(f"{msg} - at {path} - get the file again") from error
    control = frozenset(int(token["id"]) for token in added if token.get("special"))
    ends = [full.token_to_id(name) for name in _END_NAMES]
    return Tokenizer(full, plain, control, tuple(end for end in ends if end is not None))


def _byte_level_bpe(names: Sequence[str], merges: Sequence[tuple[str, ...]]) -> Any:
    """Digits one by one, then the GPT-2 splitting rule, then merges by rank.

    A byte that the vocabulary lacks gets an id beyond it: it must keep its neighbours from merging
    with each other, as in llama.cpp, before `encode` drops it.
    """
    package = _package()
    vocabulary = {name: index for index, name in enumerate(names)}
    for char in _byte_alphabet():
        vocabulary.setdefault(char, len(vocabulary))
    engine = package.Tokenizer(package.models.BPE(vocabulary, list(merges)))
    split = package.pre_tokenizers
    engine.pre_tokenizer = split.Sequence(
        [
            split.Digits(individual_digits=True),
            split.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    engine.decoder = package.decoders.ByteLevel()
    return engine


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte, inverted."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


def _package() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        msg = "the package tokenizers is not installed"
        raise ModelError(f"{msg} - at gpurt.tokenizer - pip install tokenizers") from error
    return tokenizers
