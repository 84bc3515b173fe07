"""Element types as bodies and references see them: codes for parameters, and conversion to float32.

Owns: the number of each dtype in a task's parameters (`DTypeCode` of device/task_record.hpp) and
the plain numpy reading of every stored format. Knows no file format and no body.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.buffer import DType
from gpurt.errors import GraphError

_CODES = {
    "f32": 0,
    "f16": 1,
    "bf16": 2,
    "i32": 3,
    "u32": 4,
    "u8": 5,
    "q4_1": 6,
    "q8_0": 7,
    "nvfp4": 8,
    "e4m3": 9,
}
# e2m1: a sign, two exponent bits, one bit of mantissa
_E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_E2M1 = np.concatenate([_E2M1_MAGNITUDES, -_E2M1_MAGNITUDES])


def dtype_code(dtype: DType) -> int:
    """The `DTypeCode` of a dtype, as bodies read it from their parameters."""
    return _CODES[dtype.name]


def to_float32(stored: NDArray[Any], dtype: DType) -> NDArray[np.float32]:
    """Stored elements as float32, exactly.

    stored: any shape in `dtype.storage`; block formats as bytes, whole blocks along the last axis.
    Returns: the same leading axes, the last one in elements. Raises: GraphError for integer types.
    """
    if dtype.name == "f32" or dtype.name == "f16":
        return stored.astype(np.float32)
    if dtype.name == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if dtype.name == "q8_0":
        blocks = _blocks(stored, dtype)
        codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.float32)
        return _elements(codes * _half(blocks, 0), stored)
    if dtype.name == "q4_1":
        blocks = _blocks(stored, dtype)
        nibbles = blocks[..., 4:]
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.float32)
        return _elements(codes * _half(blocks, 0) + _half(blocks, 2), stored)
    if dtype.name == "e4m3":
        return e4m3_to_float32(stored)
    if dtype.name == "nvfp4":
        blocks = _blocks(stored, dtype)
        packed = blocks[..., :8]
        pairs = np.stack([_E2M1[packed & 15], _E2M1[packed >> 4]], axis=-1)
        values = pairs.reshape(*packed.shape[:-1], 16)
        return _elements(values * e4m3_to_float32(blocks[..., 8:]), stored)
    msg = f"{dtype.name} elements are not numbers of a model"
    raise GraphError(f"{msg} - at dtype {dtype.name} - use a float or block format")


def e4m3_to_float32(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """float8_e4m3fn: a sign, four exponent bits (bias 7), three of mantissa; no infinity."""
    return _E4M3[codes]


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Float32 rounded to bfloat16 bit patterns: to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Float32 rounded to e4m3: to nearest, ties to even; beyond 448 it is 448; NaN stays NaN."""
    magnitude = np.abs(values.astype(np.float32))
    # Codes ascend with what they stand for, so a value lies between two neighbours.
    upper = np.clip(np.searchsorted(_E4M3[:127], magnitude), 1, 126)
    middle = (_E4M3[upper - 1] + _E4M3[upper]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (upper % 2 == 0))
    code = np.where(np.isnan(values), 127, np.where(up, upper, upper - 1))
    return (code | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def to_storage(values: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    """Float32 values in the storage of an unblocked float dtype. Raises: GraphError otherwise."""
    if dtype.name == "f32":
        return np.ascontiguousarray(values, np.float32)
    if dtype.name == "f16":
        return np.ascontiguousarray(values.astype(np.float16))
    if dtype.name == "bf16":
        return to_bf16(values)
    if dtype.name == "e4m3":
        return to_e4m3(values)
    msg = f"gpurt does not quantise to {dtype.name}"
    raise GraphError(f"{msg} - at dtype {dtype.name} - convert to f32, f16, bf16 or e4m3")


def _e4m3_table() -> NDArray[np.float32]:
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    positive = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    positive[127] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


_E4M3 = _e4m3_table()


def _blocks(stored: NDArray[Any], dtype: DType) -> NDArray[Any]:
    count = stored.shape[-1] // dtype.block_bytes
    return np.ascontiguousarray(stored).reshape(*stored.shape[:-1], count, dtype.block_bytes)


def _half(blocks: NDArray[Any], at: int) -> NDArray[np.float32]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16).astype(np.float32)


def _elements(values: NDArray[np.float32], stored: NDArray[Any]) -> NDArray[np.float32]:
    return values.reshape(*stored.shape[:-1], -1)
