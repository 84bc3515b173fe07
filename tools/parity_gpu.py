"""A Llama's tokens on the GPU against transformers in float32 on the same bf16-rounded weights.

    python -m tools.parity_gpu --model smollm2|FILE.gguf|DIR|random     # the last line is JSON

Teacher-forced over our tokens: of all tokens, and of those whose margin is wide, how many differ;
and how far the last logits are from theirs. `random`: SmolLM2-135M's shape with made-up weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gpurt.bench import made_up, shapes
from gpurt.graphs.llama import LlamaConfig, build
from gpurt.graphs.ops.dtypes import to_bf16, to_float32
from gpurt.graphs.reference.transformers_llama import peer_model
from gpurt.loaders import WeightSource, load_model
from gpurt.runtime import Runtime

PROMPTS = (
    "The capital of France is",
    "Write a short poem about the sea.",
    "def fibonacci(n):",
    "Explain why the sky is blue in two sentences.",
    "Once upon a time, in a village at the foot of a mountain,",
    "1, 1, 2, 3, 5, 8, 13,",
    "The three laws of thermodynamics are",
    "Translate to German: good morning, my friend.",
    "List five fruits:",
    "In 1969, humans first",
)
MARGIN = 0.25
TOKENS = 64
Sequences = list[tuple[list[int], list[int]]]


def rounded(source: WeightSource) -> torch.Tensor:
    """A weight as gpurt rounds it to bf16, in float32."""
    bits = to_bf16(to_float32(source.load(), source.dtype))
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float()


def compare(
    config: LlamaConfig, sources: Mapping[str, WeightSource], sequences: Sequences
) -> tuple[dict[str, int], Any]:
    """Counts of tokens that differ from transformers' argmax; the last sequence's last logits."""
    weights = {name: rounded(source) for name, source in sources.items()}
    model = peer_model(config, weights).cuda()
    compared = wrong = wide = wide_wrong = 0
    logits = torch.empty(0)
    with torch.no_grad():
        for prompt, tokens in sequences:
            ids = torch.tensor([prompt + tokens[:-1]], device="cuda")
            logits = model(ids).logits[0, len(prompt) - 1 :]
            top = logits.topk(2, -1)
            margins = (top.values[:, 0] - top.values[:, 1]).tolist()
            picks = top.indices[:, 0].tolist()
            for pick, token, margin in zip(picks, tokens, margins, strict=True):
                compared += 1
                wrong += pick != token
                wide += margin > MARGIN
                wide_wrong += margin > MARGIN and pick != token
    report = {"tokens": compared, "differ": wrong, "wide": wide, "wide_differ": wide_wrong}
    return report, logits[-1].cpu().numpy()


def prompts_of(name: str) -> tuple[LlamaConfig, dict[str, WeightSource], Sequence[list[int]]]:
    """Config, weights and prompts of a model by name."""
    if name == "random":
        config = shapes.SMOLLM2_135M
        rng = np.random.default_rng(0)
        prompts = [[int(t) for t in rng.integers(0, config.vocab, 12)] for _ in PROMPTS]
        return config, made_up.weights(config), prompts
    model = load_model(name)
    assert model.tokenizer is not None
    assert isinstance(model.config, LlamaConfig)
    return model.config, dict(model.weights), [model.tokenizer.encode(p) for p in PROMPTS]


def main() -> int:
    """Run and compare under each kind of edge. Returns: exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random")
    parser.add_argument("--edges", default="payload,counter")
    parser.add_argument("--policy", default="static")
    options = parser.parse_args()
    config, sources, prompts = prompts_of(options.model)
    result: dict[str, Any] = {"model": options.model}
    for edges in options.edges.split(","):
        graph = build(config, sources, rows=16, context=1024, kv_dtype="bf16", weight_dtype="bf16")
        sequences: Sequences = []
        with Runtime("cuda:0", edges=edges, policy=options.policy) as runtime:
            for prompt in prompts:
                request = runtime.submit(graph, prompt, max_tokens=TOKENS, ignore_eos=True)
                sequences.append((prompt, [int(t) for t in request]))
            logits = runtime.read(graph, "logits")[0]
        report, want = compare(config, sources, sequences)
        error = float(np.linalg.norm(logits - want) / np.linalg.norm(want))
        result[edges] = {**report, "logits_relative_error": error}
        print(edges, result[edges], flush=True)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
