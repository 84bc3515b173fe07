"""Peers: who else runs the same case on this machine. Each is optional and says why it is absent.

Their code is in gpurt/graphs/reference (torch), or programs and packages of others (llama.cpp,
transformers, flashinfer). Importing this module imports none of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from gpurt.bench.case import Side, Workload
from gpurt.bench.machine import Machine, UnavailableError

_LLAMA_BENCH = "llama-bench"
_HOST_TOKENS = 96


class Peer:
    """A Side with nothing to leave and nothing to say."""

    def measure(self) -> float:
        """One figure."""
        raise NotImplementedError

    def rest(self) -> None:
        """It holds no device between figures."""

    def note(self) -> str:
        """Nothing."""
        return ""

    def close(self) -> None:
        """Python frees it."""


def torch_eager(machine: Machine, workload: Workload) -> Side:
    """Torch's own operators, one decode step in one CUDA graph."""
    return _TorchDecode(machine, workload, compiled=False)


def torch_compiled(machine: Machine, workload: Workload) -> Side:
    """torch.compile, one decode step in one CUDA graph."""
    return _TorchDecode(machine, workload, compiled=True)


def torch_prefill(machine: Machine, workload: Workload) -> Side:
    """torch.compile over the whole prompt in one pass, in one CUDA graph."""
    return _TorchPrefill(machine, workload)


def torch_chain(machine: Machine, workload: Workload) -> Side:
    """Layers y = W x by torch.mm, all in one CUDA graph."""
    return _TorchChain(machine, workload)


def torch_attention(machine: Machine, workload: Workload) -> Side:
    """One query a head over keys and values of a layer, torch's SDPA, layers in one CUDA graph."""
    torch = _torch(machine)

    def attend(q: Any, k: Any, v: Any) -> Any:
        product = torch.nn.functional.scaled_dot_product_attention
        return product(q[None, :, None], k[None], v[None], enable_gqa=True)

    return _Attention(machine, workload, attend)


def flashinfer_attention(machine: Machine, workload: Workload) -> Side:
    """The same by flashinfer's single decode."""
    if importlib.util.find_spec("flashinfer") is None:
        raise UnavailableError("flashinfer is not installed")
    decode = importlib.import_module("flashinfer").single_decode_with_kv_cache
    return _Attention(machine, workload, lambda q, k, v: decode(q, k, v, kv_layout="HND"))


def llama_cpp_gpu(machine: Machine, workload: Workload) -> Side:
    """llama.cpp with CUDA on the same GGUF, through llama-bench."""
    del machine
    return _LlamaBench(workload, ["-ngl", "99", "-d", str(workload.step["position"])])


def llama_cpp_host(machine: Machine, workload: Workload) -> Side:
    """llama.cpp on the same GGUF and threads: llama-bench on PATH, or the llama_cpp package."""
    threads = machine.target.workers
    if shutil.which(_LLAMA_BENCH) is not None:
        return _LlamaBench(workload, ["-ngl", "0", "-t", str(threads)])
    return _LlamaPackage(workload, threads)


def transformers_host(machine: Machine, workload: Workload) -> Side:
    """LlamaForCausalLM in bf16 on the same threads."""
    return _Transformers(workload, machine.target.workers)


# ---- torch -----------------------------------------------------------------------------------
class TorchPeer(Peer):
    """Frees torch's cache when it is closed."""

    def __init__(self, machine: Machine) -> None:
        """Raises: UnavailableError without torch, or if it sees no GPU."""
        self.torch = _torch(machine)

    def close(self) -> None:
        """Drop all tensors."""
        self.__dict__ = {"torch": self.torch}
        self.torch.cuda.empty_cache()


class _TorchDecode(TorchPeer):
    def __init__(self, machine: Machine, workload: Workload, *, compiled: bool) -> None:
        super().__init__(machine)
        decode = reference("decode")
        step = workload.step
        self.position, self.tokens, self.rate = step["position"], step["tokens"], step.get("rate")
        self.model = decode.Decoder(workload.config, step["context"])
        if compiled:
            self.model.compile()
        self.graph = captured(self.torch, self.model.step)
        self.measure()

    def measure(self) -> float:
        self.model.position.fill_(self.position - self.tokens // 2)  # its steps lie around it
        us = replay_us(self.torch, self.graph, self.tokens)
        return 1e6 / us if self.rate else us


class _TorchPrefill(TorchPeer):
    def __init__(self, machine: Machine, workload: Workload) -> None:
        super().__init__(machine)
        count = workload.step["position"]
        self.model = reference("decode").Decoder(workload.config, workload.step["context"])
        self.model.compile()
        self.tokens = self.torch.zeros(count, dtype=self.torch.long, device="cuda")
        self.graph = captured(self.torch, lambda: self.model.prefill(self.tokens))

    def measure(self) -> float:
        return replay_us(self.torch, self.graph, 1)


class _TorchChain(TorchPeer):
    def __init__(self, machine: Machine, workload: Workload) -> None:
        super().__init__(machine)
        torch, step = self.torch, workload.step
        layers, k, rows = step["layers"], step["k"], step["rows"]
        self.layers = layers
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        w = [torch.empty(k, k, **options).normal_(0, k**-0.5) for _ in range(layers)]
        x = torch.randn(k, rows, **options)

        def run() -> Any:
            y = x
            for matrix in w:
                y = matrix @ y
            return y

        self.graph = captured(torch, run)
        self.kept = w, x

    def measure(self) -> float:
        return replay_us(self.torch, self.graph, 8) / self.layers


class _Attention(TorchPeer):
    def __init__(self, machine: Machine, workload: Workload, attend: Any) -> None:
        super().__init__(machine)
        torch, config, keys = self.torch, workload.config, workload.step["position"] + 1
        self.layers = config.layers
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        q = torch.randn(config.heads, config.head_dim, **options)
        shape = (self.layers, 2, config.kv_heads, keys, config.head_dim)
        cache = torch.randn(shape, **options)

        def run() -> Any:
            return [attend(q, *layer) for layer in cache]

        self.graph = captured(torch, run)
        self.kept = q, cache
        self.measure()

    def measure(self) -> float:
        return float(replay_us(self.torch, self.graph, 8) / self.layers)


def captured(torch: Any, run: Any) -> Any:
    """`run` as a CUDA graph, after two runs on a side stream."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        run()
    return graph


def replay_us(torch: Any, graph: Any, count: int) -> float:
    """Microseconds of one replay."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e6 / count


def _torch(machine: Machine) -> Any:
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError("torch is not installed")
    torch = importlib.import_module("torch")
    if machine.kind == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(f"torch {torch.__version__} sees no GPU")
    return torch


def reference(name: str) -> Any:
    """A module of gpurt/graphs/reference, which imports torch."""
    return importlib.import_module(f"gpurt.graphs.reference.{name}")


# ---- llama.cpp -------------------------------------------------------------------------------
class _LlamaBench(Peer):
    def __init__(self, workload: Workload, options: list[str]) -> None:
        program = shutil.which(_LLAMA_BENCH)
        if program is None:
            raise UnavailableError(f"{_LLAMA_BENCH} is not on PATH")
        tokens = str(workload.step["tokens"])
        self.command = [program, "-m", str(_model_file()), "-p", "0", "-n", tokens, "-r", "1"]
        self.command += [*options, "-o", "json"]

    def measure(self) -> float:
        done = subprocess.run(self.command, check=True, capture_output=True, text=True, timeout=300)
        return float(json.loads(done.stdout)[-1]["avg_ts"])


class _LlamaPackage(Peer):
    def __init__(self, workload: Workload, threads: int) -> None:
        if importlib.util.find_spec("llama_cpp") is None:
            raise UnavailableError(f"no {_LLAMA_BENCH} on PATH and no llama_cpp package")
        package = importlib.import_module("llama_cpp")
        self.tokens, self.prompt = workload.step["tokens"], _prompt(workload)
        path = str(_model_file())
        self.model = package.Llama(path, n_ctx=1024, n_threads=threads, verbose=False)

    def measure(self) -> float:
        self.model.reset()
        stream = self.model.generate(self.prompt, temp=0.0)
        next(stream)
        began = time.perf_counter()
        for _ in range(self.tokens - 1):
            next(stream)
        return (self.tokens - 1) / (time.perf_counter() - began)


class _Transformers(Peer):
    def __init__(self, workload: Workload, threads: int) -> None:
        for name in ("torch", "transformers"):
            if importlib.util.find_spec(name) is None:
                raise UnavailableError(f"{name} is not installed")
        from gpurt.loaders import load_model

        peer = reference("transformers_llama")
        self.tokens, self.prompt = workload.step["tokens"], _prompt(workload)
        model = load_model(str(_model_file()))
        self.model = peer.Llama(model.config, model.weights, threads=threads, dtype="bfloat16")
        self.model.decode(self.prompt, 4)

    def measure(self) -> float:
        return float(self.model.decode(self.prompt, self.tokens))


def _prompt(workload: Workload) -> list[int]:
    from gpurt.bench.ours import prompt_ids

    return prompt_ids(workload.step["position"], workload.step["tokens"], workload.config.vocab)


def _model_file() -> Path:
    from gpurt.errors import ModelError
    from gpurt.loaders.smollm2 import smollm2_path

    try:
        return smollm2_path(fetch=False)
    except ModelError as error:
        raise UnavailableError(str(error)) from error
