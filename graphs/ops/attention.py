"""attention: per kv head, q/k norm, rotary embedding, the cache write, then attention.

Legend: B rows of a step, H query heads, G query heads a kv head, D head dimension, P positions.
One task per kv head, which handles all rows, so a row sees the keys that earlier rows of the same
step wrote. On cuda rows and query heads of a kv head are dealt to several tasks; each writes the
keys and values of all rows, the same bits as its neighbours, and reads what it wrote. In their
place they declare parts of the pages, disjoint and in whole. Sums run in chunks of one page at
absolute positions: bits depend neither on how many rows a step has, nor on the context's capacity,
nor on which task sums them.

Without a window, or with one longer than a span of 2048 positions, positions are summed span by
span, and the spans' sums are folded in their order. Where the context holds more than one span, the
spans are dealt to `splits` tasks a kv head: task i has the spans s with s % splits == i, all rows,
and the keys and values of the step's rows that lie there. It leaves the sums of each in `partials`,
and attention_merge folds them. So splits change no bit. What a task leaves in the cache and in
`partials` is known only as it runs: it declares its part of the pages and of the spans in their
place, both disjoint and in whole. Drafters' calls are of no spans: those over a table's rows, with
blocks, or that write the cache only.

  rope    [context, D]: D/2 cosines, then D/2 sines; rotates the pairs (i, i + D/2)
  kv      [rows, 2*kv_heads*D]: all key heads, then all value heads
  cache   [pages, kv_heads, page, D]; page_table [slots, pages_per_slot] names a slot's pages
  qk_norm [2, D]: RMSNorm weights of a query head and of a key head; qk_norm_kind 1 (Qwen3)

  qk_norm_kind  0: none; 1: with weights; 2: q and k of a head are normed without weights
  rope          0: nothing is rotated, and there is no table
  window        0: all positions; else row i sees keys j with 0 <= i - j < window. The pages of a
                slot are then a ring: position p lies in page (p / page) % pages_per_slot
  gated         q is [rows, 2*heads*D]: all query heads, then their gates g; out *= sigmoid(g)
  out_eps       above 0: o * rsqrt(mean(o^2) + out_eps) of every query head, before the gate
  block         1: rows of one sequence side by side are a block, and each sees to its end, with a
                window up to position i + window - 1; else it sees up to itself
  partials      [rows, kv_heads, spans, heads/kv_heads, D + 4]: D sums, their maximum and total
Without q and out nothing attends: keys and values go to the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.buffer import Region
from gpurt.errors import GraphError
from gpurt.graphs.ops import attention_rows_cuda
from gpurt.graphs.ops.attention_merge import attention_merge
from gpurt.graphs.ops.dtypes import dtype_code, to_float32, to_storage
from gpurt.graphs.ops.regions import array_of, columns, part, region_of, required

if TYPE_CHECKING:
    from gpurt.buffer import Buffer
    from gpurt.graph import Graph, Operand, Operator
    from gpurt.planner.lower import Lowering

# Positions; kAttentionSpan of device/bodies/attention_span.hpp. The default context is one span: a
# second operator costs a hop, more than a split saves there.
SPAN = 2048
PARTIAL_PAD = 4  # words behind D sums: maximum, total, two to align the next
# Columns (a row's query head) that a CUDA task attends to at once, by head dimension: kColumns of
# device/bodies/attention.cuh.
_COLUMNS_CUDA = {64: 4, 128: 2}
_COST_POSITIONS = 256  # positions a task is costed at: its true length is known only as it runs


def attention(
    graph: Graph,
    q: Operand | None,
    kv: Operand,
    k_cache: Buffer,
    v_cache: Buffer,
    page_table: Buffer,
    rope: Buffer | None,
    out: Operand | None,
    *,
    heads: int,
    qk_norm: Buffer | None = None,
    scale: float | None = None,
    eps: float = 0.0,
    window: int = 0,
    weightless_qk_norm: bool = False,
    gated: bool = False,
    out_eps: float = 0.0,
    block: bool = False,
    sequence_rows: int | None = None,
    splits: int = 0,
    name: str = "attention",
) -> Operator:
    """Add the attention of a step's rows. k_cache and v_cache share a dtype: f32, f16, bf16 or
    e4m3, which has no scale: what is beyond 448 becomes 448.

    q, out: [rows, heads*D] f32, or None to write the cache only. The module docstring has the other
    shapes. scale: default D**-0.5. sequence_rows: the most that are of one sequence; default: all.
    rope: None to rotate nothing. splits: tasks a kv head if there are several spans; 0: the planner
    chooses. Raises: GraphError if q and out do not fit the heads, or a ring its window and rows.
    """
    _, kv_heads, page, head_dim = k_cache.shape
    _check_widths(f"{graph.name}.{name}", q, out, heads, head_dim, gated)
    _check_pages(graph, name, page_table, window, sequence_rows or region_of(kv).shape[0], page)
    spans = 0 if block or graph.is_over_table else span_count(window, graph.context)
    partials = _partials(graph, out, (kv_heads, spans, heads // kv_heads, head_dim))
    op = graph.op(
        ATTENTION,
        {
            "q": q,
            "kv": kv,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "page_table": page_table,
            "rope": rope,
            "qk_norm": qk_norm,
            "out": out if partials is None else None,
            "partials": partials,
        },
        name=name,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page=page,
        pages_per_slot=page_table.shape[1],
        scale=float(head_dim**-0.5 if scale is None else scale),
        eps=float(eps),
        cache_dtype=dtype_code(k_cache.dtype),
        window=window,
        rope=int(rope is not None),
        qk_norm_kind=2 if weightless_qk_norm else int(qk_norm is not None),
        gated=int(gated),
        out_eps=float(out_eps),
        block=int(block),
        spans=spans if partials is not None else 0,
        splits=splits,
    )
    if partials is not None and out is not None:
        attention_merge(graph, partials, q if gated else None, out, op=op, name=f"{name}_merge")
    return op


def _check_pages(
    graph: Graph, name: str, page_table: Buffer, window: int, rows: int, page: int
) -> None:
    pages, need = page_table.shape[1], ring_pages(window, rows, graph.context, page)
    if pages < need:
        msg = f"a slot has {pages} pages of {page}, window {window}"
        raise GraphError(f"{msg} - at {graph.name}.{name} - {rows} rows a step need {need}")


def _check_widths(
    where: str, q: Operand | None, out: Operand | None, heads: int, head_dim: int, gated: bool
) -> None:
    width = heads * head_dim
    found = [0 if operand is None else region_of(operand).shape[-1] for operand in (q, out)]
    if found not in ([0, 0], [width * (1 + gated), width]):
        msg = f"q has {found[0]} columns and out {found[1]}"
        need = f"q needs {width * (1 + gated)}, out {width}"
        raise GraphError(f"{msg}, for {heads} heads of {head_dim} - at {where} - {need}")


def _partials(graph: Graph, out: Operand | None, shape: tuple[int, int, int, int]) -> Buffer | None:
    """What splits leave, None without spans. shape: kv heads, spans, heads a kv head, D."""
    if out is None or shape[1] == 0:
        return None
    whole = [region_of(out).shape[0], *shape[:3], shape[3] + PARTIAL_PAD]
    return graph.activation(f"{region_of(out).buffer.name}.partials", whole, "f32")


def span_count(window: int, context: int) -> int:
    """Spans that a slot's positions may lie in; 0: attention sums them all at once."""
    if context <= SPAN or 0 < window <= SPAN:
        return 0
    return -(-context // SPAN)


def slot_pages(graph: Graph, name: str, per_slot: int) -> Buffer:
    """A page table that gives every slot so many pages of its own, in order."""
    pages = np.arange(graph.slots * per_slot, dtype=np.uint32).reshape(graph.slots, -1)
    return graph.state(name, [graph.slots, per_slot], "u32", source=pages)


def ring_pages(window: int, rows: int, context: int, page: int) -> int:
    """Pages a slot needs: for the whole context, or for the window of the first row of a step and
    the rows after it, which are written before it has read.
    """
    whole = -(-context // page)
    return whole if window == 0 else min(whole, -(-(window + rows - 2) // page) + 1)


def lower_attention(op: Operator, target: Target, lowering: Lowering) -> bool:
    """On cuda steps of many rows take two operators: attention_rows_cuda.py."""
    rows = op.args["kv"].shape[0]
    if target.kind != "cuda" or op.rows is not None or rows <= attention_rows_cuda.ROWS_MAX:
        return False
    attention_rows_cuda.widen(op, lowering)
    return True


def tile_attention(op: Operator, target: Target) -> list[Tile]:
    """One task per kv head, or one for each of its splits or parts."""
    kv_heads = int(op.params["kv_heads"])
    spans = int(op.params["spans"])
    if spans:
        count = int(op.params["splits"]) or target.workers // kv_heads
        count = max(1, min(count, spans))
        cuts = [_Cut(split, count) for split in range(count)]
    else:
        cuts = _parts(op, target)
    return [_tile(op, head, cut) for head in range(kv_heads) for cut in cuts]


@dataclass(frozen=True)
class _Cut:
    """One of the `count` tasks of a kv head. rows, heads: ranges; absent: all."""

    index: int
    count: int
    rows: tuple[int, int] | None = None
    heads: tuple[int, int] | None = None


def _parts(op: Operator, target: Target) -> list[_Cut]:
    """As many as find work at once in the longest step: each a few heads of a row."""
    kv_heads, group = int(op.params["kv_heads"]), _group(op)
    at_once = _COLUMNS_CUDA.get(int(op.params["head_dim"]), group)
    cache = op.args["k_cache"]
    room = max(1, min(target.workers // kv_heads, cache.shape[_share_axis(cache, target.workers)]))
    if target.kind == "host" or "q" not in op.args:
        return [_Cut(0, 1)]
    rows = op.args["q"].shape[0]
    heads = [(low, min(low + at_once, group)) for low in range(0, group, at_once)]
    if len(heads) > room:
        heads = [(0, group)]
    count = min(rows, room // len(heads))
    if count * len(heads) == 1:
        return [_Cut(0, 1)]
    cuts = [((rows * i // count, rows * (i + 1) // count), h) for i in range(count) for h in heads]
    return [_Cut(i, len(cuts), *cut) for i, cut in enumerate(cuts)]


def _group(op: Operator) -> int:
    return int(op.params["heads"]) // int(op.params["kv_heads"])


def _tile(op: Operator, head: int, cut: _Cut) -> Tile:
    kv_heads, head_dim = int(op.params["kv_heads"]), int(op.params["head_dim"])
    group, spans, args = _group(op), int(op.params["spans"]), op.args
    kv_low, kv_high = head * head_dim, (head + 1) * head_dim
    first, last = ((head * group + h) * head_dim for h in cut.heads or (0, group))
    axis = _share_axis(args["k_cache"], cut.count)
    caches = [
        _share(part(args[name], 1, head, head + 1), axis, cut.index, cut.count)
        for name in ("k_cache", "v_cache")
    ]
    reads = [
        columns(args["kv"], kv_low, kv_high),
        columns(args["kv"], kv_heads * head_dim + kv_low, kv_heads * head_dim + kv_high),
        *caches,
        *(args[name] for name in ("page_table", "rope", "qk_norm") if name in args),
    ]
    writes = list(caches)
    if "q" in args:
        rows = cut.rows or (0, args["q"].shape[0])
        for half in range(2 if op.params["gated"] else 1):
            base = half * kv_heads * group * head_dim
            reads.append(columns(part(args["q"], 0, *rows), base + first, base + last))
        if spans:
            of_head = part(args["partials"], 1, head, head + 1)
            writes.append(_share(of_head, 2, cut.index, cut.count))
        else:
            writes.append(columns(part(args["out"], 0, *rows), first, last))
    element_bytes = args["k_cache"].buffer.dtype.row_bytes(1)
    cost_bytes = 2 * _COST_POSITIONS * head_dim * element_bytes + 8 * (last - first)
    coords = (head, cut.index, cut.count, 0) if spans else (head, *_packed(cut), 0)
    return Tile(coords, tuple(reads), tuple(writes), cost_bytes=cost_bytes)


def _packed(cut: _Cut) -> tuple[int, int]:
    """Ranges as part_of() of device/bodies/attention.cuh reads them."""
    rows, heads = (0 if r is None else r[0] | r[1] << 16 for r in (cut.rows, cut.heads))
    return rows, heads


def _share_axis(cache: Region, count: int) -> int:
    """The axis of a cache of which `count` tasks declare parts: its pages; places in all of them
    if these are more, and the pages too few.
    """
    pages, _, page, _ = cache.shape
    return 0 if pages >= min(count, page) else 2


def _share(region: Region, axis: int, index: int, count: int) -> Region:
    """Part `index` of `count` of an axis."""
    size = region.shape[axis]
    return part(region, axis, size * index // count, size * (index + 1) // count)


def attention_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """The contract above, in float32: all rows into the caches, in place, then row by row."""
    heads, kv_heads, head_dim, page = (
        int(op.params[name]) for name in ("heads", "kv_heads", "head_dim", "page")
    )
    k_cache, v_cache = required(op, arrays, "k_cache"), required(op, arrays, "v_cache")
    table, rope = required(op, arrays, "page_table"), array_of(op, arrays, "rope")
    weights_2D = array_of(op, arrays, "qk_norm")
    window, kind = int(op.params["window"]), int(op.params["qk_norm_kind"])
    qk_norm = weights_2D if kind == 1 else np.ones((2, head_dim), np.float32)
    out_eps = np.float32(op.params["out_eps"])
    scale, eps = np.float32(op.params["scale"]), np.float32(op.params["eps"])
    for row in range(len(step.token)):
        slot, position = int(step.slot[row]), int(step.position[row])
        kv = required(op, arrays, "kv")[row].astype(np.float32).reshape(2, kv_heads, head_dim)
        k_KD, v_KD = kv[0], kv[1]
        if kind:
            assert qk_norm is not None
            k_KD = _rms(k_KD, qk_norm[1], eps)
        if rope is not None and op.params["rope"]:
            k_KD = _rotate(k_KD, rope[position])
        where = int(table[slot, position // page % table.shape[1]]), position % page
        dtype = op.args["k_cache"].buffer.dtype
        k_cache[where[0], :, where[1]] = to_float32(to_storage(k_KD, dtype), dtype)
        v_cache[where[0], :, where[1]] = to_float32(to_storage(v_KD, dtype), dtype)
    if "q" not in op.args:
        return
    for row in range(len(step.token)):
        slot, position = int(step.slot[row]), int(step.position[row])
        q = required(op, arrays, "q")[row].astype(np.float32).reshape(-1, heads, head_dim)
        q_HD = q[0]
        if kind:
            assert qk_norm is not None
            q_HD = _rms(q_HD, qk_norm[0], eps)
        if rope is not None and op.params["rope"]:
            q_HD = _rotate(q_HD, rope[position])
        first = max(0, position + 1 - window) if window else 0
        seen = np.arange(first, _end(op, step, row))
        pages = table[slot, seen // page % table.shape[1]].astype(np.int64)
        k_KPD = np.asarray(k_cache[pages, :, seen % page], np.float32).transpose(1, 0, 2)
        v_KPD = np.asarray(v_cache[pages, :, seen % page], np.float32).transpose(1, 0, 2)
        q_KGD = q_HD.reshape(kv_heads, heads // kv_heads, head_dim)
        scores = np.einsum("kgd,kpd->kgp", q_KGD, k_KPD) * scale
        if op.params["spans"]:
            _leave_partials(required(op, arrays, "partials")[row], scores, v_KPD, seen)
            continue
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out_KGD = np.einsum("kgp,kpd->kgd", weights, v_KPD)
        gates = q[1] if op.params["gated"] else None
        required(op, arrays, "out")[row] = finish_heads(
            out_KGD.reshape(heads, head_dim), out_eps, gates
        )


def _leave_partials(
    to_KSGP: NDArray[Any], scores: NDArray[Any], v_KPD: NDArray[Any], seen: NDArray[Any]
) -> None:
    """One row's sums of each span that it sees."""
    for span in np.unique(seen // SPAN):
        inside = seen // SPAN == span
        top = scores[..., inside].max(axis=-1)
        weights = np.exp(scores[..., inside] - top[..., None])
        sums = np.einsum("kgp,kpd->kgd", weights, v_KPD[:, inside])
        total = weights.sum(axis=-1)
        packed = np.concatenate([sums, top[..., None], total[..., None]], axis=-1)
        to_KSGP[:, span, :, : packed.shape[-1]] = packed


def finish_heads(
    out_HD: NDArray[Any], out_eps: np.float32, gates_HD: NDArray[Any] | None
) -> NDArray[Any]:
    """A row's heads as they are stored: normed, gated, side by side."""
    if out_eps > 0:
        out_HD = _rms(out_HD, np.ones(out_HD.shape[-1], np.float32), out_eps)
    if gates_HD is not None:
        out_HD = out_HD / (1.0 + np.exp(-gates_HD))
    return out_HD.reshape(-1)


def _end(op: Operator, step: StepRows, row: int) -> int:
    """The first position that a row does not see."""
    position, window = int(step.position[row]), int(op.params["window"])
    if not op.params["block"]:
        return position + 1
    last = row
    while last + 1 < len(step.token) and step.slot[last + 1] == step.slot[row]:
        last += 1
    end = int(step.position[last]) + 1
    return min(end, position + window) if window else end


def _rms(x_HD: NDArray[Any], weight_D: NDArray[Any], eps: np.float32) -> NDArray[Any]:
    scale = 1.0 / np.sqrt(np.mean(x_HD * x_HD, axis=-1, keepdims=True) + eps)
    return np.asarray(x_HD * scale * weight_D, np.float32)


def _rotate(x_HD: NDArray[Any], rope_D: NDArray[Any]) -> NDArray[Any]:
    half = x_HD.shape[-1] // 2
    cos, sin = rope_D[:half], rope_D[half:]
    low, high = x_HD[:, :half], x_HD[:, half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


ATTENTION = Body(
    name="attention",
    args=(
        Arg("q", "r", optional=True),
        Arg("kv", "r"),
        Arg("k_cache", "rw"),
        Arg("v_cache", "rw"),
        Arg("page_table", "r"),
        Arg("rope", "r", optional=True),
        Arg("qk_norm", "r", optional=True),
        Arg("out", "w", optional=True),
        Arg("partials", "w", optional=True),
    ),
    params=attention_rows_cuda.PARAMS,
    tile=tile_attention,
    reference=attention_reference,
    payload=True,
    lower=lower_attention,
)
