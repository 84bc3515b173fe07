"""A tokenizer of bytes: every text has ids, and a control token has the id 256 and up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gpurt.tokenizer import Tokenizer, _byte_alphabet, tokenizer_from_json

CONTROL = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")


def byte_tokenizer(folder: Path, control: Sequence[str] = CONTROL) -> Tokenizer:
    """Write and read a tokenizer.json: 256 bytes as GPT-2 spells them, then control tokens."""
    source = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 256 + i,
                "content": name,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for i, name in enumerate(control)
        ],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "model": {"type": "BPE", "vocab": _byte_alphabet(), "merges": []},
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(source))
    return tokenizer_from_json(path)
