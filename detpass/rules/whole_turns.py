"""The angles of cumulative complex log-sum-exps: of the many that differ by whole turns, the ones that a loop finds.

A logarithm of a sum has an angle up to ``2 pi``. Eager adds the terms one by one, and each angle is within ``pi / 2``
of that of the larger of the two that it adds: of the term, or of the sum before it. A scan in another order, such as
``doubling.py``'s, meets other operands, and its angles are off by whole turns. They are counted here, term by term, and
the counts are summed from each place on where the term was the larger: integers, exact in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from detpass.rules import doubling

TURN = 2 * torch.pi


def unwound(terms: Sequence[Tensor], sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """``sums`` with the angles of a loop over ``terms``.

    ``terms`` and ``sums`` are real parts and angles ``[n, *features]``, the sums ``log(exp(terms).cumsum(0))`` up to
    whole turns. Where a real part is infinite or NaN the angle is kept.
    """
    (term, term_angle), (real, angle) = terms, sums
    length: Any = real.shape[0]
    if isinstance(length, int) and length < 2:
        return real, angle
    before = torch.constant_pad_nd(real, [*[0, 0] * (real.dim() - 1), 1, -1], -torch.inf)
    angle_before = torch.constant_pad_nd(angle, [*[0, 0] * (real.dim() - 1), 1, -1], 0.0)
    begins = term >= before  # of equals eager's loop on a CPU takes the term
    ahead = torch.round((angle - torch.where(begins, term_angle, angle_before)) / TURN)
    known = real.isfinite() & ahead.isfinite()
    _, turns = doubling.scan([begins.to(torch.int32), torch.where(known, ahead, 0.0)], _from_the_last_begin)
    return real, torch.where(known, angle - TURN * turns, angle)


def _from_the_last_begin(left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the counts since the last place that begins one."""
    (left_begins, left_count), (right_begins, right_count) = left, right
    count = torch.where(right_begins == 1, right_count, left_count + right_count)
    return torch.maximum(left_begins, right_begins), count
