"""attention_merge: a row's heads from the sums of its spans.

The second half of attention where the context has several spans of positions; attention.py has the
spans, `partials`, and what norms and gates do. Span by span, in their order:

  top = max(top, m)    out = out * e^(top' - top) + o * e^(m - top)    total likewise

with top' the maximum so far, o, m and t the span's sums, maximum and total; then out / total. The
order is the definition: it hangs on the position alone. Maxima are in the unit of whoever left
them: powers of e, or of 2 on cuda.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.graphs.ops.attention_rows_cuda import ROWS_MAX, packed, shares
from gpurt.graphs.ops.regions import array_of, columns, part, required

if TYPE_CHECKING:
    from gpurt.buffer import Buffer
    from gpurt.graph import Graph, Operand, Operator


def attention_merge(
    graph: Graph, partials: Buffer, q: Operand | None, out: Operand, *, op: Operator, name: str
) -> Operator:
    """Add the second half of the attention operator `op`. q: if it is gated."""
    kept = ("heads", "kv_heads", "head_dim", "window", "out_eps", "spans")
    return graph.op(
        ATTENTION_MERGE,
        {"partials": partials, "q": q, "out": out},
        name=name,
        **{key: op.params[key] for key in kept},
    )


def tile_attention_merge(op: Operator, target: Target) -> list[Tile]:
    """One task per kv head; of steps of many rows on cuda one for 16 of them, coords[3]."""
    kv_heads = int(op.params["kv_heads"])
    rows, width = op.args["out"].shape
    group = width // kv_heads
    is_wide = target.kind == "cuda" and rows > ROWS_MAX
    parts = shares(rows, -(-rows // ROWS_MAX)) if is_wide else [(0, rows)]
    tiles = []
    for head in range(kv_heads):
        low, high = head * group, (head + 1) * group
        of_head = part(op.args["partials"], 1, head, head + 1)
        for own in parts:
            reads = [part(of_head, 0, *own)] if is_wide else [of_head]
            if "q" in op.args:
                reads.append(columns(part(op.args["q"], 0, *own), width + low, width + high))
            write = columns(part(op.args["out"], 0, *own), low, high)
            coords = (head, 0, 0, packed(own) if is_wide else 0)
            tiles.append(Tile(coords, tuple(reads), (write,), cost_bytes=16 * group))
    return tiles


def attention_merge_reference(
    op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows
) -> None:
    """The contract above, in float32."""
    from gpurt.graphs.ops.attention import SPAN, finish_heads

    heads, dim = int(op.params["heads"]), int(op.params["head_dim"])
    window, out_eps = int(op.params["window"]), np.float32(op.params["out_eps"])
    partials, q = required(op, arrays, "partials"), array_of(op, arrays, "q")
    for row in range(len(step.token)):
        position = int(step.position[row])
        first = max(0, position + 1 - window) if window else 0
        of_row = partials[row].astype(np.float32)  # [kv_heads, spans, group, dim + pad]
        sums, top, total = of_row[..., :dim], of_row[..., dim], of_row[..., dim + 1]
        begin, end = first // SPAN, position // SPAN
        out, most, all_ = sums[:, begin], top[:, begin], total[:, begin]
        for span in range(begin + 1, end + 1):
            larger = np.maximum(most, top[:, span])
            mine, theirs = np.exp(most - larger), np.exp(top[:, span] - larger)
            out = out * mine[..., None] + sums[:, span] * theirs[..., None]
            all_, most = all_ * mine + total[:, span] * theirs, larger
        gates = None if q is None else q[row].reshape(2, heads, dim)[1]
        heads_HD = (out / all_[..., None]).reshape(heads, dim)
        required(op, arrays, "out")[row] = finish_heads(heads_HD, out_eps, gates)


ATTENTION_MERGE = Body(
    name="attention_merge",
    args=(Arg("partials", "r"), Arg("q", "r", optional=True), Arg("out", "w")),
    params=("heads", "kv_heads", "head_dim", "window", "out_eps", "spans"),
    tile=tile_attention_merge,
    reference=attention_merge_reference,
    payload=True,
)
