"""Errors in units in the last place: how many representable numbers a result is away from the exact one."""

from __future__ import annotations

import torch
from torch import Tensor

_MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
_CHUNK = 1 << 24
_SAMPLES = 1 << 20


def ulp_errors(value: Tensor, wanted: Tensor) -> tuple[float, float]:
    """(median, largest) of |value - wanted| over the spacing of ``value``'s dtype at ``wanted`` (float64).

    The median of a large tensor is that of about a million elements spread over it.
    """
    if value.numel() == 0:
        return 0.0, 0.0
    flat, exact = value.detach().flatten(), wanted.detach().flatten()
    step = max(1, flat.numel() // _SAMPLES)
    median = float(_errors(flat[::step], exact[::step]).median())
    largest = max(float(_errors(a, b).max()) for a, b in zip(flat.split(_CHUNK), exact.split(_CHUNK), strict=True))
    return median, largest


def _errors(value: Tensor, wanted: Tensor) -> Tensor:
    mantissa, tiny = _MANTISSA[value.dtype], torch.finfo(value.dtype).tiny
    exact = wanted.double()
    _, exponent = torch.frexp(exact.abs().clamp(min=tiny))
    spacing = torch.ldexp(torch.ones_like(exact), exponent - 1 - mantissa)
    return (value.double() - exact).abs() / spacing
