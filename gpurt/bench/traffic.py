"""Traffic: the bytes that one step must move, from its graph: what a floor is made of.

Counted: weights that a step's products read, once each; of experts, those that some row chose; of
the embedding, the rows; keys and values up to a position, within the layer's window. The head once
more for a drafter, which reads it long after the model. Not counted: activations and small vectors
(well under 1 % in every case here).
"""

from __future__ import annotations

from gpurt.graph import Graph, Operator
from gpurt.graphs.drafters import SCOPE


def step_bytes(graph: Graph, *, rows: int = 1, position: int = 0, live: float = 0.0) -> int:
    """Bytes of one step of `rows` rows of one sequence, the first at `position`.

    live: experts that a layer's rows chose; 0: what `expected_live` says of each layer.
    """
    counted: set[tuple[bool, int, tuple[tuple[int, int], ...]]] = set()
    total = 0.0
    for op in graph.operators:
        if op.body.name == "embed":
            table = op.args["table"].buffer
            total += rows * table.dtype.row_bytes(table.shape[-1])
        elif op.body.name == "attention":
            total += _attention(op, rows, position)
        elif "w" in op.args:
            w, drafts = op.args["w"], SCOPE in op.path.split(".")
            key = (drafts, w.buffer.index, w.bounds)
            total += 0 if key in counted else _matrix(op, rows, live)
            counted.add(key)
    return round(total)


def expected_live(experts: int, top_k: int, rows: int) -> float:
    """Experts that `rows` rows choose together, if each draws `top_k` of them at random."""
    return experts * (1 - (1 - top_k / experts) ** rows)


def _matrix(op: Operator, rows: int, live: float) -> float:
    w = op.args["w"]
    *outer, width = w.shape
    row_bytes = w.buffer.dtype.row_bytes(width)
    if len(outer) == 1:
        return outer[0] * row_bytes
    experts, n = outer
    chosen = live or expected_live(experts, int(op.params["top_k"]), rows)
    return chosen * n * row_bytes


def _attention(op: Operator, rows: int, position: int) -> float:
    if "q" not in op.args:
        return 0  # it only writes
    cache = op.args["k_cache"].buffer
    window = int(op.params["window"])
    keys = position + rows
    if window:
        keys = min(keys, window + rows - 1)
    heads = int(op.params["kv_heads"])
    return 2 * keys * heads * cache.dtype.row_bytes(int(op.params["head_dim"]))
