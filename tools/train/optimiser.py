"""Optimiser: Muon for matrices, AdamW for everything else, and the schedule of their rates.

Muon's step is the nearest orthogonal matrix to the momentum, found by a Newton-Schulz iteration.
Matrices of one shape go through it together; an expert is a matrix, and its gate and up halves are
two. Source: K. Jordan, https://kellerjordan.github.io/posts/muon.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_ITERATIONS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MOMENTUM = 0.95
_BETAS = (0.9, 0.97)


class Optimiser:
    """rates: of each parameter by name. A matrix of `muon` gets orthogonal steps; of the others,
    those in `rates` get AdamW's.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        muon: Mapping[str, float],
        adam: Mapping[str, float],
        weight_decay: float,
    ) -> None:
        """muon, adam: rates at the schedule's height, by name. weight_decay: of Muon's matrices."""
        self._muon = {name: (parameters[name], rate) for name, rate in muon.items()}
        self._decay = weight_decay
        self._momentum = {name: torch.zeros_like(parameters[name]) for name in muon}
        by_rate = defaultdict(list)
        for name, rate in adam.items():
            by_rate[rate].append(parameters[name])
        groups = [{"params": params, "lr": rate, "rate": rate} for rate, params in by_rate.items()]
        cuda = next(iter(parameters.values())).is_cuda
        self._adam = torch.optim.AdamW(groups, betas=_BETAS, eps=1e-10, weight_decay=0, fused=cuda)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Move everything, `scale` times its rate, and forget the gradients."""
        for group in self._adam.param_groups:
            group["lr"] = group["rate"] * scale
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self._muon_step(scale)

    def _muon_step(self, scale: float) -> None:
        by_shape = defaultdict(list)
        for name, (parameter, rate) in self._muon.items():
            assert parameter.grad is not None, name
            momentum = self._momentum[name].lerp_(parameter.grad, 1 - _MOMENTUM)
            step = parameter.grad.lerp_(momentum, _MOMENTUM)  # Nesterov's look ahead
            matrices = _matrices(name, step)
            by_shape[(matrices.shape[-2:], rate)].append((name, parameter, matrices))
        for (shape, rate), members in by_shape.items():
            whole = orthogonal(torch.cat([matrices for _, _, matrices in members]))
            whole = whole * (rate * scale * max(1.0, shape[0] / shape[1]) ** 0.5)
            parts = whole.split([len(matrices) for _, _, matrices in members])
            for (_, parameter, _), part in zip(members, parts, strict=True):
                parameter.mul_(1 - rate * scale * self._decay)
                parameter.sub_(part.reshape(parameter.shape))
                parameter.grad = None

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"momentum": self._momentum, "adam": self._adam.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        for name, momentum in state["momentum"].items():
            self._momentum[name].copy_(momentum)
        self._adam.load_state_dict(state["adam"])


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """[S, N, K]: roughly U V^T of each matrix's singular value decomposition, float32."""
    dtype = torch.bfloat16 if matrices.is_cuda else torch.float32
    x = matrices.to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).float()


def rate_scale(step: int, steps: int, warmup: float, decay: float) -> float:
    """Warm-up, stable, decay: 0 to 1, 1, then linearly to 0 over the last part."""
    rise = (step + 1) / max(1.0, warmup * steps)
    fall = (steps - step) / max(1.0, decay * steps)
    return max(0.0, min(1.0, rise, fall))


def _matrices(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name.endswith("gate_up_proj"):
        tensor = tensor.unflatten(1, (2, -1))
    return tensor.reshape(-1, *tensor.shape[-2:])
