"""SmolLM2 on this machine's CPU: our tokens per second beside transformers and llama.cpp.

    python tools/bench/smollm2_host.py [--tokens 128] [--rounds 3] [--threads N]

The same prompt and cores, in turn, several rounds; medians are printed. transformers runs the
dequantised weights in bf16 with its own cache; llama.cpp runs the same GGUF through `llama-bench`
on PATH or the `llama_cpp` package, where present. Tracing is on, and off in a case of its own: the
two differ by what it costs. The floor is the bytes of all weights over a measured read bandwidth.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gpurt.graphs.llama import build  # noqa: E402
from gpurt.graphs.ops.dtypes import to_float32  # noqa: E402
from gpurt.loaders import load_model  # noqa: E402
from gpurt.loaders.model import Model  # noqa: E402
from gpurt.loaders.smollm2 import smollm2_path  # noqa: E402
from gpurt.runtime import Runtime  # noqa: E402

PROMPT = "Explain in two sentences why the sky is blue."


def read_bandwidth(threads: int) -> float:
    """Bytes a second of summing 512 MB on all threads: what a step's weights can come in at."""
    torch.set_num_threads(threads)
    data = torch.ones(128 << 20)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - begin)
    return data.numel() * 4 / best


class Ours:
    """The resident runtime on CPU threads."""

    def __init__(self, model: Model, threads: int, *, trace: bool) -> None:
        self.graph = build(model.config, model.weights, rows=16, context=1024)
        self.runtime = Runtime("host", workers=threads, trace=trace, residency_ms=0)
        self.runtime.prepare(self.graph)
        self.weight_bytes = sum(b.size_bytes for b in self.graph.buffers if b.role == "weight")

    def decode(self, ids: list[int], tokens: int) -> float:
        """Tokens a second after the first one."""
        request = self.runtime.submit(self.graph, ids, max_tokens=tokens, ignore_eos=True)
        request.result()
        return float(request.stats.tokens_per_second)


class Transformers:
    """LlamaForCausalLM, greedy, with its dynamic cache."""

    def __init__(self, model: Model, threads: int, dtype: torch.dtype) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        c = model.config
        torch.set_num_threads(threads)
        config = LlamaConfig(
            vocab_size=c.vocab,
            hidden_size=c.hidden,
            intermediate_size=c.intermediate,
            num_hidden_layers=c.layers,
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            head_dim=c.head_dim,
            rms_norm_eps=c.eps,
            rope_theta=c.rope_theta,
            max_position_embeddings=c.context,
            tie_word_embeddings=c.tied,
        )
        self.net = LlamaForCausalLM(config)
        state = {
            name: torch.from_numpy(np.ascontiguousarray(to_float32(w.load(), w.dtype)))
            for name, w in model.weights.items()
        }
        self.net.load_state_dict(state, strict=False)
        self.net = self.net.to(dtype).eval()

    @torch.inference_mode()
    def decode(self, ids: list[int], tokens: int) -> float:
        """Tokens a second after the first one."""
        out = self.net(torch.tensor([ids]), use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        begin = time.perf_counter()
        for _ in range(tokens - 1):
            out = self.net(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        return (tokens - 1) / (time.perf_counter() - begin)


def llama_cpp(path: Path, threads: int) -> Callable[[list[int], int], float] | None:
    """llama.cpp's decode, if this machine has it."""
    bench = shutil.which("llama-bench")
    if bench:

        def by_bench(_: list[int], tokens: int) -> float:
            command = [bench, "-m", str(path), "-t", str(threads), "-p", "0", "-n", str(tokens)]
            done = subprocess.run(
                [*command, "-r", "1", "-o", "json"], check=True, capture_output=True, text=True
            )
            return float(json.loads(done.stdout)[0]["avg_ts"])

        return by_bench
    if importlib.util.find_spec("llama_cpp") is None:
        return None
    from llama_cpp import Llama

    peer = Llama(str(path), n_ctx=1024, n_threads=threads, logits_all=False, verbose=False)

    def by_package(ids: list[int], tokens: int) -> float:
        peer.reset()
        stream = peer.generate(ids, temp=0.0)
        next(stream)
        begin = time.perf_counter()
        for _ in range(tokens - 1):
            next(stream)
        return (tokens - 1) / (time.perf_counter() - begin)

    return by_package


def main() -> None:
    """Run every case in turn, then print medians and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    path = smollm2_path()
    model = load_model(str(path))
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(PROMPT)
    ours = Ours(model, options.threads, trace=True)
    untraced = Ours(model, options.threads, trace=False)
    peer = Transformers(model, options.threads, torch.bfloat16)
    cases: dict[str, Callable[[list[int], int], float]] = {
        "gpurt": ours.decode,
        "gpurt, trace off": untraced.decode,
        "transformers bf16": peer.decode,
    }
    native = llama_cpp(path, options.threads)
    if native is not None:
        cases["llama.cpp"] = native
    results: dict[str, list[float]] = {name: [] for name in cases}
    for name, decode in cases.items():
        decode(ids, 8)
        print(f"{name} is warm", file=sys.stderr)
    for _ in range(options.rounds):
        for name, decode in cases.items():
            results[name].append(decode(ids, options.tokens))
    report(results, ours.weight_bytes, read_bandwidth(options.threads), options.threads)


def report(
    results: dict[str, list[float]], weight_bytes: int, bandwidth: float, threads: int
) -> None:
    """One line a case, beside its ceiling; JSON last."""
    ceiling = bandwidth / weight_bytes
    medians = {name: statistics.median(values) for name, values in results.items()}
    for name, value in medians.items():
        ratio = medians["gpurt"] / value
        print(f"{name:20} {value:8.1f} tokens/s   gpurt is {ratio:5.2f} times this")
    print(
        f"ceiling {ceiling:.0f} tokens/s: {weight_bytes / 1e6:.1f} MB at {bandwidth / 1e9:.1f} GB/s"
    )
    line: dict[str, Any] = {"case": "smollm2-host", "threads": threads, "unit": "tok/s"}
    print(json.dumps({**line, "ceiling": ceiling, "medians": medians, "all": results}))


if __name__ == "__main__":
    main()
