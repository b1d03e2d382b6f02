"""The angles of cumulative complex log-sum-exps: of the many that differ by whole turns, the ones that a loop finds.

A logarithm of a sum has an angle up to ``2 pi``. Eager adds the terms one by one, and each angle is within ``pi / 2``
of that of the larger of the two that it adds: of the term, or of the sum before it. A scan in another order meets other
operands, and its angles are off by whole turns. They are counted here, term by term, and the counts are summed from
each place on where the term was the larger: integers, exact in any order.

Neighbours: ``complex_logarithms.py`` (the sums), ``doubling.py`` (the scan).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from detpass.rules import doubling

TURN = 2 * torch.pi


def unwound(terms: Sequence[Tensor], sums: Sequence[Tensor]) -> Tensor:
    """The angles of ``sums`` in a loop over ``terms``.

    ``terms`` and ``sums`` are real parts and angles ``[n, *features]``, the sums ``log(exp(terms).cumsum(0))`` up to
    whole turns, the first as its term. An infinite sum has its own angle where it takes an infinite term, and keeps it
    after that; unknown angles and those of ``log 0`` stay.
    """
    (term, term_angle), (real, angle) = terms, sums
    length: Any = real.shape[0]
    if isinstance(length, int) and length < 2:
        return angle
    begins = term >= before(real, -torch.inf)  # of equals eager's loop on a CPU takes the term
    gap = (angle - torch.where(begins, term_angle, before(angle, 0.0))) / TURN
    ahead = torch.where(real == torch.inf, torch.where(begins, 0.0, gap), torch.round(gap))
    known = ahead.isfinite() & (real != -torch.inf)
    _, turns = doubling.scan([begins.to(torch.int32), torch.where(known, ahead, 0.0)], _from_the_last_begin)
    return torch.where(known, angle - TURN * turns, angle)


def before(values: Tensor, first: float) -> Tensor:
    """What stands before each place along the first dimension: ``first``, then ``values`` without the last."""
    return doubling.shifted(values, 0, 1, -1, first)


def _from_the_last_begin(left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the counts since the last place that begins one."""
    (left_begins, left_count), (right_begins, right_count) = left, right
    count = torch.where(right_begins == 1, right_count, left_count + right_count)
    return torch.maximum(left_begins, right_begins), count
