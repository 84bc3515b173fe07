"""attention: per kv head, q/k norm, rotary embedding, the cache write, then attention.

Legend: B rows of a step, H query heads, G query heads a kv head, D head dimension, P positions.
One task per kv head; it handles all rows, so a row sees the keys that earlier rows of the same
step wrote. Sums run in chunks of one page at absolute positions: bits depend neither on how many
rows a step has nor on the context's capacity.

  rope    [context, D]: D/2 cosines, then D/2 sines; rotates the pairs (i, i + D/2)
  kv      [rows, 2*kv_heads*D]: all key heads, then all value heads
  cache   [pages, kv_heads, page, D]; page_table [slots, pages_per_slot] names a slot's pages
  qk_norm [2, D]: RMSNorm weights of a query head and of a key head (Qwen3); absent: no norm
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.graphs.ops.dtypes import dtype_code
from gpurt.graphs.ops.regions import array_of, columns, part, required

if TYPE_CHECKING:
    from gpurt.buffer import Buffer
    from gpurt.graph import Graph, Operand, Operator

_COST_POSITIONS = 256  # positions a task is costed at: its true length is known only as it runs


def attention(
    graph: Graph,
    q: Operand,
    kv: Operand,
    k_cache: Buffer,
    v_cache: Buffer,
    page_table: Buffer,
    rope: Buffer,
    out: Operand,
    *,
    heads: int,
    qk_norm: Buffer | None = None,
    scale: float | None = None,
    eps: float = 0.0,
    name: str = "attention",
) -> Operator:
    """Add the attention of a step's rows. k_cache and v_cache share a dtype: f32, f16 or bf16.

    q, out: [rows, heads*D] f32. The module docstring has the other shapes. scale: default D**-0.5.
    """
    _, kv_heads, page, head_dim = k_cache.shape
    return graph.op(
        ATTENTION,
        {
            "q": q,
            "kv": kv,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "page_table": page_table,
            "rope": rope,
            "qk_norm": qk_norm,
            "out": out,
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
    )


def tile_attention(op: Operator, target: Target) -> list[Tile]:
    """One task per kv head."""
    del target
    kv_heads, head_dim = int(op.params["kv_heads"]), int(op.params["head_dim"])
    group = int(op.params["heads"]) // kv_heads * head_dim
    width = kv_heads * head_dim
    shared = [op.args[name] for name in ("page_table", "rope", "qk_norm") if name in op.args]
    tiles = []
    for head in range(kv_heads):
        low, high = head * head_dim, (head + 1) * head_dim
        caches = [part(op.args[name], 1, head, head + 1) for name in ("k_cache", "v_cache")]
        reads = [
            columns(op.args["q"], head * group, (head + 1) * group),
            columns(op.args["kv"], low, high),
            columns(op.args["kv"], width + low, width + high),
            *caches,
            *shared,
        ]
        writes = [*caches, columns(op.args["out"], head * group, (head + 1) * group)]
        element_bytes = op.args["k_cache"].buffer.dtype.row_bytes(1)
        cost_bytes = 2 * _COST_POSITIONS * head_dim * element_bytes + 8 * group
        tiles.append(Tile((head, 0, 0, 0), tuple(reads), tuple(writes), cost_bytes=cost_bytes))
    return tiles


def attention_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """The contract above, in float32, one row after another. Caches are written in place."""
    heads, kv_heads, head_dim, page = (
        int(op.params[name]) for name in ("heads", "kv_heads", "head_dim", "page")
    )
    k_cache, v_cache = required(op, arrays, "k_cache"), required(op, arrays, "v_cache")
    table, rope = required(op, arrays, "page_table"), required(op, arrays, "rope")
    qk_norm = array_of(op, arrays, "qk_norm")
    scale, eps = np.float32(op.params["scale"]), np.float32(op.params["eps"])
    for row in range(len(step.token)):
        slot, position = int(step.slot[row]), int(step.position[row])
        q_HD = required(op, arrays, "q")[row].astype(np.float32).reshape(heads, head_dim)
        kv = required(op, arrays, "kv")[row].astype(np.float32).reshape(2, kv_heads, head_dim)
        k_KD, v_KD = kv[0], kv[1]
        if qk_norm is not None:
            q_HD, k_KD = _rms(q_HD, qk_norm[0], eps), _rms(k_KD, qk_norm[1], eps)
        q_HD, k_KD = _rotate(q_HD, rope[position]), _rotate(k_KD, rope[position])
        where = int(table[slot, position // page]), position % page
        k_cache[where[0], :, where[1]] = k_KD
        v_cache[where[0], :, where[1]] = v_KD
        pages = table[slot, : position // page + 1].astype(np.int64)
        k_KPD = _positions(k_cache, pages, position + 1)
        v_KPD = _positions(v_cache, pages, position + 1)
        q_KGD = q_HD.reshape(kv_heads, heads // kv_heads, head_dim)
        scores = np.einsum("kgd,kpd->kgp", q_KGD, k_KPD) * scale
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out_KGD = np.einsum("kgp,kpd->kgd", weights, v_KPD)
        required(op, arrays, "out")[row] = out_KGD.reshape(-1)


def _rms(x_HD: NDArray[Any], weight_D: NDArray[Any], eps: np.float32) -> NDArray[Any]:
    scale = 1.0 / np.sqrt(np.mean(x_HD * x_HD, axis=-1, keepdims=True) + eps)
    return np.asarray(x_HD * scale * weight_D, np.float32)


def _rotate(x_HD: NDArray[Any], rope_D: NDArray[Any]) -> NDArray[Any]:
    half = x_HD.shape[-1] // 2
    cos, sin = rope_D[:half], rope_D[half:]
    low, high = x_HD[:, :half], x_HD[:, half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _positions(cache: NDArray[Any], pages: NDArray[Any], count: int) -> NDArray[Any]:
    """Keys or values of positions [0, count) of a slot: [kv_heads, count, D]."""
    kv_heads, head_dim = cache.shape[1], cache.shape[3]
    picked = cache[pages].transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)
    return np.asarray(picked[:, :count], np.float32)


ATTENTION = Body(
    name="attention",
    args=(
        Arg("q", "r"),
        Arg("kv", "r"),
        Arg("k_cache", "rw"),
        Arg("v_cache", "rw"),
        Arg("page_table", "r"),
        Arg("rope", "r"),
        Arg("qk_norm", "r", optional=True),
        Arg("out", "w"),
    ),
    params=(
        "heads",
        "kv_heads",
        "head_dim",
        "page",
        "pages_per_slot",
        "scale",
        "eps",
        "cache_dtype",
    ),
    tile=tile_attention,
    reference=attention_reference,
    payload=True,
)
