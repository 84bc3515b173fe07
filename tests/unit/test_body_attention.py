"""The host's attention at every SIMD level, against the body's own reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpurt.body import StepRows, Target
from gpurt.buffer import DTYPES
from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.attention import ATTENTION, SPAN, attention, ring_pages
from gpurt.graphs.ops.attention_merge import ATTENTION_MERGE
from gpurt.graphs.ops.dtypes import to_float32, to_storage
from tests.helpers.host_bodies import bodies, guarded, levels
from tests.helpers.oracle import step_rows

LEVELS = levels()
SLOTS = 3
CONTEXT = 96
STATES = ("k_cache", "v_cache")
E4M3_VALUES = to_float32(np.arange(1, 127, dtype=np.uint8), DTYPES["e4m3"])
MIDDLES = (E4M3_VALUES[:-1] + E4M3_VALUES[1:]) / 2


@dataclass
class Case:
    """One attention operator, its caches filled up to each row's position."""

    step: StepRows
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    page: int = 16
    cache: str = "f32"
    qk_norm: bool = False
    context: int = CONTEXT
    window: int = 0
    weightless: bool = False
    rotated: bool = True
    gated: bool = False
    out_eps: float = 0.0
    splits: int = 0
    seed: int = 0
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        rows, d = len(self.step.token), self.head_dim
        per_slot = ring_pages(self.window, rows, self.context, self.page)
        pages = SLOTS * per_slot

        def normal(*shape: int) -> NDArray[np.float32]:
            return rng.standard_normal(shape).astype(np.float32)

        angles = np.arange(self.context)[:, None] / 100.0 ** (np.arange(d // 2) / (d // 2))
        self.arrays = {
            "q": guarded(normal(rows, self.heads * d * (1 + self.gated))),
            "kv": guarded(normal(rows, 2 * self.kv_heads * d)),
            "page_table": rng.permutation(pages).astype(np.uint32).reshape(SLOTS, per_slot),
            "rope": guarded(
                np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
            ),
            "out": np.full((rows, self.heads * d), np.nan, np.float32),
        }
        for name in STATES:
            values = normal(pages, self.kv_heads, self.page, d)
            self.arrays[name] = guarded(to_storage(values, DTYPES[self.cache]))
        if self.qk_norm:
            self.arrays["qk_norm"] = guarded(rng.uniform(0.5, 1.5, (2, d)).astype(np.float32))

    def operators(self) -> list[Operator]:
        """Attention, and what merges its spans if there are several."""
        graph = Graph(rows=len(self.step.token), slots=SLOTS, context=self.context)
        a = self.arrays
        qk_norm = None
        if self.qk_norm:
            qk_norm = graph.weight("qk_norm", a["qk_norm"].shape, "f32", a["qk_norm"])
        attention(
            graph,
            graph.activation("q", a["q"].shape, "f32"),
            graph.activation("kv", a["kv"].shape, "f32"),
            graph.state("k_cache", a["k_cache"].shape, self.cache),
            graph.state("v_cache", a["v_cache"].shape, self.cache),
            graph.state("page_table", a["page_table"].shape, "u32"),
            graph.weight("rope", a["rope"].shape, "f32", a["rope"]) if self.rotated else None,
            graph.activation("out", a["out"].shape, "f32"),
            heads=self.heads,
            qk_norm=qk_norm,
            eps=1e-6,
            window=self.window,
            weightless_qk_norm=self.weightless,
            gated=self.gated,
            out_eps=self.out_eps,
            splits=self.splits,
        )
        return list(graph.operators)

    def run(
        self, level: str, scratch_bytes: int = 1 << 20, ancestors: Sequence[int] = ()
    ) -> dict[str, NDArray[Any]]:
        """Fresh caches and out, computed by the bodies, tile by tile."""
        arrays = dict(self.arrays, out=np.full(self.arrays["out"].shape, np.nan, np.float32))
        for name in STATES:
            arrays[name] = guarded(self.arrays[name])
        for op in self.operators():
            if "partials" in op.args and "partials" not in arrays:
                arrays["partials"] = np.full(op.args["partials"].shape, np.nan, np.float32)
            given = arrays
            if op.body is ATTENTION_MERGE and "q" not in op.args:
                given = {name: array for name, array in arrays.items() if name != "q"}
            assert op.body.tile is not None
            kind, _ = bodies(level).run(
                op.body,
                given,
                op.params,
                self.step,
                coords=[t.coords for t in op.body.tile(op, Target("host", 2))],
                scratch_bytes=scratch_bytes,
                ancestors=ancestors,
            )
            assert kind == 0
        return arrays

    def reference(self) -> dict[str, NDArray[Any]]:
        """The same by graphs/ops, caches as float32."""
        arrays = {k: v.copy() for k, v in self.arrays.items()}
        for name in STATES:
            arrays[name] = to_float32(self.arrays[name], DTYPES[self.cache]).copy()
        for op in self.operators():
            if "partials" in op.args and "partials" not in arrays:
                arrays["partials"] = np.full(op.args["partials"].shape, np.nan, np.float32)
            assert op.body.reference is not None
            op.body.reference(op, arrays, self.step)
        return arrays

    def poison_beyond(self) -> None:
        """NaN in every cache entry that no row of the step may read, or that the step writes."""
        table = self.arrays["page_table"]
        hidden = np.ones(self.arrays["k_cache"].shape[:3], bool)
        rows = list(zip(self.step.slot, self.step.position, strict=True))
        written = {(int(slot), int(position)) for slot, position in rows}
        for slot, position in rows:
            first = max(0, int(position) + 1 - self.window) if self.window else 0
            for p in range(first, int(position) + 1):
                page = table[slot, p // self.page % table.shape[1]]
                if (int(slot), p) not in written:
                    hidden[page, :, p % self.page] = False
        for name in STATES:
            self.arrays[name].view(np.uint8)[hidden] = 0xFF


def rows_of(*runs: tuple[int, int, int]) -> StepRows:
    """Rows by (slot, first position, count)."""
    slots = [slot for slot, _, count in runs for _ in range(count)]
    positions = [first + i for _, first, count in runs for i in range(count)]
    return step_rows([0] * len(slots), positions, slots)


STEPS = {
    "first": rows_of((0, 0, 1)),
    "decode": rows_of((1, 41, 1)),
    "page_end": rows_of((2, 15, 1)),
    "page_start": rows_of((2, 16, 1)),
    "prefill": rows_of((0, 0, 16)),
    "prefill_later": rows_of((0, 29, 7)),
    "mixed": rows_of((2, 50, 1), (0, 13, 1), (1, 20, 6)),
    "last": rows_of((1, CONTEXT - 1, 1)),
}


def check(case: Case, level: str) -> None:
    got, expected = case.run(level), case.reference()
    rounding = {"f32": 1e-5, "f16": 2e-3, "bf16": 2e-2, "e4m3": 0.25}[case.cache]
    np.testing.assert_allclose(got["out"], expected["out"], rtol=1e-4, atol=rounding)
    for name in STATES:
        cached = to_float32(got[name], DTYPES[case.cache])
        # One unit in the last place: the reference rounds after slightly different float32 steps.
        np.testing.assert_allclose(cached, expected[name], rtol=rounding / 2, atol=rounding / 64)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("cache", ["f32", "f16", "bf16", "e4m3"])
def test_attention_equals_the_reference(level: str, step: str, cache: str) -> None:
    case = Case(STEPS[step], cache=cache)
    case.poison_beyond()
    check(case, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cache", ["f32", "f16", "bf16", "e4m3"])
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 9, "kv_heads": 3, "head_dim": 64},
        {"heads": 4, "kv_heads": 4, "head_dim": 128},
        {"heads": 2, "kv_heads": 1, "head_dim": 80},
        {"heads": 3, "kv_heads": 1, "head_dim": 10},
        {"heads": 2, "kv_heads": 1, "head_dim": 36, "page": 7},
        {"heads": 8, "kv_heads": 1, "head_dim": 32, "page": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_every_head_shape_equals_the_reference(
    level: str, cache: str, shape: dict[str, int], qk_norm: bool
) -> None:
    case = Case(STEPS["mixed"], cache=cache, qk_norm=qk_norm, **shape)
    case.poison_beyond()
    check(case, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("step", ["first", "decode", "prefill", "mixed", "last"])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 20},
        {"window": 33, "page": 7, "cache": "bf16"},
        {"window": CONTEXT},
        {"rotated": False},
        {"weightless": True},
        {"gated": True},
        {"out_eps": 1e-5},
        {"window": 16, "weightless": True, "gated": True, "out_eps": 1e-5, "head_dim": 20},
    ],
    ids=str,
)
def test_windows_gates_and_norms_equal_the_reference(
    level: str, step: str, options: dict[str, Any]
) -> None:
    case = Case(STEPS[step], **options)
    case.poison_beyond()
    check(case, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cache", ["f32", "bf16", "e4m3"])
def test_bits_depend_on_the_position_not_on_rows_or_context(level: str, cache: str) -> None:
    together = Case(rows_of((0, 20, 16)), cache=cache)
    got = together.run(level)
    arrays = {**together.arrays, **{name: got[name] for name in STATES}}
    for row in range(16):
        alone = Case(rows_of((0, 20 + row, 1)), cache=cache)
        alone.arrays = dict(arrays)
        for name in ("q", "kv", "out"):
            alone.arrays[name] = guarded(together.arrays[name][row : row + 1])
        assert alone.run(level)["out"].tobytes() == got["out"][row].tobytes()
    small = Case(rows_of((0, 20, 16)), cache=cache, context=48)
    for name in ("q", "kv"):
        small.arrays[name] = together.arrays[name]
    pages = together.arrays["page_table"][0, :3]
    for name in STATES:
        small.arrays[name][small.arrays["page_table"][0]] = together.arrays[name][pages]
    assert small.run(level)["out"].tobytes() == got["out"].tobytes()
    assert together.run(level, scratch_bytes=64)["out"].tobytes() == got["out"].tobytes()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("window", [1, 13, 20])
def test_bits_in_a_window_do_not_depend_on_the_rows_of_a_step(level: str, window: int) -> None:
    options: dict[str, Any] = {"window": window, "gated": True, "weightless": True, "out_eps": 1e-5}
    together = Case(rows_of((1, 39, 16)), cache="bf16", **options)  # the ring is gone round
    got = together.run(level)
    arrays = {**together.arrays, **{name: got[name] for name in STATES}}
    for row in range(16):
        alone = Case(rows_of((1, 39 + row, 1)), cache="bf16", **options)
        alone.arrays = dict(arrays)
        for name in ("q", "kv", "out"):
            alone.arrays[name] = guarded(together.arrays[name][row : row + 1])
        assert alone.run(level)["out"].tobytes() == got["out"][row].tobytes()


@pytest.mark.parametrize("level", LEVELS)
def test_only_its_own_positions_are_written(level: str) -> None:
    case = Case(STEPS["mixed"])
    got = case.run(level)
    written = np.zeros(case.arrays["k_cache"].shape[:3], bool)
    for slot, position in zip(case.step.slot, case.step.position, strict=True):
        page = case.arrays["page_table"][slot, position // case.page]
        written[page, :, position % case.page] = True
    for name in STATES:
        changed = (got[name] != case.arrays[name]).any(axis=-1)
        assert (changed == written).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["q", "kv"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_reaches_the_result(level: str, name: str, bad: float) -> None:
    case = Case(rows_of((0, 0, 20)))
    case.arrays[name][11, 3] = bad  # dimension 3 of query or key head 0
    finite = np.isfinite(case.run(level)["out"].reshape(20, 6, 64))
    assert finite[:11].all()
    assert not finite[11, 0].any()
    assert finite[:, 3:].all()  # the other kv head


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("head_dim", [64, 20])
def test_an_8_bit_cache_holds_what_the_oracle_rounds_to(level: str, head_dim: int) -> None:
    """Values go in as they are, so their codes are the oracle's bit by bit, and sums follow."""
    case = Case(rows_of((0, 0, 16)), cache="e4m3", rotated=False, head_dim=head_dim)
    kv = case.arrays["kv"]
    flat = kv.reshape(-1)
    flat[: 2 * 126] = [s * v for v in E4M3_VALUES for s in (1, -1)]
    flat[256 : 256 + 250] = [s * v for v in MIDDLES for s in (1, -1)]  # ties go to even codes
    flat[512:520] = [449.0, -1e9, 464.0, 1e-9, -1e-9, 0.0, 2.0**-10, 3 * 2.0**-10]
    got = case.run(level)
    pages = case.arrays["page_table"][0]
    for at, name in enumerate(STATES):
        rows = kv.reshape(16, 2, 2, head_dim)[:, at]
        stored = got[name][pages].transpose(1, 0, 2, 3).reshape(2, -1, head_dim)[:, :16]
        assert stored.tobytes() == to_storage(rows, DTYPES["e4m3"]).transpose(1, 0, 2).tobytes()
    np.testing.assert_allclose(got["out"], case.reference()["out"], rtol=1e-4, atol=1e-4)


def test_the_oracles_8_bit_rounding_is_torchs() -> None:
    rng = np.random.default_rng(3)
    values = (rng.standard_normal(1 << 16) * 2.0 ** rng.integers(-14, 8, 1 << 16)).astype(
        np.float32
    )
    values = np.concatenate([values, E4M3_VALUES, MIDDLES, [0.0, -0.0, np.nan]]).astype(np.float32)
    values = values[~(np.abs(values) > 448)]
    ours = to_storage(values, DTYPES["e4m3"])
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (ours == theirs).all()
    assert to_storage(np.array([449, -1e9, np.inf], np.float32), DTYPES["e4m3"]).tolist() == [
        126,
        254,
        126,
    ]


@pytest.mark.parametrize("level", LEVELS)
def test_scores_far_apart_neither_overflow_nor_vanish(level: str) -> None:
    case = Case(rows_of((0, 90, 1)))
    case.arrays["q"] *= np.float32(40)
    check(case, level)


@pytest.mark.parametrize("level", LEVELS)
def test_a_context_of_8192_equals_the_reference(level: str) -> None:
    case = Case(rows_of((1, 8191, 1)), heads=3, kv_heads=1, context=8192)
    check(case, level)


# ---- spans -----------------------------------------------------------------------------------
CONTEXT_SPANS = 2 * SPAN + 500
SPAN_STEPS = {
    "one span of several": rows_of((0, SPAN - 1, 1)),
    "a span begins": rows_of((1, SPAN, 1)),
    "rows over a border": rows_of((2, SPAN - 7, 16)),
    "slots of all lengths": rows_of((2, CONTEXT_SPANS - 2, 2), (0, 5, 1), (1, SPAN + 300, 5)),
}


def in_spans(step: str, **changes: Any) -> Case:
    return Case(SPAN_STEPS[step], context=CONTEXT_SPANS, heads=3, kv_heads=1, **changes)


@pytest.mark.parametrize("step", SPAN_STEPS)
@pytest.mark.parametrize("window", [0, SPAN + 90])
def test_spans_equal_the_reference_whatever_the_splits(step: str, window: int) -> None:
    def case(splits: int) -> Case:
        made = in_spans(step, splits=splits, window=window, gated=True, out_eps=1e-5)
        made.poison_beyond()
        return made

    level = LEVELS[-1]
    check(case(1), level)
    wanted = case(1).run(level)
    for splits in (2, 3, 8):
        got = case(splits).run(level)
        for name in ("out", *STATES):
            assert got[name].tobytes() == wanted[name].tobytes(), f"{splits} splits: {name}"


@pytest.mark.parametrize("level", LEVELS)
def test_bits_in_spans_depend_neither_on_the_context_nor_on_rows(level: str) -> None:
    def row(case: Case, index: int) -> bytes:
        return bytes(case.run(level)["out"][index].tobytes())

    many = in_spans("rows over a border", page=32)
    alone = in_spans("rows over a border", page=32)
    alone.step = rows_of((2, SPAN + 8, 1))
    for name in ("q", "kv"):
        alone.arrays[name] = guarded(many.arrays[name][15:])
    alone.arrays["out"] = alone.arrays["out"][15:]
    filled = many.run(level)
    for name in STATES:
        alone.arrays[name] = filled[name]
    assert row(alone, 0) == filled["out"][15].tobytes()
    # A row of the first span has the bits of a plan that knows no other.
    short = Case(rows_of((0, 70, 1)), context=SPAN, heads=3, kv_heads=1, page=32)
    long = Case(rows_of((0, 70, 1)), context=CONTEXT_SPANS, heads=3, kv_heads=1, page=32)
    for name in ("q", "kv"):
        long.arrays[name] = short.arrays[name]
    long.arrays["rope"][:SPAN] = short.arrays["rope"]
    for name in STATES:
        cached = long.arrays[name].reshape(SLOTS, -1)
        for page in range(3):
            to, begin = (c.arrays["page_table"][0, page] for c in (long, short))
            long.arrays[name][to] = short.arrays[name][begin]
        assert cached.size
    assert row(long, 0) == row(short, 0)


def test_the_planner_deals_spans_to_as_many_tasks_as_there_are_workers_for() -> None:
    op = in_spans("a span begins").operators()[0]
    assert ATTENTION.tile is not None
    for workers, count in ((1, 1), (2, 2), (132, 3)):
        tiles = ATTENTION.tile(op, Target("host", workers))
        assert [t.coords for t in tiles] == [(0, i, count, 0) for i in range(count)]
    short = Case(SPAN_STEPS["one span of several"], context=SPAN).operators()
    assert [op.body.name for op in short] == ["attention"]
    bounded = Case(SPAN_STEPS["a span begins"], context=CONTEXT_SPANS, window=SPAN).operators()
    assert [op.body.name for op in bounded] == ["attention"]
