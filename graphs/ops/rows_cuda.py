"""Tiles by rows for bodies on cuda that read whole rows for their norms: gated_residual, combine.

coords = (column begin, column end, row begin, row end); a tile whose rows the step lacks returns
at once (device/bodies/rows.cuh). So no row is read by more tiles than its columns need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpurt.errors import GraphError

if TYPE_CHECKING:
    from gpurt.graph import Operator

FLOATS = 4  # of one load
_OF_OTHER_DTYPES = ("routes", "normed")  # whose operators check them


def row_blocks(op: Operator, arg: str, rows_a_tile: int) -> list[tuple[int, int]]:
    """Ranges of the rows of argument `arg`. Raises: GraphError for what the body cannot compute."""
    rows, width = op.args[arg].shape
    where = f"at {op.path}"
    if width % FLOATS:
        msg = f"{width} columns, the CUDA body takes multiples of {FLOATS} - {where}"
        raise GraphError(f'{msg} - pad them, or use device="host"')
    for name, region in op.args.items():
        if name not in _OF_OTHER_DTYPES and region.buffer.dtype.name != "f32":
            raise GraphError(f"{name} is {region.buffer.dtype} - {where} - use f32")
    return [(begin, min(begin + rows_a_tile, rows)) for begin in range(0, rows, rows_a_tile)]
