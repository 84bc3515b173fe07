"""Arrays at gpurt's boundary: numpy and DLPack objects in, numpy arrays out, without a copy where
the layout allows one. Host only; torch tensors come and go through DLPack, torch is not imported.

numpy has no bfloat16, so a bf16 tensor is taken as its uint16 bit patterns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.errors import RequestError

if TYPE_CHECKING:
    from gpurt.buffer import Buffer, DType

# Device types of the DLPack specification.
DL_CPU = 1


def as_array(value: Any) -> NDArray[Any]:
    """`value` as a numpy array: a view if it has `__dlpack__`; bf16 as uint16 bit patterns.

    Raises: RequestError if it lies on another device or cannot be an array.
    """
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__dlpack__"):
        device = int(value.__dlpack_device__()[0])
        if device != DL_CPU:
            what = f"a tensor on DLPack device type {device}"
            raise RequestError(f"{what} - at the argument - copy it to the CPU first")
        # A tensor that takes part in autograd refuses to be shared; its values are all we need.
        source = value.detach() if getattr(value, "requires_grad", False) else value
        try:
            return np.from_dlpack(source)
        except (BufferError, RuntimeError, TypeError):
            # numpy's own reader knows no bfloat16.
            from gpurt._native import dlpack_view

            return dlpack_view(source)
    array: NDArray[Any] = np.asarray(value)
    if array.dtype.kind not in "biuf":
        what = f"{type(value).__name__} of dtype {array.dtype}"
        raise RequestError(
            f"{what} is no array of numbers - at the argument - pass numpy or DLPack"
        )
    return array


def to_storage(buffer: Buffer, value: Any) -> NDArray[Any]:
    """`value` as `buffer` stores it, C-contiguous. Floats become bf16 by rounding to nearest even.

    Raises: RequestError if the shape differs or the conversion would change the kind of number.
    """
    array = as_array(value)
    where = f"at input {buffer.name}"
    if array.shape != buffer.shape:
        what = f"an array of shape {list(array.shape)} for {buffer}"
        raise RequestError(f"{what} - {where} - reshape it")
    storage = buffer.dtype.storage
    if array.dtype == storage:
        return np.ascontiguousarray(array)
    if buffer.dtype.name == "bf16" and array.dtype.kind == "f":
        from gpurt.graphs.ops.dtypes import to_bf16

        return to_bf16(array.astype(np.float32))
    if not np.can_cast(array.dtype, storage, "same_kind"):
        what = f"{array.dtype} elements do not fit {buffer}"
        raise RequestError(f"{what} - {where} - convert them to {storage}")
    return np.ascontiguousarray(array, storage)


def from_storage(array: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """A stored array as people read it: bf16 and block formats as float32, the rest as it is."""
    if dtype.name in ("bf16", "q4_1", "q8_0"):
        from gpurt.graphs.ops.dtypes import to_float32

        return to_float32(array, dtype)
    return array
