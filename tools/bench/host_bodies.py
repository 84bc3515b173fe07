"""What each host body reaches on one core, beside its ceiling; the shapes are SmolLM2-135M's.

    python tools/bench/host_bodies.py [--level avx512] [--seconds 1.0]

Minimum of many repeats, so a busy machine disturbs little. Ceilings come from the same run:
  cold    weights of a whole model, read once a repeat: this core's read bandwidth at that size
  16 rows the multiply-adds of the inner loop alone, codes in registers and activations in L1
  warm    a body that reads its data from cache: this core's read bandwidth at that size
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gpurt import wire  # noqa: E402
from gpurt.body import StepRows  # noqa: E402
from gpurt.graphs.ops.attention import ATTENTION  # noqa: E402
from gpurt.graphs.ops.embed import EMBED  # noqa: E402
from gpurt.graphs.ops.matvec import MATVEC  # noqa: E402
from gpurt.graphs.ops.sample import SAMPLE  # noqa: E402
from tests.helpers.host_bodies import HostBodies, levels, random_weight  # noqa: E402

LAYERS = 30
TILE_BYTES = 32 << 10
HEADS, KV_HEADS, HEAD_DIM, PAGE = 9, 3, 64, 64


@dataclass
class Result:
    """One line: what was reached and what bounds it, in the same unit."""

    case: str
    ns: float
    reached: float
    ceiling: float
    unit: str

    def __str__(self) -> str:
        share = 100 * self.reached / self.ceiling
        reached = f"{self.reached:7.1f} of {self.ceiling:6.1f} {self.unit:6}"
        return f"{self.case:34} {self.ns / 1e3:10.1f} us  {reached} ({share:3.0f} %)"


def rows_at(rows: int, position: int) -> StepRows:
    index = np.arange(rows, dtype=np.uint32)
    return StepRows(index, np.zeros(rows, np.uint32), index + np.uint32(position), index)


def repeats_for(bodies: HostBodies, seconds: float, run: Any) -> float:
    """Runs once to learn the time, then as often as fits; the minimum in nanoseconds."""
    run(1)
    run(max(2, int(seconds * 1e9 / max(bodies.best_ns, 1.0))))
    return bodies.best_ns


def bench_matvec(
    bodies: HostBodies,
    seconds: float,
    case: str,
    shape: tuple[int, int],
    dtype: str,
    rows: int,
    *,
    norm: bool = False,
    swiglu: bool = False,
) -> Result:
    """One matrix of `shape`, or 30 of them as one when a single one would stay in cache."""
    n, k = shape
    rng = np.random.default_rng(0)
    w = random_weight(rng, n, k, dtype)
    copies = LAYERS if rows == 1 and w.nbytes < 8 << 20 else 1
    w = np.tile(w, (copies, 1))
    total = n * copies
    arrays = {
        "x": rng.standard_normal((rows, k)).astype(np.float32),
        "w": w,
        "y": np.empty((rows, total // 2 if swiglu else total), np.float32),
    }
    if norm:
        arrays["norm"] = np.ones(k, np.float32)
    params = {
        "n": total, "k": k, "epilogue": int(swiglu), "eps": 1e-5, "sampled": 0,
        "w_dtype": int(wire.DTYPE_CODES[dtype]), "x_dtype": 0, "y_dtype": 0,
        "scale": 1.0, "softcap": 0.0, "exact": 0,
    }  # fmt: skip
    tile = max(16, 1 << (TILE_BYTES * total // w.nbytes).bit_length() - 1)
    coords = [(i, min(i + tile, total)) for i in range(0, total, tile)]

    def run(repeats: int) -> None:
        bodies.run(MATVEC, arrays, params, rows_at(rows, 0), coords=coords, repeats=repeats)

    ns = repeats_for(bodies, seconds, run)
    if rows == 1:
        return Result(case, ns, w.nbytes / ns, bodies.read_gbps(w.nbytes, 20), "GB/s")
    return Result(case, ns, rows * total * k / ns, bodies.codes_gmacs(50), "GMAC/s")


def bench_attention(
    bodies: HostBodies, seconds: float, rows: int, position: int, cache: str
) -> Result:
    """All kv heads of one layer; the ceiling reads every row's keys and values once."""
    rng = np.random.default_rng(0)
    context = position + rows
    pages = -(-context // PAGE)
    storage, code = {"f32": (np.float32, 0), "f16": (np.float16, 1)}[cache]
    kv = (rng.standard_normal((pages, KV_HEADS, PAGE, HEAD_DIM)) / 8).astype(storage)
    arrays = {
        "q": rng.standard_normal((rows, HEADS * HEAD_DIM)).astype(np.float32),
        "kv": rng.standard_normal((rows, 2 * KV_HEADS * HEAD_DIM)).astype(np.float32),
        "k_cache": kv,
        "v_cache": kv.copy(),
        "page_table": np.arange(pages, dtype=np.uint32)[None],
        "rope": np.ones((context, HEAD_DIM), np.float32),
        "out": np.empty((rows, HEADS * HEAD_DIM), np.float32),
    }
    params = {
        "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "page": PAGE,
        "pages_per_slot": pages, "scale": 0.125, "eps": 0.0, "cache_dtype": code,
        "window": 0, "rope": 1, "qk_norm_kind": 0, "gated": 0, "out_eps": 0.0, "block": 0,
    }  # fmt: skip

    def run(repeats: int) -> None:
        coords = [(head,) for head in range(KV_HEADS)]
        step = rows_at(rows, position)
        bodies.run(ATTENTION, arrays, params, step, coords=coords, repeats=repeats)

    ns = repeats_for(bodies, seconds, run)
    size_bytes = 2 * kv.nbytes
    case = f"attention {cache}, {rows} row(s) at {position}"
    return Result(case, ns, rows * size_bytes / ns, bodies.read_gbps(size_bytes, 50), "GB/s")


def bench_ends(bodies: HostBodies, seconds: float) -> list[Result]:
    """Embed and sample: one row of a vocabulary of 49,152."""
    rng = np.random.default_rng(0)
    vocab, hidden, step = 49152, 576, rows_at(1, 5)
    table = random_weight(rng, 1024, hidden, "q8_0")
    x = np.empty((1, hidden), np.float32)
    params: dict[str, int | float] = {"hidden": hidden, "table_dtype": 7, "eps": 0.0, "scale": 1.0}
    arrays = {"table": table, "x": x}
    ns = repeats_for(bodies, seconds, lambda n: bodies.run(EMBED, arrays, params, step, repeats=n))
    row_bytes = table.nbytes // 1024 + x.nbytes
    results = [Result("embed q8_0, 1 row", ns, row_bytes / ns, bodies.read_gbps(4096, 50), "GB/s")]
    logits = (2 * rng.standard_normal((1, vocab))).astype(np.float32)
    ceiling = bodies.read_gbps(logits.nbytes, 50)
    for case, temperature, top_k, top_p in (
        ("sample greedy", 0.0, 0, 1.0),
        ("sample temperature 0.8", 0.8, 0, 1.0),
        ("sample 0.8, top_k 40, top_p 0.95", 0.8, 40, 0.95),
    ):
        slots = np.zeros(1, wire.SLOT_STATE)
        slots["temperature"], slots["top_k"], slots["top_p"] = temperature, top_k, top_p
        arrays = {"logits": logits, "sampled": np.zeros(1, np.uint32)}

        def run(n: int, arrays: Any = arrays, slots: Any = slots) -> None:
            bodies.run(SAMPLE, arrays, {"vocab": vocab}, step, slots=slots, repeats=n)

        ns = repeats_for(bodies, seconds, run)
        results.append(Result(case, ns, logits.nbytes / ns, ceiling, "GB/s"))
    return results


def bench_level(level: str, seconds: float) -> list[Result]:
    """All cases, printed as they come."""
    bodies = HostBodies(level)
    results: list[Result] = []

    def add(*new: Result) -> None:
        for result in new:
            print(f"{level:8} {result}", flush=True)
        results.extend(new)

    for rows in (1, 16):
        for case, shape, options in (
            ("qkv", (960, 576), {"norm": True}),
            ("gate/up", (3072, 576), {"norm": True, "swiglu": True}),
            ("down", (576, 1536), {}),
        ):
            name = f"{case} q4_1, {rows} row(s)"
            add(bench_matvec(bodies, seconds, name, shape, "q4_1", rows, **options))
        head = f"head q8_0, {rows} row(s)"
        add(bench_matvec(bodies, seconds, head, (49152, 576), "q8_0", rows, norm=True))
        add(bench_matvec(bodies, seconds, f"bf16, {rows} row(s)", (3072, 576), "bf16", rows))
    for rows, position, cache in (
        (1, 127, "f32"),
        (1, 1023, "f32"),
        (1, 1023, "f16"),
        (16, 112, "f32"),
    ):
        add(bench_attention(bodies, seconds, rows, position, cache))
    add(*bench_ends(bodies, seconds))
    return results


def main() -> None:
    """One line a case and level, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--level", choices=levels(), action="append")
    parser.add_argument("--seconds", type=float, default=0.3, help="spent on one case")
    options = parser.parse_args()
    report = {}
    for level in options.level or levels():
        report[level] = [vars(r) for r in bench_level(level, options.seconds)]
    print(json.dumps({"bench": "host_bodies", "levels": report}))


if __name__ == "__main__":
    main()
