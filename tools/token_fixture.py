"""Fills tests/models/tokens_llama_cpp.json: llama.cpp's ids of a stress set of texts.

  python tools/token_fixture.py LLAMA_CPP_BINARY

The binary is tools/llama_cpp.cpp, built against a llama.cpp tree (the ids in the repository are of
the one in llama-cpp-python 0.3.36). A new case is a new {"text": ...} in the file; the later part
of the file is random mixtures of the same material.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "tests/models/tokens_llama_cpp.json"
sys.path.insert(0, str(ROOT))

from gpurt.loaders.smollm2 import smollm2_path  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary")
    texts = [case["text"] for case in json.loads(FIXTURE.read_text(encoding="utf-8"))]
    lines = llama_cpp_lines(parser.parse_args().binary, texts)
    cases = [
        json.dumps({"text": text, "ids": lines[2 * i], "plain_ids": lines[2 * i + 1]})
        for i, text in enumerate(texts)
    ]
    FIXTURE.write_text("[\n" + ",\n".join(cases) + "\n]\n", encoding="utf-8")
    print(f"{len(cases)} texts")


def llama_cpp_lines(binary: str, texts: list[str]) -> list[list[int]]:
    """Two lines a text: control tokens recognised, and not."""
    feed = "".join(f"{text}\0" for text in texts).encode()
    command = [binary, "tokens", str(smollm2_path())]
    out = subprocess.run(command, input=feed, capture_output=True, check=True).stdout
    return [[int(word) for word in line.split()] for line in out.decode().split("\n")[:-1]]


if __name__ == "__main__":
    main()
