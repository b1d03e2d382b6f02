"""Arithmetic of complex numbers as pairs of real tensors: what scans of complex numbers combine.

A compiler generates code for real numbers, and calls a kernel for each operation on complex ones. Neighbours:
``scan.py`` (the rule), ``doubling.py`` (the order), ``complex_logarithms.py`` (sums of exponentials).
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
