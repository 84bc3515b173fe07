"""A context of several spans on the host: the same tokens for every split, policy and step size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpurt.body import Target
from gpurt.executors import host
from gpurt.executors.base import Options
from gpurt.graphs.ops.attention import SPAN
from gpurt.planner import plan
from tests.gpu import test_llama, tiny_llama

VOCAB, COUNT = 208, 4
PROMPT = [int(t) for t in np.random.default_rng(3).integers(0, VOCAB, SPAN + 60)]
# Workers, so splits of the one kv head; policy; rows a step.
VARIANTS: list[tuple[int, Any, int]] = [(1, "static", 16), (2, "claim", 16), (3, "ready", 7)]


def test_tokens_over_a_border_of_spans_depend_on_no_split(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 96}
    monkeypatch.setattr(
        tiny_llama, "CONFIG", replace(tiny_llama.CONFIG, context=4 * SPAN, vocab=VOCAB, **small)
    )
    seen = []
    for workers, policy, rows in VARIANTS:
        graph = tiny_llama.tiny_llama(rows=rows, context=3 * SPAN)
        made = plan(graph, Target("host", workers), policy=policy)
        splits = {t.coords[2] for t in made.tasks if t.body == "attention"}
        assert splits == {workers}
        executor = host.load(made, graph, Options(workers=workers, trace=False))
        try:
            seen.append(test_llama.generate(executor, PROMPT, COUNT))
        finally:
            executor.host.request_exit()
            assert executor.join(10)
            executor.close()
    assert seen[1:] == seen[:1] * 2
