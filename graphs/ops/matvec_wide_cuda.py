"""matvec on cuda for steps of more than 16 rows: x once into the tensor cores' order, then W x.

    matvec_input   x, its norm's weights -> bf16 as the tensor cores take it, and factors a row
    matvec_wide    that and W -> y: units of 64 rows of W by 128 step rows, some a task

W lies as for smaller steps, so both share it, and sums have the order of device/bodies/matvec.cuh:
the bits of a row are those of a step of 16 rows. device/DESIGN.md says what this costs and why.
Legend: B rows of a step, K columns of W, N rows of W.

The input is [blocks of 128 rows, chunks of 64 columns, tiles of 8 rows, 512]: what a task takes of
a chunk is contiguous. A tile's part of it, 1 KB, is eight cores of 8 rows x 8 columns of the tensor
cores, two a mma. Lane (row, c) has column(c, 2 core + e) of packing.py at e. In which order a row
is squared hangs on how many K groups a packed tile of W has: there is a factor for each size, [5,
8] for 8 rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops.dtypes import to_bf16, to_float32
from gpurt.graphs.ops.packing import (
    CHUNK,
    ROW_TILE,
    mma16_name,
    mma16_tiles,
)
from gpurt.graphs.ops.regions import array_of, columns, part, required

if TYPE_CHECKING:
    from gpurt.buffer import Region
    from gpurt.graph import Operator
    from gpurt.planner.lower import Lowering

TILE_SIZES = 5  # row tiles of a packed tile: 1, 2, 4, 8, 16
STEP_TILE = 8  # rows of a step in one mma: its n
TILES_AT_ONCE = 4  # row tiles of W in a task
BLOCK_ROWS = 128  # of a step, in a task
CHUNKS_MAX = 1024  # a task's order of chunks is a table beside its stages
COLUMNS_MAX = CHUNKS_MAX * CHUNK
UNITS_MAX = 16  # of a task
INPUT_CHUNKS = 32  # of an input task: as long as a trip to L2 needs to be worth a task
PARAMS = (
    *("n", "k", "epilogue", "eps", "sampled", "w_dtype", "x_dtype", "y_dtype"),
    *("scale", "softcap", "row_tiles"),
)


def widen(op: Operator, lowering: Lowering, row_tiles: int) -> None:
    """The two operators in place of `op`; one if another matvec has the same input. row_tiles: of a
    packed tile of W. Raises: GraphError for more columns than a task has room to order.
    """
    args, params = op.args, {**op.params, "row_tiles": row_tiles}
    n, k = args["w"].shape
    rows = args["x"].shape[0]
    if k > COLUMNS_MAX:
        msg = f"W has {k} columns, the CUDA body of {rows} rows a step takes {COLUMNS_MAX}"
        raise GraphError(f"{msg} - at {op.path} - build the graph with rows=16 or fewer")
    tiles, chunks = -(-rows // STEP_TILE), -(-k // CHUNK)

    def make() -> tuple[Region | None, ...]:
        blocks = -(-rows // BLOCK_ROWS)
        x = lowering.activation(op, "x", [blocks, chunks, BLOCK_ROWS * CHUNK], "bf16")
        factors = None
        if "norm" in args:
            factors = lowering.activation(op, "factors", [tiles, TILE_SIZES * STEP_TILE], "f32")
        made = {"x": args["x"], "norm": args.get("norm"), "y": x, "factors": factors}
        lowering.add(op, "input", MATVEC_INPUT, made, params)
        return x, factors

    reads = (args["x"], args.get("norm"))
    of = [None if r is None else (r.buffer.index, r.bounds) for r in reads]
    kind = [params[name] for name in ("eps", "sampled", "x_dtype")]
    # The sizes of W's packed tiles, as device/bodies/matvec_input.cuh finds them.
    all_tiles = -(-n // ROW_TILE)
    sizes = (row_tiles if all_tiles >= row_tiles else 0) | all_tiles % row_tiles
    key = ("matvec_input", *of, *kind, sizes if "norm" in args else 0)
    x, factors = lowering.once(key, reads, make)
    lowering.add(op, "wide", MATVEC_WIDE, {**args, "x": x, "norm": factors}, params)


def tile_input(op: Operator, target: Target) -> list[Tile]:
    """Eight rows of x a task; without a norm some of their columns: coords = (row tile, first
    chunk, last chunk, 0).
    """
    del target
    x, y = op.args["x"], op.args["y"]
    rows, k = x.shape
    chunks = -(-k // CHUNK)
    step = chunks if "norm" in op.args else INPUT_CHUNKS
    tiles = []
    for index, first in enumerate(range(0, rows, STEP_TILE)):
        # Sampled rows may be any.
        own = (0, rows) if op.params["sampled"] else (first, min(first + STEP_TILE, rows))
        for begin in range(0, chunks, step):
            end = min(begin + step, chunks)
            of_x = columns(part(x, 0, *own), begin * CHUNK, min(end * CHUNK, k))
            writes = [part(_input_rows(y, first, first + STEP_TILE), 1, begin, end)]
            reads = [of_x]
            if "norm" in op.args:
                reads.append(op.args["norm"])
                writes.append(part(op.args["factors"], 0, index, index + 1))
            cost = STEP_TILE * (end - begin) * CHUNK * 6
            tiles.append(Tile((index, begin, end, 0), tuple(reads), tuple(writes), None, cost))
    return tiles


def tile_wide(op: Operator, target: Target) -> list[Tile]:
    """Units of up to 64 rows of W, of packed tiles of one size, by up to 128 rows of the step. A
    task has as many as a worker would get, one after another. coords = (first row of W, last,
    first step row, last): of the W rows in between it has all step rows, so in a short step all
    tasks have some.
    """
    n, k = op.args["w"].shape
    rows = op.args["y"].shape[0]
    size = int(op.params["row_tiles"])
    ranges = _w_ranges(n, size)
    steps = [(first, min(first + BLOCK_ROWS, rows)) for first in range(0, rows, BLOCK_ROWS)]
    units = [(w, step) for w in ranges for step in steps]
    most = min(-(-len(units) // target.workers), UNITS_MAX, max(1, CHUNKS_MAX // -(-k // CHUNK)))
    # Those behind are of other packed sizes, or smaller.
    whole = n // (size * ROW_TILE) * size // TILES_AT_ONCE * len(steps)
    cut = [units[i : min(i + most, whole)] for i in range(0, whole, most)]
    return [_tile_of(op, own) for own in [*cut, *([unit] for unit in units[whole:])]]


def _tile_of(op: Operator, units: list[tuple[tuple[int, int], tuple[int, int]]]) -> Tile:
    args, divisor = op.args, 2 if op.params["epilogue"] else 1
    of_w: dict[tuple[int, int], tuple[int, int]] = {}  # step rows: rows of W
    for w, step in units:
        of_w[step] = (of_w.get(step, w)[0], w[1])
    reads, writes = [part(args["w"], 0, units[0][0][0], units[-1][0][1])], []
    for (first, last), (begin, end) in of_w.items():
        own, out = (first, last), (begin // divisor, end // divisor)
        groups = first // STEP_TILE, -(-last // STEP_TILE)
        reads.append(_input_rows(args["x"], first, groups[1] * STEP_TILE))
        if "norm" in args:
            reads.append(part(args["norm"], 0, *groups))
        if "residual" in args:
            reads.append(columns(part(args["residual"], 0, *own), *out))
        writes.append(columns(part(args["y"], 0, *own), *out))
    (begin, _), (first, _) = units[0]
    (_, end), (_, last) = units[-1]
    k = args["w"].shape[1]
    cost = sum(2 * k * (w[1] - w[0] + step[1] - step[0]) for w, step in units)
    return Tile((begin, end, first, last), tuple(reads), tuple(writes), None, cost)


def _input_rows(x: Region, begin: int, end: int) -> Region:
    """Of the input: rows of one block, whole tiles."""
    block = begin // BLOCK_ROWS
    own = part(x, 0, block, block + 1)
    return columns(own, begin % BLOCK_ROWS * CHUNK, (end - block * BLOCK_ROWS) * CHUNK)


def _w_ranges(n: int, row_tiles: int) -> list[tuple[int, int]]:
    """Rows of W of each task: parts of a packed tile, or several that are of one size."""
    most, ranges = TILES_AT_ONCE * ROW_TILE, list[tuple[int, int]]()
    size = 0  # packed rows of the tiles in the last range
    for begin, end in mma16_tiles(n, row_tiles * ROW_TILE):
        packed = -(-(end - begin) // ROW_TILE) * ROW_TILE
        fits = ranges and packed == size and end - ranges[-1][0] <= most
        if fits:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges += [(at, min(at + most, end)) for at in range(begin, end, most)]
        size = packed
    return ranges


def packing_wide(op: Operator, arg: str, target: Target) -> str:
    """W as smaller steps have it."""
    del target
    return mma16_name(_group(op), int(op.params["row_tiles"])) if arg == "w" else ""


def _group(op: Operator) -> int:
    """Columns side by side in a lane: of a granule of x."""
    from gpurt.wire import DTypeCode

    return 8 if op.params["x_dtype"] == DTypeCode.BF16 else 4


def input_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """The contract above."""
    rows = len(step.token)
    x = required(op, arrays, "x")[:rows].astype(np.float32)
    if op.params["sampled"]:
        x = x[step.sample_rows]
    norm = array_of(op, arrays, "norm")
    if norm is not None:
        factor = 1 / np.sqrt(np.mean(x * x, axis=-1) + np.float32(op.params["eps"]))
        factors = required(op, arrays, "factors").reshape(-1, TILE_SIZES, STEP_TILE)
        for row, value in enumerate(factor):
            factors[row // STEP_TILE, :, row % STEP_TILE] = value
        x = x * norm
    lanes = in_lanes(x, _group(op))
    required(op, arrays, "y")[: len(lanes)] = to_float32(to_bf16(lanes), op.args["y"].buffer.dtype)


def in_lanes(x_BK: NDArray[np.float32], group: int) -> NDArray[np.float32]:
    """[ceil(B / 128), chunks, 8192]: rows in the order of cores, what is missing as zeros."""
    rows, k = x_BK.shape
    blocks, chunks, tiles = -(-rows // BLOCK_ROWS), -(-k // CHUNK), BLOCK_ROWS // STEP_TILE
    padded = np.zeros((blocks * BLOCK_ROWS, chunks * CHUNK), np.float32)
    padded[:rows, :k] = x_BK
    # column(c, q) = 4 G (q / G) + G c + q % G
    cut = padded.reshape(blocks, tiles, STEP_TILE, chunks, 16 // group, 4, group)
    of_lane = cut.transpose(0, 3, 1, 2, 5, 4, 6).reshape(blocks, chunks, tiles, STEP_TILE * 4, 8, 2)
    return of_lane.transpose(0, 1, 2, 4, 3, 5).reshape(blocks, chunks, -1)


MATVEC_INPUT = Body(
    name="matvec_input",
    args=(
        Arg("x", "r"),
        Arg("norm", "r", optional=True),
        Arg("y", "w"),
        Arg("factors", "w", optional=True),
    ),
    params=PARAMS,
    tile=tile_input,
    reference=input_reference,
    payload=True,
    ranks=True,
)

# `norm` is a factor for each row, by which its sums are multiplied.
MATVEC_WIDE = Body(
    name="matvec_wide",
    args=(
        Arg("x", "r"),
        Arg("w", "r"),
        Arg("norm", "r", optional=True),
        Arg("residual", "r", optional=True),
        Arg("y", "w"),
    ),
    params=PARAMS,
    tile=tile_wide,
    packing=packing_wide,
    ring=True,
)
