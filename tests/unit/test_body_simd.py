"""The choice of SIMD level, and conversions at their edges."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from gpurt.buffer import DTYPES
from gpurt.graphs.ops.dtypes import to_storage
from tests.helpers.host_bodies import LEVELS, HostBodies, SimdError, bodies, levels
from tests.unit.test_body_matvec import Case


@pytest.mark.parametrize("value", ["avx1024", "", "AVX2"])
def test_an_unknown_level_is_refused_by_name(value: str) -> None:
    message = rf"^'{value}' is no SIMD level - at GPURT_SIMD - use portable, avx2 or avx512"
    with pytest.raises(SimdError, match=message):
        HostBodies(value)


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_is_loaded_or_named_as_missing(level: str) -> None:
    if level in levels():
        assert bodies(level).level == level
    else:
        with pytest.raises(SimdError, match=rf"at most, not {level} - at GPURT_SIMD"):
            HostBodies(level)


LOAD = """
from gpurt import Graph, body
from gpurt.body import Target
from gpurt.executors import host
from gpurt.executors.base import Options
from gpurt.planner import plan
graph = Graph()
graph.task(body("fill", lambda y: None), reads=[], writes=[graph.output("y", [4], "f32")])
host.load(plan(graph, Target("host", 1)), graph, Options(workers=1))
"""


def test_a_bad_level_is_a_config_error_when_a_plan_is_loaded() -> None:
    environment = {**os.environ, "GPURT_SIMD": "sse9"}
    command = [sys.executable, "-c", LOAD]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "ConfigError: 'sse9' is no SIMD level - at GPURT_SIMD" in ended.stderr


EDGES = [0.0, -0.0, 1.0, -1.5, 65504.0, 65519.99, 65520.0, 1e30, -1e30, 6.1e-5, 6e-8, 2.9e-8, 3e-8]
EDGES += [1.00048828125, 1.00146484375, 1.00390625, 1.01171875, 3.3895e38, -3.4e38, 5.96e-8]
EDGES += [np.inf, -np.inf, np.nan, 1e-40]


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_conversions_round_to_nearest_even_at_every_edge(level: str, dtype: str) -> None:
    # W = 1 and K = 1: y is x, converted. Random values hit every exponent.
    bits = np.random.default_rng(0).integers(0, 2**32, 5000, np.uint64).astype(np.uint32)
    values = np.concatenate([np.array(EDGES, np.float32), bits.view(np.float32)])
    case = Case(1, 1, len(values), "f32", y_dtype=dtype)
    case.arrays["w"][...] = 1.0
    case.arrays["x"] = values[:, None].copy()
    with np.errstate(over="ignore", invalid="ignore"):
        expected = to_storage(values[:, None], DTYPES[dtype])
    got = case.run(level)
    got[values == 0] = expected[values == 0]  # 0 + -0 is 0: a sum loses the sign
    nan = np.isnan(values)
    np.testing.assert_array_equal(got.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])
    exponent = {"f16": 0x7C00, "bf16": 0x7F80}[dtype]
    assert (got.view(np.uint16)[nan] & 0x7FFF > exponent).all()


@pytest.mark.parametrize("level", levels())
def test_silu_is_right_from_one_end_of_float_to_the_other(level: str) -> None:
    gates = np.concatenate([np.linspace(-120, 120, 4001), [0, -0.0, 1e-30, 3e38, -3e38]])
    case = Case(2, 2, len(gates), "f32", swiglu=True)
    case.arrays["w"][...] = [[1, 0], [0, 1]]
    case.arrays["x"] = np.stack([gates, np.ones(len(gates))], axis=1).astype(np.float32)
    x = case.arrays["x"][:, :1].astype(np.float64)
    with np.errstate(over="ignore"):
        expected = x / (1 + np.exp(-x))
    # Below -87 the exact result is under 1e-36 and the body's is too.
    np.testing.assert_allclose(case.run(level), expected, rtol=1e-6, atol=1e-35)
