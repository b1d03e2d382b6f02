"""Arithmetic whose result does not depend on the order of its operands."""

from __future__ import annotations

import torch


def addition_is_exact(dtype: torch.dtype) -> bool:
    """Whether sums in ``dtype`` are the same in every order: integers (with wrap-around) and bool."""
    return not (dtype.is_floating_point or dtype.is_complex)
