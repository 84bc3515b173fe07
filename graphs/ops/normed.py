"""normed = R(y) * norm: what bodies that make whole rows of a stream put beside y, if it is given.

It is what the matvecs behind would make of y, each of its tasks anew. In bf16 they read half the
bytes and convert nothing. On cuda such a task has whole rows, since y's mean square is in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.buffer import bf16, f32
from gpurt.errors import GraphError
from gpurt.graphs.ops.dtypes import dtype_code
from gpurt.graphs.ops.regions import region_of

if TYPE_CHECKING:
    from gpurt.graph import Operand


def float_code(operand: Operand, what: str, where: str) -> int:
    """The code of its dtype. Raises: GraphError if that is neither f32 nor bf16."""
    dtype = region_of(operand).buffer.dtype
    if dtype not in (f32, bf16):
        raise GraphError(f"{what} is {dtype} - {where} - use f32 or bf16")
    return dtype_code(dtype)


def normed_code(norm: Operand | None, normed: Operand | None, where: str) -> int:
    """The same of normed, f32 if it is absent. Raises: GraphError, also if one of both is."""
    if (norm is None) != (normed is None):
        msg = f"{'normed' if norm is None else 'norm'} alone - {where}"
        raise GraphError(f"{msg} - give both norm and normed, or none")
    return dtype_code(f32) if normed is None else float_code(normed, "normed", where)


def rms_normed(x: NDArray[np.float32], eps: Any) -> NDArray[np.float32]:
    """R(x), a row at a time, in float32."""
    square = np.mean(x * x, axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(square + np.float32(eps)))
