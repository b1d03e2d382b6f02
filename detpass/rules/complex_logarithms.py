"""Cumulative log-sum-exps of complex numbers: ``log(exp(x).cumsum(0))`` with no overflow, in float64.

Sums of complex numbers cancel, and the logarithm of a small one shows the rounding of its large terms: eager's kernel
for a CPU computes in double precision too. A sum is scanned as ``exp(size) * (a + bi)``, where ``size`` is its largest
term's, and its logarithm is taken once, at the end.

Infinite terms are as eager's: an infinite one keeps its angle whatever finite is added to it; several have the angle
of a sum of infinities, and NaN where those differ in sign. NaN in either part spreads to both. An infinite angle is
kept by the first term and gives NaN after it, where eager may let an infinite sum absorb it.

Neighbours: ``doubling.py`` (the order), ``whole_turns.py`` (which of the angles), ``scan.py`` (the rule).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from detpass.graph_query import is_zero
from detpass.rules import complex_pairs, doubling, whole_turns

Scaled = tuple[Tensor, Tensor, Tensor]
"""``size, a, b`` of the numbers ``exp(size) * (a + bi)``."""


def cumulative(values: Tensor) -> complex_pairs.Pair:
    """Real parts and angles in float64 of the cumulative log-sum-exps of complex ``values [n, *features]``."""
    term, term_angle = complex_pairs.pair_of(values, torch.float64)
    if is_zero(term.shape[0]):
        return term, term_angle
    term = torch.where(term_angle.isnan(), torch.nan, term)
    parts = term, _scaled(torch.cos(term_angle), term), _scaled(torch.sin(term_angle), term)
    size, a, b = doubling.scan(parts, _sum)
    real, angle = size + torch.log(torch.hypot(a, b)), torch.atan2(b, a)
    # The first term, and an infinite one after finite ones, is kept as it is: rounded, it would be no equal's equal.
    alone = whole_turns.before(real, -torch.inf) - term == -torch.inf
    real, angle = torch.where(alone, term, real), torch.where(alone, term_angle, angle)
    angle = torch.where(real == -torch.inf, 0.0, angle)
    angle = whole_turns.unwound((term, term_angle), (real, angle))
    return torch.where(whole_turns.before(angle, 0.0).isnan(), torch.nan, real), angle


def _scaled(part: Tensor, size: Tensor) -> Tensor:
    """``part``; infinite where ``size`` is, and zero where it is minus infinity."""
    infinite = torch.where((size == torch.inf) & (part != 0), torch.inf * part, part)
    return torch.where(size == -torch.inf, 0.0, infinite)


def _sum(left: Sequence[Tensor], right: Sequence[Tensor]) -> Scaled:
    (left_size, a, b), (right_size, c, d) = left, right
    size = torch.maximum(left_size, right_size)
    here, there = _share(left_size, size), _share(right_size, size)
    return size, a * here + c * there, b * here + d * there


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """``exp(part - whole)``, 1 where both are the same infinity."""
    return torch.where(part == whole, 1.0, torch.exp(part - whole))
