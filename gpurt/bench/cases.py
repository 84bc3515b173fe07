"""Cases: the registry. Every case of the table by name: what runs, its bytes, who runs beside it.

`make(small=True)` is the same case at a size that tests can plan and run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from gpurt.bench import graphs, models, ours, peers, shapes
from gpurt.bench.case import Case, Side, Workload
from gpurt.bench.cases_muse import muse_cases
from gpurt.bench.cases_ranks import rank_cases
from gpurt.bench.cases_speedup import speedup_cases
from gpurt.bench.machine import Machine
from gpurt.bench.traffic import step_bytes
from gpurt.graphs.llama import LlamaConfig
from gpurt.graphs.qwen3_moe import Qwen3MoeConfig
from gpurt.serving import DEFAULT_ROWS

EAGER, COMPILED = "torch eager, CUDA graph", "torch.compile, CUDA graph"
_TORCH = {EAGER: peers.torch_eager, COMPILED: peers.torch_compiled}
_STAGE_COUNT, _STAGE_STEPS = 64, 16
_CHAIN_STEPS = 16
_TOKENS = 64


def all_cases() -> list[Case]:
    """Every case, in the order of the table."""
    return [
        *_chains(),
        _primitives(),
        _stream(),
        *_dispatch(),
        *_decoding(),
        *_attention(),
        *muse_cases(),
        *rank_cases(),
        *speedup_cases(),
        *_first_tokens(),
        *_serving(),
        _smollm2_host(),
    ]


def find(names: list[str]) -> list[Case]:
    """The named cases, all without a name. Raises: ConfigError for an unknown one."""
    from gpurt.errors import ConfigError

    known = {case.name: case for case in all_cases()}
    unknown = [name for name in names if name not in known]
    if unknown:
        msg = f"no case is named {', '.join(unknown)} - at --case"
        raise ConfigError(f"{msg} - gpurt bench --list names them")
    return [known[name] for name in dict.fromkeys(names)] if names else list(known.values())


# ---- chain, stages ---------------------------------------------------------------------------
def _chains() -> list[Case]:
    figures = {  # layers, columns; goal, prototype (one row)
        "134": (16, 8192, 30.0, 29.2),
        "33": (64, 4096, 8.8, 8.2),
        "8": (64, 2048, 2.7, 2.5),
        "2": (256, 1024, 1.45, 1.34),
    }
    cases = [
        _chain(name, layers, k, 1, goal, prototype)
        for name, (layers, k, goal, prototype) in figures.items()
    ]
    return [*cases, *(_chain(name, *figures[name][:2], 16, None, None) for name in ("134", "33"))]


def _chain(
    size: str, layers: int, k: int, rows: int, goal: float | None, prototype: float | None
) -> Case:
    def make(small: bool) -> Workload:
        count, width = (3, 64) if small else (layers, k)
        return Workload(
            graph=cache(lambda: graphs.chain(count, width, rows)),
            bytes_moved=lambda: 2 * width * width,
            settings={"edges": "payload"},
            step={"steps": _CHAIN_STEPS, "layers": count, "k": width, "rows": rows},
            per=count,
        )

    return Case(
        name=f"chain-{size}-r{rows}",
        measures=f"one of {layers} dependent layers y = W x, bf16 {k} x {k}, rows {rows}",
        kind="cuda",
        unit="us",
        make=make,
        ours=ours.Steps,
        peers={"torch.mm, CUDA graph": peers.torch_chain},
        goal=goal,
        prototype=prototype,
    )


def _dispatch() -> list[Case]:
    figures = {"static": (1.2, 0.95), "claim": (1.7, 1.38), "ready": (2.4, 2.02)}

    def case(policy: str, goal: float, prototype: float) -> Case:
        def make(small: bool) -> Workload:
            count, width = (4, 5) if small else (_STAGE_COUNT, 132)
            return Workload(
                graph=cache(lambda: graphs.stages(count, width)),
                bytes_moved=lambda: 0,
                settings={"policy": policy, "edges": "counter"},
                step={"steps": _STAGE_STEPS},
                per=count,
            )

        return Case(
            name=f"dispatch-{policy}",
            measures="a stage of 132 empty tasks, each needs the whole stage before",
            kind="cuda",
            unit="us",
            make=make,
            ours=ours.Steps,
            goal=goal,
            prototype=prototype,
        )

    return [case(policy, *figure) for policy, figure in figures.items()]


def _primitives() -> Case:
    def opened(machine: Machine, workload: Workload, progress: Any) -> Side:
        from gpurt.bench.primitives import Primitives

        return Primitives(machine, workload, progress)

    return Case(
        name="primitives",
        measures="a hop, relaxed store to relaxed load, other SM; the other primitives beside it",
        kind="cuda",
        unit="us",
        make=lambda small: Workload(None, lambda: 0, step={"small": int(small)}),
        ours=opened,
        prototype=0.33,
        rounds=3,
    )


def _stream() -> Case:
    def make(small: bool) -> Workload:
        count, width = (3, 64) if small else (32, 8192)
        build = cache(lambda: graphs.chain(count, width, dependent=False))
        return Workload(
            graph=build,
            bytes_moved=lambda: step_bytes(build()),
            step={"steps": _CHAIN_STEPS},
        )

    return Case(
        name="stream",
        measures="weights through the rings, no dependencies: 32 bf16 matrices of 8192 x 8192",
        kind="cuda",
        unit="GB/s",
        make=make,
        ours=ours.Bandwidth,
        prototype=4600.0,
    )


# ---- models ----------------------------------------------------------------------------------
def _decoding() -> list[Case]:
    smollm2 = _decode(
        "smollm2",
        shapes.SMOLLM2_135M,
        "SmolLM2-135M",
        unit="tok/s",
        further={"llama.cpp with CUDA, the same GGUF": peers.llama_cpp_gpu},
        load=models.smollm2_if_there,
    )
    eight = "Llama-3.1-8B's shape"
    return [
        smollm2,
        _decode("llama-1b", shapes.LLAMA_1B, "Llama-3.2-1B's shape", goal=700.0),
        _decode("llama-8b", shapes.LLAMA_8B, eight, goal=3900.0),
        _decode("llama-8b-8k", shapes.LLAMA_8B, eight, position=8192),
        _decode("llama-8b-64k", shapes.LLAMA_8B, eight, position=65536 - _TOKENS),
        _decode("qwen3-30b-a3b", shapes.QWEN3_30B_A3B, "Qwen3-30B-A3B's shape", rows=1),
    ]


def _decode(
    name: str,
    config: LlamaConfig,
    what: str,
    *,
    unit: str = "us",
    position: int = 512,
    rows: int = 16,
    goal: float | None = None,
    further: dict[str, Any] | None = None,
    load: Callable[[], Any] | None = None,
) -> Case:
    context = max(1024, -(-(position + _TOKENS) // 1024) * 1024)

    def make(small: bool) -> Workload:
        chosen = models.small_model(config) if small else config
        bound, at, tokens = (64, 32, 8) if small else (context, position, _TOKENS)
        weights = None if small or load is None else load
        build = cache(lambda: models.model_graph(chosen, rows=rows, context=bound, weights=weights))
        step = {"position": at, "tokens": tokens, "context": bound, "rate": int(unit == "tok/s")}
        return Workload(
            graph=build,
            bytes_moved=lambda: step_bytes(build(), position=at),
            step=step,
            config=chosen,
        )

    is_sparse = isinstance(config, Qwen3MoeConfig)
    return Case(
        name=name,
        measures=f"{what}, bf16, greedy, batch 1, at position {position} of {context}",
        kind="cuda",
        unit=unit,
        make=make,
        ours=ours.DecodeRate if unit == "tok/s" else ours.Decode,
        peers=_TORCH | (further or {}),
        goal=goal,
        beside=not is_sparse,
    )


def _attention() -> list[Case]:
    layers = 4

    def case(name: str, position: int) -> Case:
        def make(small: bool) -> Workload:
            config = shapes.llama_layers(shapes.LLAMA_8B, layers)
            config = models.small_model(config) if small else config
            at, tokens = (32, 8) if small else (position, _TOKENS)
            context = 64 if small else max(1024, -(-(position + _TOKENS) // 1024) * 1024)
            return Workload(
                graph=cache(lambda: models.model_graph(config, rows=16, context=context)),
                bytes_moved=lambda: 4 * (at + 1) * config.kv_heads * config.head_dim,
                step={"position": at, "tokens": tokens, "context": context},
                per=config.layers,
                config=config,
            )

        return Case(
            name=name,
            measures=f"attention of Llama-3.1-8B's shape at position {position}, bf16 cache: "
            "what a layer's adds to the critical path",
            kind="cuda",
            unit="us",
            make=make,
            ours=ours.AttentionPath,
            peers={
                "flashinfer, CUDA graph": peers.flashinfer_attention,
                "torch SDPA, CUDA graph": peers.torch_attention,
            },
        )

    figures = {"512": 512, "8k": 8192, "64k": 65536 - _TOKENS}
    return [case(f"attention-{name}", position) for name, position in figures.items()]


_PROMPT_ROWS = 512  # of a step: weights are read once for all of them


def _first_tokens() -> list[Case]:
    def case(count: int) -> Case:
        def make(small: bool) -> Workload:
            config = models.small_model(shapes.LLAMA_8B) if small else shapes.LLAMA_8B
            prompt, context = (24, 64) if small else (count, -(-(count + 1) // 1024) * 1024)
            # A long prompt's steps, beside the step that decodes.
            decode, rows = DEFAULT_ROWS["cuda"], 24 if small else _PROMPT_ROWS
            return Workload(
                graph=cache(lambda: models.model_graph(config, rows=rows, context=context)),
                bytes_moved=lambda: 0,
                settings={"step_rows": (decode, rows)},
                step={"position": prompt, "tokens": 1, "context": context},
                config=config,
            )

        return Case(
            name=f"ttft-{count}",
            measures=f"Llama-3.1-8B's shape, bf16: to the first token of a prompt of {count}",
            kind="cuda",
            unit="us",
            make=make,
            ours=ours.FirstToken,
            peers={"torch.compile, whole prompt, CUDA graph": peers.torch_prefill},
            rounds=3,
        )

    return [case(512), case(8192)]


def _serving() -> list[Case]:
    def make(config: LlamaConfig, tokens: int) -> Callable[[bool], Workload]:
        def workload(small: bool) -> Workload:
            chosen = models.small_model(config) if small else config
            context, count = (64, 16) if small else (4096, tokens)
            build = cache(lambda: models.model_graph(chosen, rows=16, context=context))
            step = {"position": count // 2 + 16, "tokens": count, "context": context}
            return Workload(
                graph=build,
                bytes_moved=lambda: step_bytes(build(), position=step["position"]),
                step=step,
                config=chosen,
            )

        return workload

    steady = Case(
        name="decode-p99",
        measures="99th percentile of 2,000 decode steps, Llama-3.1-8B's shape; asked: 1.05 medians",
        kind="cuda",
        unit="us",
        make=make(shapes.LLAMA_8B, 2000),
        ours=ours.Steady,
        rounds=1,
    )
    launches = Case(
        name="launches",
        measures="requests of 16 tokens to a resident kernel, SmolLM2's shape; asked: 0 launches",
        kind="cuda",
        unit="us",
        make=make(shapes.SMOLLM2_135M, 16),
        ours=ours.Launches,
        rounds=3,
    )
    return [steady, launches]


def _smollm2_host() -> Case:
    def make(small: bool) -> Workload:
        config = models.small_model(shapes.SMOLLM2_135M) if small else shapes.SMOLLM2_135M
        context, at, tokens = (64, 24, 8) if small else (1024, 64, 96)
        weights = None if small else models.smollm2
        build = cache(
            lambda: models.model_graph(config, rows=16, context=context, weights=weights, host=True)
        )
        return Workload(
            graph=build,
            bytes_moved=lambda: step_bytes(build(), position=at),
            step={"position": at, "tokens": tokens, "context": context},
            config=config,
        )

    return Case(
        name="smollm2-host",
        measures="SmolLM2-135M Q4_1 on CPU threads, greedy, batch 1",
        kind="host",
        unit="tok/s",
        make=make,
        ours=ours.DecodeRate,
        peers={"llama.cpp": peers.llama_cpp_host, "transformers, bf16": peers.transformers_host},
        rounds=3,
    )
