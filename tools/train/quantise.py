"""NVFP4: experts rounded as the release stores them, in training and at export.

w = e2m1(code) * e4m3(scale of a block of 16 along K) * a second-level scale, float32, one for the
gate half of an expert, one for its up half, one for its down projection. Training sees the rounded
values and passes gradients straight through, so storing them changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 16
_CODE_MAX, _SCALE_MAX = 6.0, 448.0
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TINY = 1e-30


@dataclass(frozen=True)
class Nvfp4:
    """As the checkpoint has it. codes: [E, N, K/2] uint8, the even element in the low nibble.
    scales: [E, N, K/16] float8_e4m3fn. second: [E, halves] float32.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    second: torch.Tensor


def rounded(w: torch.Tensor, halves: int) -> torch.Tensor:
    """[E, N, K] as NVFP4 holds it, with the gradient of w itself. halves: 2 for gate and up."""
    with torch.no_grad():
        index, sign, scale, second = _quantise(w, halves)
        levels = torch.tensor(_LEVELS, device=w.device)
        # In the order of gpurt and of the layout's other readers: code * scale, then the second.
        value = (levels[index] * sign).unflatten(-1, (-1, BLOCK)) * scale[..., None]
        value = value.flatten(-2) * _per_row(second, w.shape[1])
    return w + (value - w).detach()


def packed(w: torch.Tensor, halves: int) -> Nvfp4:
    """[E, N, K] as stored; multiplies out to what `rounded` gives."""
    index, sign, scale, second = _quantise(w, halves)
    code = index | ((sign < 0).to(index.dtype) << 3)
    codes = (code[..., 0::2] | (code[..., 1::2] << 4)).to(torch.uint8)
    return Nvfp4(codes, scale.to(torch.float8_e4m3fn), second)


def _quantise(
    w: torch.Tensor, halves: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Level numbers, signs, block scales (float32 values of e4m3) and second-level scales."""
    w = w.float()
    experts, rows, _ = w.shape
    amax = w.abs().reshape(experts, halves, -1).amax(-1)
    second = (amax / (_CODE_MAX * _SCALE_MAX)).clamp(min=_TINY)
    scaled = (w / _per_row(second, rows)).unflatten(-1, (-1, BLOCK))
    scale = (scaled.abs().amax(-1) / _CODE_MAX).to(torch.float8_e4m3fn).float()
    unit = scaled / scale.clamp(min=_TINY)[..., None]
    levels = torch.tensor(_LEVELS, device=w.device)
    index = torch.bucketize(unit.abs(), (levels[1:] + levels[:-1]) / 2)
    index = torch.where(scale[..., None] > 0, index, 0).flatten(-2)
    sign = torch.where(w < 0, -1.0, 1.0)
    return index, sign, scale, second


def _per_row(second: torch.Tensor, rows: int) -> torch.Tensor:
    """[E, halves] as [E, rows, 1]."""
    return second.repeat_interleave(rows // second.shape[1], 1)[..., None]
