"""A Llama on the GPU: tokens per second beside torch in a CUDA graph, and parity with transformers.

The same bf16 weights in both. The peer captures one whole decode step in a CUDA graph: static
cache, every operation of torch's own, greedy choice, position and token fed back on the device;
then it is replayed without a host action between steps. Parity: transformers in float32 on the
bf16-rounded weights, teacher-forced over our tokens.

    python tools/bench/smollm2_gpu.py --model smollm2|FILE.gguf|DIR|random   # last line is JSON

`random`: SmolLM2-135M's shape with random weights, for a machine without the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
import torch

from gpurt.buffer import DTYPES
from gpurt.graphs.llama import LlamaConfig, build, rope_table
from gpurt.graphs.ops.dtypes import to_bf16, to_float32
from gpurt.loaders import WeightSource, load_model
from gpurt.runtime import Runtime
from gpurt.trace import analysis

SMOLLM2 = LlamaConfig(
    architecture="llama",
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    vocab=49152,
    eps=1e-5,
    rope_theta=100000.0,
    context=8192,
    tied=True,
)
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


def random_weights(config: LlamaConfig) -> dict[str, WeightSource]:
    """Values with which activations stay of order one."""
    weights = {}
    for index, (name, shape) in enumerate(config.tensors().items()):

        def load(shape: tuple[int, ...] = shape, seed: int = index) -> Any:
            values = np.random.default_rng(seed).standard_normal(shape, np.float32)
            return 1 + 0.1 * values if len(shape) == 1 else values / np.sqrt(shape[-1])

        weights[name] = WeightSource(name, DTYPES["f32"], shape, load)
    return weights


def rounded(source: WeightSource) -> torch.Tensor:
    """A weight as bf16 on the GPU, rounded as gpurt rounds it."""
    values = to_float32(source.load(), source.dtype)
    bits = torch.from_numpy(to_bf16(values).view(np.int16).copy())
    return bits.view(torch.bfloat16).cuda()


class Peer:
    """The model in torch: one decode step, captured whole."""

    def __init__(self, config: LlamaConfig, weights: dict[str, torch.Tensor], context: int) -> None:
        self.config, self.weights = config, weights
        shape = (config.layers, 2, config.kv_heads, context, config.head_dim)
        self.cache = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        self.rope = torch.from_numpy(rope_table(config, context)).cuda()
        self.token = torch.zeros(1, dtype=torch.long, device="cuda")
        self.position = torch.zeros(1, dtype=torch.long, device="cuda")
        self.columns = torch.arange(context, device="cuda")
        self.history = torch.zeros(context + 1, dtype=torch.long, device="cuda")
        self.fused = [self._fuse(layer) for layer in range(config.layers)]

    def _fuse(self, layer: int) -> dict[str, torch.Tensor]:
        at = f"model.layers.{layer}."
        w = {n.removeprefix(at): t for n, t in self.weights.items() if n.startswith(at)}
        qkv = [w[f"self_attn.{n}_proj.weight"] for n in "qkv"]
        gate_up = [w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"]]
        return w | {"qkv": torch.cat(qkv), "gate_up": torch.cat(gate_up)}

    def step(self) -> None:
        """One token at `position`; writes the next token and position."""
        config, functional = self.config, torch.nn.functional
        x = self.weights["model.embed_tokens.weight"][self.token]
        angles = self.rope[self.position].to(torch.bfloat16)
        half = config.head_dim // 2
        cos, sin = angles[:, :half], angles[:, half:]
        mask = (self.columns <= self.position).view(1, 1, 1, -1)
        for layer, w in enumerate(self.fused):
            normed = self.norm(x, w["input_layernorm.weight"])
            qkv = functional.linear(normed, w["qkv"]).view(-1, config.head_dim)
            heads = config.heads + config.kv_heads
            low, high = qkv[:heads, :half], qkv[:heads, half:]
            turned = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
            keys, values = self.cache[layer, 0], self.cache[layer, 1]
            keys.index_copy_(1, self.position, turned[config.heads :, None])
            values.index_copy_(1, self.position, qkv[heads:, None])
            out = functional.scaled_dot_product_attention(
                turned[None, : config.heads, None],
                keys[None],
                values[None],
                attn_mask=mask,
                enable_gqa=True,
            )
            x = x + functional.linear(out.reshape(1, -1), w["self_attn.o_proj.weight"])
            normed = self.norm(x, w["post_attention_layernorm.weight"])
            gate, up = functional.linear(normed, w["gate_up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, w["mlp.down_proj.weight"])
        x = self.norm(x, self.weights["model.norm.weight"])
        name = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
        logits = functional.linear(x, self.weights[name])
        self.token.copy_(logits.argmax(-1))
        self.position.add_(1)
        self.history.index_copy_(0, self.position, self.token)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm."""
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, self.config.eps)

    def tokens_per_second(self, start: int, count: int, repeats: int = 5) -> float:
        """Median over `repeats` of `count` captured steps from position `start`."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self.position.fill_(start)
            for _ in range(3):
                self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        rates = []
        for _ in range(repeats):
            self.position.fill_(start)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                graph.replay()
            torch.cuda.synchronize()
            rates.append(count / (time.perf_counter() - begin))
        return float(np.median(rates))


def ours(runtime: Runtime, graph: Any, prompt: list[int], count: int) -> dict[str, float]:
    """Median decode rate of five requests, and the launches they took."""
    rates, first, launches = [], [], runtime.launches
    for _ in range(5):
        request = runtime.submit(graph, prompt, max_tokens=count, ignore_eos=True)
        request.result()
        timing = request.stats
        rates.append(float(timing.tokens_per_second or 0.0))
        first.append(float(timing.time_to_first_token_ms or 0.0))
    return {
        "tokens_per_s": float(np.median(rates)),
        "first_token_ms": float(np.median(first)),
        "launches": runtime.launches - launches,
    }


def parity(config: LlamaConfig, weights: Any, sequences: list[tuple[list[int], list[int]]]) -> Any:
    """Compare our tokens with transformers' argmax, teacher-forced, by margin."""
    from transformers import LlamaConfig as PeerConfig
    from transformers import LlamaForCausalLM

    peer_config = PeerConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.eps,
        rope_theta=config.rope_theta,
        max_position_embeddings=config.context,
        tie_word_embeddings=config.tied,
    )
    peer_config.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_theta}
    model = LlamaForCausalLM(peer_config).float().eval()
    state = {n: w.float() for n, w in weights.items()}
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys, missing
    model.cuda()
    compared = wrong = wide = wide_wrong = 0
    rows = []
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
            rows.append(logits[-1].cpu().numpy())
    report = {"tokens": compared, "differ": wrong, "wide": wide, "wide_differ": wide_wrong}
    return report, rows


def main() -> int:
    """Measure, compare, print. Returns: exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--edges", default="payload,counter")
    parser.add_argument("--policy", default="static")
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args()
    if options.model == "random":
        config, sources = SMOLLM2, random_weights(SMOLLM2)
        prompts = [
            [int(t) for t in np.random.default_rng(i).integers(0, 49152, 12)] for i in range(10)
        ]
    else:
        model = load_model(options.model)
        config, sources = model.config, dict(model.weights)
        assert model.tokenizer is not None
        prompts = [model.tokenizer.encode(p) for p in PROMPTS]
    weights = {name: rounded(source) for name, source in sources.items()}
    start = len(prompts[0])
    result: dict[str, Any] = {"model": options.model}
    for edges in options.edges.split(","):
        graph = build(
            config, sources, rows=16, context=options.context, kv_dtype="bf16", weight_dtype="bf16"
        )
        with Runtime("cuda:0", edges=edges, policy=options.policy) as runtime:
            runtime.prepare(graph)
            sequences = []
            for prompt in prompts:
                request = runtime.submit(graph, prompt, max_tokens=64, ignore_eos=True)
                sequences.append((prompt, [int(t) for t in request]))
            logits = runtime.read(graph, "logits")[0]
            result[edges] = ours(runtime, graph, prompts[0], options.tokens)
            summary = request_shape(runtime, graph, prompts[0], options.tokens)
            result[edges].update(summary)
        result[edges]["parity"], rows = parity(config, weights, sequences)
        error = np.linalg.norm(logits - rows[-1]) / np.linalg.norm(rows[-1])
        result[edges]["logits_relative_error"] = float(error)
        print(edges, result[edges], flush=True)
    peer = Peer(config, weights, options.context)
    result["torch_cuda_graph_tokens_per_s"] = peer.tokens_per_second(start, options.tokens)
    peer = Peer(config, weights, 320)
    result["torch_cuda_graph_tokens_per_s_context_320"] = peer.tokens_per_second(
        start, min(options.tokens, 300 - start)
    )
    print(json.dumps(result))
    return 0


def request_shape(runtime: Runtime, graph: Any, prompt: list[int], count: int) -> dict[str, Any]:
    """Step times at short and long positions; what each operator adds to a late step's critical
    path, and its tasks' median run, in microseconds.
    """
    request = runtime.submit(graph, prompt, max_tokens=count, ignore_eos=True)
    request.result()
    trace = request.trace()
    times = analysis.step_times_us(trace, "decode")
    path = analysis.critical_path(trace, analysis.typical_step(trace))
    ends = analysis.end_ns(path).astype(np.int64)
    keys = [analysis.operator_key(trace.operators[int(s["op"])].path, trace.name) for s in path]
    added: dict[str, float] = {}
    for key, gained in zip(keys[1:], np.diff(ends) / 1e3, strict=True):
        added[key] = round(added.get(key, 0.0) + float(gained), 1)
    rows = analysis.operators(trace)
    return {
        "step_us_first": float(np.median(times[:32])),
        "step_us_last": float(np.median(times[-32:])),
        "path_us": dict(sorted(added.items(), key=lambda item: -item[1])),
        "task_us": {row.name: round(row.task_us, 2) for row in rows},
    }


if __name__ == "__main__":
    sys.exit(main())
