"""Rounding as the operators' kernels do it, where a compiler would take a liberty.

torchvision's CUDA kernels compute the places of half precision operands in half precision: each operation is rounded,
so that a place near 100 is a multiple of 1/16. A form that computed places exactly would read other cells than the
forward did. Inductor keeps half precision values in float32 between operations and drops ``.half().float()``; here the
rounding is made of integer operations on the bits.

On CUDA Inductor multiplies by the reciprocal of a constant and Triton divides float32 to within two units in the last
place. Where a quotient is rounded up to a number of points or cells, that is one too many now and then: 3.0000002 for
21 / 7. :func:`quotient` is correctly rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def quotient(a: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """``a / divisor`` correctly rounded to the dtype of ``a``; the divisor must not be a constant of the graph.

    Through float64, which Triton divides as IEEE 754 has it. No quotient of two numbers of 24 bits is so close to the
    middle of two others that rounding twice would matter.
    """
    return (a.to(torch.float64) / divisor.to(torch.float64)).to(a.dtype)


def size_as_tensor(size: Any, device: torch.device) -> torch.Tensor:
    """``int64[1]``: a size as data, which the compiler takes for no constant."""
    return torch.arange(size, size + 1, device=device)


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
