"""Spans of experts' tasks on the host: which expert, for how many rows."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.bench import graphs
from gpurt.body import Target
from gpurt.planner import plan
from gpurt.trace import Trace
from gpurt.wire import FinishReason
from tests.helpers.chosen import assert_spans_name_experts
from tests.helpers.drive import driven

SIZE = {"layers": 2, "experts": 5, "top_k": 2, "width": 64, "inner": 32, "rows": 3}


@pytest.mark.parametrize("policy", ["static", "claim"])
def test_spans_name_the_experts_that_rows_chose(policy: str) -> None:
    graph = graphs.experts_alone(**SIZE, routed=False)
    made = plan(graph, Target("host", 2), policy=policy)
    with driven((made, graph)) as driver:
        driver.executor.write("x", np.ones((SIZE["rows"], SIZE["width"]), np.float32))
        assert driver.run(max_tokens=4) == ([], FinishReason.STEPS)
        driver.executor.close()
        trace = Trace.from_raw(made, driver.executor.raw_trace())
    assert [o.experts for o in trace.operators if o.body == "expert_matvec"] == [5] * 4
    assert_spans_name_experts(trace, SIZE)
