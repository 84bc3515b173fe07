"""Tiny random Hugging Face folders on host threads against transformers in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpurt.graphs.llama import build
from gpurt.loaders import load_model
from gpurt.runtime import Runtime
from tests.helpers.checkpoints import make_model, save_model
from tests.helpers.parity import compare

pytestmark = [
    pytest.mark.reference,
    # the older name of the argument works in every version that the project allows
    pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning"),
]

TOKENS = 32
CASES = {
    "llama": ("llama", {}, "float32"),
    "llama-bf16": ("llama", {"num_hidden_layers": 3}, "bfloat16"),
    "llama-fp16-tied": ("llama", {"tie_word_embeddings": True}, "float16"),
    "llama-wide-heads": ("llama", {"head_dim": 20, "num_key_value_heads": 1}, "float32"),
    "qwen3": ("qwen3", {"head_dim": 16}, "float32"),
    "qwen3-bf16": ("qwen3", {"head_dim": 24, "num_key_value_heads": 4}, "bfloat16"),
}


def greedy(model, prompt, count):
    """(tokens, margins, logits of every position) of transformers."""
    tokens, margins, rows = [], [], []
    feed, cache = prompt, None
    with torch.no_grad():
        for _ in range(count):
            out = model(torch.tensor([feed]), past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[0, -1]
            best = logits.topk(2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            rows.append(logits.numpy())
            feed = tokens[-1:]
    return tokens, margins, rows


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logits_equal_transformers(case, tmp_path):
    model_type, changes, dtype = CASES[case]
    reference = save_model(make_model(model_type, **changes), tmp_path, dtype, shard="60KB")
    model = load_model(tmp_path)
    graph = build(model.config, model.weights, context=128)
    prompts = [[5], list(range(7, 40)), [3] * 16]
    # all of torch's work first: its threads and the workers would fight for the cores
    references = [greedy(reference, prompt, TOKENS) for prompt in prompts]
    with Runtime("host", workers=2) as runtime:
        for prompt, (wanted, margins, rows) in zip(prompts, references, strict=True):
            seen = list(runtime.submit(graph, prompt, max_tokens=TOKENS, ignore_eos=True))
            report = compare(seen, wanted, margins)
            assert report.holds(0.02), f"prompt of {len(prompt)}: {report}"
            for position in (0, 1, TOKENS - 1):
                list(runtime.submit(graph, prompt + wanted[:position], max_tokens=1))
                logits = runtime.read(graph, "logits")[0]
                error = np.abs(logits - rows[position]).max() / np.abs(rows[position]).max()
                assert error < 1e-3


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16"])
def test_a_half_precision_cache_keeps_tokens_where_the_margin_is_wide(kv_dtype, tmp_path):
    reference = save_model(make_model("llama"), tmp_path)
    model = load_model(tmp_path)
    graph = build(model.config, model.weights, context=128, kv_dtype=kv_dtype)
    wanted, margins, _ = greedy(reference, [1, 2, 3, 4], TOKENS)
    with Runtime("host", workers=2) as runtime:
        seen = list(runtime.submit(graph, [1, 2, 3, 4], max_tokens=TOKENS, ignore_eos=True))
    assert compare(seen, wanted, margins).holds(0.25)


@pytest.mark.parametrize("weight_dtype", ["bf16", "f16"])
def test_weights_converted_at_load_equal_transformers_on_rounded_matrices(weight_dtype, tmp_path):
    reference = save_model(make_model("llama"), tmp_path)
    half = {"bf16": torch.bfloat16, "f16": torch.float16}[weight_dtype]
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim == 2:  # norms stay float32
                parameter.copy_(parameter.to(half).float())
    wanted, margins, _ = greedy(reference, [9, 8, 7], TOKENS)
    model = load_model(tmp_path)
    graph = build(model.config, model.weights, context=64, weight_dtype=weight_dtype)
    with Runtime("host", workers=1) as runtime:
        seen = list(runtime.submit(graph, [9, 8, 7], max_tokens=TOKENS, ignore_eos=True))
    assert compare(seen, wanted, margins).holds(0.02)
