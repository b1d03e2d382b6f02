"""Arithmetic of complex numbers as pairs of real tensors: what scans of complex numbers combine.

A compiler generates code for real numbers, and calls a kernel for each operation on complex ones. Neighbours:
``scan.py`` (the rule), ``doubling.py`` (the order), ``whole_turns.py`` (the angles of logarithms).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def pair_of(values: Tensor, dtype: torch.dtype) -> Pair:
    """Real and imaginary parts of complex ``values``, in the real ``dtype``."""
    parts = torch.view_as_real(values.resolve_conj()).to(dtype)
    return parts[..., 0], parts[..., 1]


def complex_of(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The complex tensor of the complex ``dtype`` with these real and imaginary parts."""
    return torch.view_as_complex(torch.stack(list(parts), -1).to(dtype.to_real()))


def product(left: Sequence[Tensor], right: Sequence[Tensor]) -> Pair:
    """``left * right`` as ATen multiplies: infinities are not treated apart."""
    (a, b), (c, d) = left, right
    return a * c - b * d, a * d + b * c


def log_add_exp(left: Sequence[Tensor], right: Sequence[Tensor]) -> Pair:
    """``log(exp(left) + exp(right))`` with ATen's special cases: NaN spreads to both parts, log 0 has the angle 0.

    The angle is within ``pi / 2`` of that of the operand with the larger real part, as ATen's is: not always in
    ``(-pi, pi]``, and other by whole turns when the operands of three sums are paired otherwise.
    """
    (a, b), (c, d) = left, right
    right_is_larger = a < c
    high, high_angle = torch.where(right_is_larger, c, a), torch.where(right_is_larger, d, b)
    low, low_angle = torch.where(right_is_larger, a, c), torch.where(right_is_larger, b, d)
    ratio, turn = torch.exp(low - high), low_angle - high_angle
    alone = low - high == -torch.inf
    real, angle = _log1p(ratio * torch.cos(turn), ratio * torch.sin(turn))
    real, angle = real + high, angle + high_angle

    # An infinite angle is kept as long as nothing is added to it.
    real, angle = torch.where(alone, high, real), torch.where(alone, high_angle, angle)
    nothing = high == -torch.inf
    real, angle = torch.where(nothing, high, real), torch.where(nothing, 0.0, angle)
    infinite = low == torch.inf
    far_angle = torch.atan2(
        _infinite(torch.sin(b)) + _infinite(torch.sin(d)), _infinite(torch.cos(b)) + _infinite(torch.cos(d))
    )
    real, angle = torch.where(infinite, high, real), torch.where(infinite, far_angle, angle)
    unknown = a.isnan() | b.isnan() | c.isnan() | d.isnan()
    return torch.where(unknown, torch.nan, real), torch.where(unknown, torch.nan, angle)


def _infinite(part: Tensor) -> Tensor:
    """``part`` of a number on the unit circle, times infinity."""
    return torch.where(part == 0, part, torch.inf * part)


def _log1p(x: Tensor, y: Tensor) -> Pair:
    """Logarithm of ``1 + x + iy``: of the distance from 1 where that is small, of the modulus elsewhere."""
    near = 0.5 * torch.log1p(x * (2 + x) + y * y)
    far = 0.5 * torch.log((1 + x) * (1 + x) + y * y)
    return torch.where(x * x + y * y < 0.25, near, far), torch.atan2(y, 1 + x)
