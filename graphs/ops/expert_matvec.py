"""expert_matvec: y = epilogue(W[e] norm(x)) for every pair of a slot's expert e. Both halves of an
expert: up (x by row, swiglu) and down (x by pair). See route.py for slots, pairs and `routes`.

Legend: R rows, T experts a row, E experts, K columns and N rows of one expert's W. A tile is a
range of rows of W in one slot; a tile of a slot that no expert took returns at once. K is never
cut, so a pair's sum depends neither on tiles nor on who shares the expert.

  norm     xn = x * rsqrt(mean(x^2) + eps) * norm, as in matvec
  swiglu   y[i] = silu(z[2i]) * z[2i+1]      rows of W interleaved by the loader: gate, up
  w_scale  [E, 2] f32: z of even rows is multiplied by [e, 0], of odd rows by [e, 1] with swiglu;
           all rows by [e, 0] without. The second level of nvfp4

Which rows of y a slot writes is known only as it runs. A tile declares row `slot` in their place:
both cut the pairs by slot, disjoint and in whole, and so order the tasks in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Stream, Target, Tile
from gpurt.buffer import Region
from gpurt.errors import GraphError
from gpurt.graphs.ops.dtypes import dtype_code
from gpurt.graphs.ops.publish import NOT_PUBLISHED, published_columns
from gpurt.graphs.ops.regions import array_of, columns, part, region_of, required
from gpurt.graphs.ops.route import RoutesLayout

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator

# Host tiles: some ten microseconds of one core, so that taking a task is cheap beside it.
_TILE_BYTES = 64 << 10
_TILE_ROWS_MULTIPLE = 16


def expert_matvec(
    graph: Graph,
    x: Operand,
    w: Operand,
    routes: Operand,
    y: Operand,
    *,
    top_k: int,
    norm: Operand | None = None,
    w_scale: Operand | None = None,
    swiglu: bool = False,
    x_per_pair: bool = False,
    eps: float = 0.0,
    name: str = "expert_matvec",
) -> Operator:
    """Add one half of the chosen experts.

    x: [rows, K] f32, or [rows*top_k, K] with x_per_pair. w: [E, N, K]. norm: [K] f32, with eps.
    w_scale: [E, 2] f32. y: [rows*top_k, N], or [rows*top_k, N/2] with swiglu; f32.
    Raises: GraphError if the shapes do not fit together.
    """
    experts, n, k = region_of(w).shape
    pairs, width = region_of(y).shape
    given = region_of(x).shape
    wanted = (pairs if x_per_pair else pairs // top_k, k)
    out = n // 2 if swiglu else n
    if given != wanted or width != out:
        msg = f"W is [{experts}, {n}, {k}], but x is {list(given)} and y [{pairs}, {width}]"
        needs = f"x needs {list(wanted)}, y {out} columns"
        raise GraphError(f"{msg} - at {graph.name}.{name} - {needs}")
    return graph.op(
        EXPERT_MATVEC,
        {"x": x, "w": w, "norm": norm, "w_scale": w_scale, "routes": routes, "y": y},
        name=name,
        n=n,
        k=k,
        epilogue=int(swiglu),
        w_dtype=dtype_code(region_of(w).buffer.dtype),
        x_per_pair=int(x_per_pair),
        top_k=top_k,
        eps=float(eps),
        **NOT_PUBLISHED,
    )


def layout_of(op: Operator) -> RoutesLayout:
    """The layout of the operator's `routes`."""
    top_k = int(op.params["top_k"])
    return RoutesLayout(op.args["y"].shape[-2] // top_k, op.args["w"].shape[0], top_k)


def tile_expert_matvec(op: Operator, target: Target) -> list[Tile]:
    """Slot by slot, the same ranges of rows of W in each: live tasks of a step come first."""
    if target.kind == "cuda":
        from gpurt.graphs.ops.expert_matvec_cuda import tile_experts

        return tile_experts(op, target)
    _, n, k = op.args["w"].shape
    row_bytes = op.args["w"].buffer.dtype.row_bytes(k)
    fitting = _TILE_BYTES // row_bytes
    rows = max(_TILE_ROWS_MULTIPLE, fitting // _TILE_ROWS_MULTIPLE * _TILE_ROWS_MULTIPLE)
    ranges = [(begin, min(begin + rows, n)) for begin in range(0, n, rows)]
    return expert_tiles(op, ranges, [(e - b) * row_bytes + 4 * (k + e - b) for b, e in ranges])


def expert_tiles(
    op: Operator,
    ranges: Sequence[tuple[int, int]],
    cost_bytes: Sequence[int],
    code: int = 0,
    streams: Callable[[int], Sequence[Stream | None]] | None = None,
) -> list[Tile]:
    """Tiles slot by slot: in each these ranges of rows of W, which move `cost_bytes`.

    Slots share their regions of W, tiles of a slot its row of x. code: coords[3], of the target's.
    streams: of a slot's tiles.
    """
    none = [None] * len(ranges)
    args, divisor = op.args, 2 if op.params["epilogue"] == 1 else 1
    shared = [args["routes"], *(args[name] for name in ("norm", "w_scale") if name in args)]
    parts = [part(args["w"], 1, begin, end) for begin, end in ranges]
    x, tiles = args["x"], []
    for slot in range(layout_of(op).slots):
        if op.params["x_per_pair"]:
            x = _slot_row(op, args["x"], slot)
        y = _slot_row(op, args["y"], slot)
        of_slot = none if streams is None else streams(slot)
        for (begin, end), w, stream, size in zip(ranges, parts, of_slot, cost_bytes, strict=True):
            out = (begin // divisor, end // divisor)
            published = op.params["y_ranks"]
            writes = published_columns(op, y, *out) if published else (columns(y, *out),)
            tiles.append(Tile((slot, begin, end, code), (x, w, *shared), writes, stream, size))
    return tiles


def published_experts(op: Operator, share: int) -> bool:
    """Whether its tasks can store shares of y on one rank each, word by word."""
    from gpurt.graphs.ops.expert_matvec_cuda import expert_cut

    if not share or op.params["epilogue"]:
        return False
    ranges = expert_cut(op).tiles(op.args["w"].shape[1])
    return all(begin // share == (end - 1) // share for begin, end in ranges)


def packing_expert_matvec(op: Operator, arg: str, target: Target) -> str:
    """Row-major as stored on the host; on cuda the order in which the tensor cores read."""
    if target.kind != "cuda":
        return ""
    from gpurt.graphs.ops.expert_matvec_cuda import packing_experts

    return packing_experts(op, arg)


def expert_matvec_reference(
    op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows
) -> None:
    """The contract above, in float32, slot by slot."""
    del step  # the rows of the step are in `routes`
    layout, routes = layout_of(op), required(op, arrays, "routes")
    x, y = required(op, arrays, "x"), required(op, arrays, "y")
    w_scale, norm = array_of(op, arrays, "w_scale"), array_of(op, arrays, "norm")
    for slot in range(int(routes[0])):
        at = layout.slot(slot)
        expert, count = int(routes[at]), int(routes[at + 1])
        users = routes[at + 2 : at + 2 + 2 * count].astype(np.int64)
        rows, pairs = users[0::2], users[1::2]
        x_nK = x[pairs if op.params["x_per_pair"] else rows].astype(np.float32)
        if norm is not None:
            square = np.mean(x_nK * x_nK, axis=-1, keepdims=True)
            x_nK = x_nK / np.sqrt(square + np.float32(op.params["eps"])) * norm
        z_nN = x_nK @ required(op, arrays, "w")[expert].astype(np.float32).T
        if op.params["epilogue"] == 1:
            gate, up = z_nN[:, 0::2], z_nN[:, 1::2]
            if w_scale is not None:
                gate, up = gate * w_scale[expert, 0], up * w_scale[expert, 1]
            z_nN = gate / (1.0 + np.exp(-gate)) * up
        elif w_scale is not None:
            z_nN = z_nN * w_scale[expert, 0]
        y[pairs] = z_nN


EXPERT_MATVEC = Body(
    name="expert_matvec",
    args=(
        Arg("x", "r"),
        Arg("w", "r"),
        Arg("norm", "r", optional=True),
        Arg("w_scale", "r", optional=True),
        Arg("routes", "r"),
        Arg("y", "w"),
    ),
    params=("n", "k", "epilogue", "w_dtype", "x_per_pair", "top_k", "eps", *NOT_PUBLISHED),
    tile=tile_expert_matvec,
    reference=expert_matvec_reference,
    ranks=True,
    published=published_experts,
    packing=packing_expert_matvec,
    dynamic=True,
)


def _slot_row(op: Operator, region: Region, slot: int) -> Region:
    """Row `slot` of a buffer of pairs; the last slot stands for all rows that are left."""
    layout = layout_of(op)
    last = slot == layout.slots - 1
    axis = len(region.shape) - 2
    return part(region, axis, slot, region.shape[axis] if last else slot + 1)
