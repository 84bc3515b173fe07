"""Two GPUs as ranks of one model: the bits of one GPU that sums the same shares."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.buffer import DTYPES
from gpurt.doctor import probe_cuda
from gpurt.graphs.llama import build
from gpurt.loaders import WeightSource
from gpurt.ranks import group
from gpurt.runtime import Runtime
from tests.gpu.tiny_llama import CONFIG, Weights

pytestmark = [
    pytest.mark.skipif(not probe_cuda(1).usable, reason="needs two GPUs"),
    pytest.mark.timeout(300),
]

PROMPT = list(range(40, 60))


def weights():
    return {
        name: WeightSource(name, DTYPES["f32"], shape, Weights(shape, i).load)
        for i, (name, shape) in enumerate(CONFIG.tensors().items())
    }


def test_two_gpus_have_the_bits_of_one_and_repeat_them_fifty_times() -> None:
    options = {"rows": 16, "context": 256, "kv_dtype": "bf16", "weight_dtype": "bf16"}
    one = build(CONFIG, weights(), parts=2, **options)
    with Runtime("cuda:0") as runtime:
        wanted = list(runtime.submit(one, PROMPT, max_tokens=64, ignore_eos=True))
        logits = runtime.read(one, "logits")[0]
    graphs = [build(CONFIG, weights(), tp_size=2, tp_rank=r, **options) for r in range(2)]
    graph = group(graphs)
    with Runtime(["cuda:0", "cuda:1"]) as runtime:
        for _ in range(50):
            seen = list(runtime.submit(graph, PROMPT, max_tokens=64, ignore_eos=True))
            assert seen == wanted
        runtime.park()  # rank 0's tokens may come before another has ended the step
        for rank in runtime._find(graph).executor.ranks:
            assert np.array_equal(rank.read("logits.all")[0], logits)
