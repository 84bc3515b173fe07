"""Makes tests/models/smollm2_reference.json: transformers' greedy tokens of SmolLM2, in float32.

The reference runs the DEQUANTISED weights of the GGUF file, so nothing differs but the order of
sums. For every position it keeps the largest logits with their ids, so that a test can tell a wrong
token from a near tie, and can check logits without torch.

  python tools/reference_tokens.py [--tokens 64] [--round bf16] [--out FILE]

With --round bf16 every matrix is rounded to bfloat16 first, as the GPU holds it; that is
tests/models/smollm2_bf16_reference.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gpurt.loaders import load_model  # noqa: E402
from tests.helpers.checkpoints import transformers_model  # noqa: E402

PLAIN = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 5, 8, 13, 21,",
    "The three laws of thermodynamics are:\n1.",
    "Überraschung! Das Wetter in München ist heute",
    'import numpy as np\n\nclass Matrix:\n    """A dense matrix."""\n\n    def __init__(self',
    "Q: How many legs do 7 spiders have?\nA:",
]
CHAT = [
    "Give me three tips for learning to cook.",
    "What is gravity? Answer in one sentence.",
    "Translate 'good morning' into French, Spanish and German.",
    "Write a haiku about autumn rain 🍂.",
]
TOP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--round", choices=["bf16"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    infix = f"_{options.round}" if options.round else ""
    out = options.out or ROOT / f"tests/models/smollm2{infix}_reference.json"
    model = load_model("smollm2")
    reference = transformers_model(model)
    if options.round:
        with torch.no_grad():
            for parameter in reference.parameters():
                if parameter.ndim == 2:  # norms stay float32
                    parameter.copy_(parameter.bfloat16().float())
    prompts = [(text, model.tokenizer.encode(text)) for text in PLAIN]
    for text in CHAT:
        ids = model.chat.encode(model.tokenizer, [{"role": "user", "content": text}])
        prompts.append((text, ids))
    # Longer than a page and than a prefill step of 16 rows, by a part of each.
    long = " ".join(PLAIN[i] for i in (1, 4, 6)) + " " + PLAIN[1]
    prompts.append((long, model.tokenizer.encode(long)))
    cases = []
    for text, ids in prompts:
        cases.append({"text": text, "prompt": ids} | greedy(reference, ids, options.tokens))
        print(f"{len(ids)} + {options.tokens} tokens, {min(cases[-1]['margins']):.4f} least margin")
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    out.write_text(f'{{"model": "smollm2", "cases": [\n{lines}\n]}}\n', encoding="utf-8")


def greedy(reference, ids, count):
    """Greedy tokens without stopping; per position the margin, the top logits and the scale."""
    tokens, margins, top, scales = [], [], [], []
    feed, cache = torch.tensor([ids]), None
    with torch.no_grad():
        for _ in range(count):
            out = reference(feed, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[0, -1]
            best = logits.topk(TOP)
            tokens.append(int(best.indices[0]))
            margins.append(round(float(best.values[0] - best.values[1]), 4))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            top.append([[index, round(value, 4)] for index, value in pairs])
            scales.append(round(float(logits.abs().max()), 3))
            feed = best.indices[:1][None]
    return {"tokens": tokens, "margins": margins, "top": top, "scales": scales}


if __name__ == "__main__":
    main()
