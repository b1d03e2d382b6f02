"""Rounding to half precision that a compiler cannot leave out.

torchvision's CUDA kernels compute the places of half precision operands in half precision: each operation is rounded,
so that a place near 100 is a multiple of 1/16. A form that computed places exactly would read other cells than the
forward did. Inductor keeps half precision values in float32 between operations and drops ``.half().float()``; here the
rounding is made of integer operations on the bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_DROPPED = 13
"""Bits of a float32's fraction that float16 lacks."""
_LEAST_NORMAL = 2.0**-14
_SUBNORMAL_GRID = 0.75
"""The floats around it are 2**-24 apart, as half precision's subnormal numbers are."""
_OVERFLOW = 65520.0


def rounding(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """What every result of an operation on operands of ``dtype`` goes through, computed in its accumulation dtype."""
    return round_to_half if dtype == torch.float16 else _as_it_is


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def round_to_half(x: torch.Tensor) -> torch.Tensor:
    """``x: float32`` rounded to the nearest value of float16, ties to even, as float32; all values, bit for bit."""
    bits = x.view(torch.int32)
    half = (1 << (_DROPPED - 1)) - 1
    kept = (bits + half + ((bits >> _DROPPED) & 1)) & ~((1 << _DROPPED) - 1)
    size = x.abs()
    small = torch.copysign((size + _SUBNORMAL_GRID) - _SUBNORMAL_GRID, x)
    rounded = torch.where(size < _LEAST_NORMAL, small, kept.view(torch.float32))
    infinite = torch.copysign(torch.full_like(x, torch.inf), x)
    return torch.where(x.isnan(), x, torch.where(size >= _OVERFLOW, infinite, rounded))
