"""Operators of the dflash drafter with random arguments, for the host's bodies and the GPU's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.buffer import DTYPES
from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.block_conv import block_conv
from gpurt.graphs.ops.candidates import candidates, chunk_count
from gpurt.graphs.ops.draft_rows import draft_rows
from gpurt.graphs.ops.draft_walk import draft_walk
from gpurt.graphs.ops.dtypes import to_bf16, to_storage
from tests.gpu.one_task import Step

Case = tuple[Operator, dict[str, NDArray[Any]], Step]
CAPACITY = 16  # rows of a step and of a table
VOCAB = 300


def blocks_step(blocks: list[tuple[int, int, int]], seed: int = 0) -> Step:
    """A table's rows: (slot, anchor's position, rows) a block. Masks want logits."""
    rng = np.random.default_rng(seed)
    slots = [slot for slot, _, rows in blocks for _ in range(rows)]
    positions = [anchor + i for _, anchor, rows in blocks for i in range(rows)]
    masks = [i > 0 for _, _, rows in blocks for i in range(rows)]
    tokens = rng.integers(0, VOCAB, len(slots)).tolist()
    return Step(slots, positions, tokens, [i for i, mask in enumerate(masks) if mask])


BLOCKS = {
    "one": [(0, 41, 16)],
    "two": [(0, 7, 5), (1, 12, 5)],
    # the first of the second block would follow the last of the first, were it not another slot
    "next": [(2, 7, 3), (0, 10, 2), (1, 3, 4)],
    "none": [],
}


def conv_case(
    blocks: str, hidden: int, taps: int, group: int, side: int, normed: str = "", dtype: str = "f32"
) -> Case:
    """normed: its dtype, "": none, and no residual. dtype: of x, and of y unless it is normed."""
    graph, step, rng = Graph(rows=CAPACITY, slots=4), blocks_step(BLOCKS[blocks]), _rng(hidden)
    kinds = {"x": dtype, "d": "f32", "y": "f32" if normed else dtype}
    kinds |= {"residual": "f32", "normed": normed} if normed else {}
    widths = {"d": 2 * taps * hidden // group}
    made = {n: graph.activation(n, [CAPACITY, widths.get(n, hidden)], k) for n, k in kinds.items()}
    base = graph.weight("base", [2, taps, hidden], "f32", lambda: None)
    norm = graph.weight("norm", [hidden], "f32", lambda: None) if normed else None
    op = block_conv(graph, base=base, norm=norm, side=side, norm_eps=1e-5, **made)
    arrays = {n: rng.standard_normal(r.shape).astype(np.float32) for n, r in op.args.items()}
    for name, kind in kinds.items():
        arrays[name][len(step.slots) :] = np.nan  # past the step's rows
        if name in ("y", "normed"):
            arrays[name][...] = np.nan
        if kind == "bf16":
            arrays[name] = to_bf16(arrays[name])
    return op, arrays, step


def candidates_case(n: int, count: int, chunk: int, blocks: str = "one") -> Case:
    """Values with ties, infinities and NaN."""
    graph, step, rng = Graph(rows=CAPACITY, slots=4), blocks_step(BLOCKS[blocks]), _rng(n)
    width = chunk_count(n, chunk) * count
    x = graph.activation("x", [CAPACITY, n], "f32")
    scores = graph.activation("scores", [CAPACITY, width], "f32")
    ids = graph.activation("ids", [CAPACITY, width], "u32")
    op = candidates(graph, x, scores, ids, count=count, chunk=chunk, first=3 * n)
    values = rng.integers(-40, 40, (CAPACITY, n)).astype(np.float32) / 8
    values[rng.random(values.shape) < 0.05] = np.nan
    values[rng.random(values.shape) < 0.02] = -np.inf
    values[1, :-1] = np.nan  # one value in the whole row
    arrays: dict[str, NDArray[Any]] = {"x": values}
    arrays["scores"] = np.full((CAPACITY, width), np.nan, np.float32)
    arrays["ids"] = np.zeros((CAPACITY, width), np.uint32)
    return op, arrays, step


def walk_case(
    n: int,
    top_k: int,
    rank: int,
    dtype: str,
    blocks: str = "one",
    temperature: float = 0.0,
    nodes: int = 0,
) -> Case:
    """rank 0: no selector. Every slot is sampled at one temperature. nodes: of a tree."""
    graph, step, rng = (
        Graph(rows=CAPACITY, slots=4, vocab=VOCAB),
        blocks_step(BLOCKS[blocks]),
        _rng(n),
    )
    scores = graph.activation("scores", [CAPACITY, n], "f32")
    ids = graph.activation("ids", [CAPACITY, n], "u32")
    arrays: dict[str, NDArray[Any]] = {
        "scores": rng.standard_normal((CAPACITY, n)).astype(np.float32),
        "ids": np.sort(np.argsort(rng.random((CAPACITY, VOCAB)))[:, :n]).astype(np.uint32),
        "proposals": np.full((4, 16), 77, np.uint32),
    }
    arrays["scores"][:, 1::7] = -np.inf  # a chunk with fewer candidates
    selector = None
    if rank:
        kind = DTYPES[dtype]
        hidden = graph.activation("hidden", [CAPACITY, rank], "f32")
        books = [graph.weight(b, [VOCAB, rank], dtype, lambda: None) for b in "ab"]
        selector = hidden, *books
        arrays["hidden"] = rng.standard_normal((CAPACITY, rank)).astype(np.float32)
        for name in ("predecessor", "successor"):
            book = rng.standard_normal((VOCAB, rank)).astype(np.float32) / np.float32(rank) ** 0.5
            arrays[name] = to_storage(book, kind)
    proposals = graph.draft(tree=nodes > 0)
    if nodes:
        arrays["parents"] = np.full((4, 15), 77, np.uint32)
    op = draft_walk(graph, scores, ids, proposals, top_k=top_k, selector=selector, nodes=nodes)
    step.slot_states["temperature"] = temperature
    step.slot_states["top_p"] = 1
    step.slot_states["seed"] = np.arange(4) + 5
    return op, arrays, step


def rows_case(block: int, capacity: int = 2 * CAPACITY, context: int = 64) -> Case:
    """Slot 2's proposals are accepted in part, slot 0's all; slot 3 ends its prompt, slot 1 not."""
    graph = Graph(rows=CAPACITY, slots=4, context=context, vocab=VOCAB)
    op = draft_rows(graph, graph.row_table("table", capacity), block=block, mask=VOCAB - 1)
    spans = [(2, 10, 4), (0, 30, 3), (3, 0, 5), (1, 2, 2)]  # slot, position, rows
    step = Step(
        [slot for slot, _, rows in spans for _ in range(rows)],
        [begin + i for _, begin, rows in spans for i in range(rows)],
        [100, 11, 12, 13, 100, 21, 22, 5, 5, 5, 5, 5, 7, 7],
        [0, 1, 2, 3, 4, 5, 6, 11],
        flags=[1, 3, 3, 3, 1, 3, 3, 0, 0, 0, 0, 1, 0, 0],
    )
    step.slot_states["max_tokens"] = 50
    sampled = [11, 12, 99, 13, 21, 22, 23, 50]
    arrays: dict[str, NDArray[Any]] = {
        "sampled": np.array([*sampled, *[0] * 8], np.uint32),
        "table": np.zeros(op.args["table"].shape, np.uint32),
    }
    return op, arrays, step


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
