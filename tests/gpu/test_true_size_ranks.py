"""Layers at their true width over two GPUs against one, with made-up weights.

Llama's one-GPU plan can add the shares of two ranks in their order: then every bit is equal. Muse
Spark's adds each row of a matrix in one go, so its sums differ in their last bits, and bf16 and a
router that nearly ties make more of that: what is held is how far rows go apart that chose the same
experts, and that another token comes only where one GPU's two best logits nearly tie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt.bench import made_up
from gpurt.bench.phases import Phases
from gpurt.bench.shapes import LLAMA_8B, MUSE_SPARK, llama_layers, muse_layers
from gpurt.doctor import probe_cuda
from gpurt.graph import Graph
from gpurt.graphs import llama, muse_spark
from gpurt.graphs.ops.route import RoutesLayout
from gpurt.ranks import group
from gpurt.runtime import Runtime

pytestmark = [
    pytest.mark.skipif(not probe_cuda(1).usable, reason="needs two GPUs"),
    pytest.mark.timeout(300),
]

ONE, TWO = ["cuda:0"], ["cuda:0", "cuda:1"]
BF16 = {"kv_dtype": "bf16", "weight_dtype": "bf16"}
LLAMA = llama_layers(LLAMA_8B, 2)
# One layer with NVFP4 experts, 7.2 GB of them; the head is the other test's.
MUSE = replace(muse_layers(MUSE_SPARK, 2, 1), vocab=4096)
ROWS, STEPS = 16, 24
TOLERANCE = 2e-3  # of all rows; against torch, which rounds elsewhere, a layer has 1e-2
SAME_CHOICE = 0.97  # of all rows, those that choose the same experts
LEAST_MARGIN = 0.02  # in deviations of a row's logits


def test_llama_over_two_gpus_has_the_bits_of_one() -> None:
    build = partial(llama.build, LLAMA, made_up.weights(LLAMA), rows=ROWS, context=256, **BF16)
    prompt = np.random.default_rng(4).integers(0, LLAMA.vocab, 40).tolist()
    with Runtime(ONE[0]) as runtime:
        one = build(parts=2)
        wanted = runtime.submit(one, prompt, max_tokens=32, ignore_eos=True).result().token_ids
        logits = runtime.read(one, "logits")[0]
    with Runtime(TWO) as runtime:
        two = group([build(tp_size=2, tp_rank=rank) for rank in range(2)])
        for _ in range(3):
            request = runtime.submit(two, prompt, max_tokens=32, ignore_eos=True)
            assert request.result().token_ids == wanted
        for seen in of_ranks(runtime, two, "logits.all"):
            assert np.array_equal(seen[0], logits)
    assert np.isfinite(logits).all()
    assert wanted[-1] == logits.argmax()


def test_a_muse_spark_layer_over_two_gpus_is_that_of_one() -> None:
    build = partial(
        muse_spark.build, MUSE, made_up.weights(MUSE), rows=ROWS, context=ROWS * STEPS + 1, **BF16
    )
    one, two = run(ONE, build()), run(TWO, group([build(tp_size=2, tp_rank=r) for r in range(2)]))
    check(one, two)


# ---- helpers -------------------------------------------------------------------------------------
@dataclass
class Run:
    """A row a position: the stream after the layer, its experts in ascending order; a row a step:
    the last row's logits, and the token.
    """

    stream: NDArray[np.float32]
    chosen: NDArray[np.int64]
    logits: NDArray[np.float32]
    tokens: list[int]


def run(devices: list[str], graph: Graph) -> Run:
    """Feed a prompt, `ROWS` of it a step, whatever tokens come."""
    prompt = np.random.default_rng(3).integers(0, graph.vocab, STEPS * ROWS).tolist()
    phases, parts, tokens, last = Phases("true size", lambda *_: None), [], [], None
    device = devices if len(devices) > 1 else devices[0]
    with Runtime(device, policy={"expert_matvec": "claim"}) as runtime:
        runtime.prepare(graph, progress=phases)
        phases("running", 0, 1)
        names = ["layers[0].s", "layers[0].routes", "logits" + ".all" * (len(devices) > 1)]
        for end in range(ROWS, len(prompt) + 1, ROWS):
            last = runtime.submit(graph, prompt[:end], max_tokens=1, ignore_eos=True, after=last)
            tokens += last.result().token_ids
            assert last.stats.cached_tokens == end - ROWS
            parts.append([runtime.read(graph, name) for name in names])
        for name in names:
            rows = 1 if name.startswith("logits") else None  # of the last step's one sampled row
            first, *others = (one[:rows] for one in of_ranks(runtime, graph, name))
            assert all(np.array_equal(first, other) for other in others), name
    print(phases.note())
    streams, routes, logits = zip(*parts, strict=True)
    chosen = np.concatenate([choices(one) for one in routes])
    return Run(np.concatenate(streams), chosen, np.stack([one[0] for one in logits]), tokens)


def of_ranks(runtime: Runtime, graph: Graph, name: str) -> Iterator[NDArray[Any]]:
    """A buffer of each rank: all have ended the step, and made the same bits."""
    runtime.park()
    session = runtime._find(graph)
    assert session is not None
    for rank in session.executor.ranks:
        yield rank.read(name)


def choices(routes: NDArray[Any]) -> NDArray[np.int64]:
    """The experts of every row of a step."""
    top_k, layout = MUSE.top_k, RoutesLayout(ROWS, MUSE.experts, MUSE.top_k)
    of_pair = layout.pair(0) + 2 * np.arange(ROWS * top_k)
    routes = routes.astype(np.int64)
    slots = layout.slot(0) + routes[of_pair] * (layout.slot(1) - layout.slot(0))
    return routes[slots].reshape(ROWS, top_k)


def check(one: Run, two: Run) -> None:
    same = (one.chosen == two.chosen).all(axis=1)
    off = np.linalg.norm((two.stream - one.stream)[same]) / np.linalg.norm(one.stream[same])
    best = np.sort(one.logits, axis=1)[:, -2:]
    margins = (best[:, 1] - best[:, 0]) / one.logits.std(axis=1)
    others = [step for step in range(STEPS) if one.tokens[step] != two.tokens[step]]
    print(
        f"stream {off:.1e} apart, experts the same in {same.mean():.3f} of rows"
        f", {len(others)} of {STEPS} tokens differ, margins {margins.min():.3f} and more"
    )
    assert same.mean() >= SAME_CHOICE
    assert off < TOLERANCE
    assert all(margins[step] < LEAST_MARGIN for step in others)
    assert np.median(margins) > LEAST_MARGIN, "tokens say something"
    assert np.array_equal(one.tokens, one.logits.argmax(axis=1))
