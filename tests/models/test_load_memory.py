"""Loading streams: beside the packed weights there are never more than two layers in memory.

Counted are numpy's own allocations (tracemalloc): arenas and the mapped checkpoint are none of
them, so the peak is exactly what loading takes beyond the packed size.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from gpurt.bench import made_up
from gpurt.bench.shapes import MUSE_SPARK, muse_layers
from gpurt.body import Target
from gpurt.executors import host
from gpurt.executors.base import Options
from gpurt.executors.contents import contents_of
from gpurt.graphs.muse_spark import build
from gpurt.loaders.safetensors_file import read_folder
from gpurt.planner import plan
from tests.helpers.tiny import write_sharded

LAYERS = 6
SMALL = replace(
    muse_layers(MUSE_SPARK, 1, LAYERS),
    hidden=256,
    heads=16,
    kv_heads=2,
    vocab=512,
    context=256,
    experts=16,
    top_k=2,
    moe_hidden=256,
    moe_intermediate=256,
)
GPU = Target("cuda", 4, 16, "sm_90a", 232448, 60 << 20)


@pytest.fixture(scope="module", params=["nvfp4", "bf16"])
def checkpoint(request, tmp_path_factory):
    """(config, weights) of a folder of shards, a layer each or less."""
    config = SMALL if request.param == "nvfp4" else replace(SMALL, quantised=frozenset())
    folder = tmp_path_factory.mktemp(request.param)
    write_sharded(folder, made_up.weights(config), 2 << 20)
    found = read_folder(folder)
    return config, {name: found[name] for name in config.tensors()}


def layer_bytes(made):
    own = [b for b in made.buffers if b.name.startswith("layers[2].") and b.role == "weight"]
    return sum(b.size_bytes for b in own)


def peak_of(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_host_loads_within_two_layers_of_the_packed_size(checkpoint):
    config, weights = checkpoint
    graph = build(config, weights, rows=1, context=64)
    made = plan(graph, Target("host", 1))
    options = Options(workers=1, trace=False)
    assert peak_of(lambda: host.load(made, graph, options).close()) < 2 * layer_bytes(made)


def test_packing_for_a_gpu_stays_within_two_layers(checkpoint):
    config, weights = checkpoint
    graph = build(config, weights, rows=1, context=64, kv_dtype="bf16", weight_dtype="bf16")
    made = plan(graph, GPU)

    def upload():
        contents = contents_of(made, graph)
        for buffer in made.buffers:
            if buffer.memory == "weight":
                contents.take(buffer)

    assert peak_of(upload) < 2 * layer_bytes(made)


def test_a_load_that_keeps_what_it_read_is_seen(checkpoint):
    config, weights = checkpoint
    graph = build(config, weights, rows=1, context=64)
    made, kept = plan(graph, Target("host", 1)), []
    sources = {b.name: b.source for b in graph.buffers if b.role == "weight"}
    peak = peak_of(lambda: kept.extend(source().copy() for source in sources.values()))
    assert peak > 2 * layer_bytes(made), "the bound can be missed"
