"""nvfp4 on the host: decoding equals the definition bit for bit, and a matrix in nvfp4 gives the
bits of the same matrix in f32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt.buffer import DTYPES
from gpurt.graphs.ops.dtypes import to_float32
from tests.helpers.host_bodies import bodies, guarded, levels
from tests.unit.test_body_matvec import Case, same_bits

LEVELS = levels()


def e2m1(code: int) -> float:
    """A sign, two bits of exponent with bias 1, one of mantissa; exponent 0 is subnormal."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return math.copysign(magnitude, -1 if code & 8 else 1)


def e4m3(code: int) -> float:
    """A sign, four bits of exponent with bias 7, three of mantissa; all ones is NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    magnitude = (
        mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )
    return math.copysign(magnitude, -1 if code & 128 else 1)


def every_block() -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """[512, 9] blocks: 256 scales, with the 16 codes in rising and in mixed order; their values."""
    orders = [list(range(16)), [5, 12, 0, 15, 8, 7, 3, 9, 14, 1, 10, 6, 13, 2, 11, 4]]
    blocks = np.zeros((512, 9), np.uint8)
    values = np.zeros((512, 16))
    for i in range(512):
        codes, scale = orders[i // 256], i % 256
        for element, code in enumerate(codes):
            blocks[i, element // 2] |= code << (4 * (element % 2))
            values[i, element] = e2m1(code) * e4m3(scale)
        blocks[i, 8] = scale
    return guarded(blocks), values


@pytest.mark.parametrize("level", LEVELS)
def test_every_code_with_every_scale_is_its_definition_bit_for_bit(level: str) -> None:
    blocks, values = every_block()
    got, expected = bodies(level).decode_nvfp4(blocks), values.astype(np.float32)
    assert (expected.astype(np.float64) == values)[~np.isnan(values)].all()  # exact in f32
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(got.view(np.uint32)[number], expected.view(np.uint32)[number])


def test_the_references_reading_is_the_definition_too() -> None:
    blocks, values = every_block()
    got, number = to_float32(blocks, DTYPES["nvfp4"]), ~np.isnan(values)
    expected = values.astype(np.float32)
    np.testing.assert_array_equal(got.view(np.uint32)[number], expected.view(np.uint32)[number])
    np.testing.assert_array_equal(np.isnan(got), ~number)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_matvec_finds_every_code_in_its_place(level: str, rows: int) -> None:
    # x picks one element: y is that element of every row of W, for each of the 16 in turn.
    blocks, values = every_block()
    finite = np.flatnonzero(~np.isnan(values[:, 0]))
    case = Case(len(finite), 16, rows, "nvfp4")
    case.arrays["w"] = guarded(blocks[finite])
    for element in range(16):
        case.arrays["x"][...] = 0
        case.arrays["x"][rows - 1, element] = 1
        y = case.run(level)[rows - 1]
        # A sum with +0 loses the sign of -0 and nothing else.
        np.testing.assert_array_equal(y, values[finite, element].astype(np.float32))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 21])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (7, 48), (130, 1040)])
@pytest.mark.parametrize(
    "options", [{}, {"norm": True, "residual": True}, {"scale": 0.37}], ids=str
)
def test_bits_are_those_of_the_same_matrix_in_f32(
    level: str, rows: int, n: int, k: int, options: dict[str, Any]
) -> None:
    case = Case(n, k, rows, "nvfp4", seed=n + k, **options)
    wide = Case(n, k, rows, "f32", **options)
    wide.arrays = dict(case.arrays, w=guarded(to_float32(case.arrays["w"], DTYPES["nvfp4"])))
    assert same_bits(case.run(level), wide.run(level))


@pytest.mark.parametrize("level", LEVELS)
def test_a_scale_that_is_no_number_reaches_its_row_and_no_other(level: str) -> None:
    case = Case(9, 64, 5, "nvfp4")
    case.arrays["w"][4, 9 + 8] = 0x7F
    finite = np.isfinite(case.run(level))
    assert not finite[:, 4].any()
    assert np.delete(finite, 4, axis=1).all()


@pytest.mark.parametrize("level", LEVELS)
def test_bits_do_not_depend_on_tiles(level: str) -> None:
    case = Case(150, 160, 5, "nvfp4", norm=True, swiglu=True)
    whole = case.run(level, coords=[(0, 150)])
    assert same_bits(case.run(level, coords=[(0, 2), (2, 68), (68, 70), (70, 150)]), whole)
    assert same_bits(case.run(level, scratch_bytes=64), whole)
