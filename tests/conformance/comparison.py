"""Compares what a rewritten function returns: bit for bit between runs, within roundings with eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.rules.direct import bits

RELATIVE = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 2e-5,
    torch.complex64: 2e-5,
    torch.bfloat16: 4e-2,
    torch.float16: 5e-3,
}
"""Error allowed as a share of the largest expected value: a few hundred roundings of the dtype in another order, and
for the 16-bit floats some roundings of intermediate results that one side keeps in float32."""


def difference_of_bits(first: Sequence[Any], again: Sequence[Any]) -> str | None:
    """The first result whose bits differ between two runs, or None."""
    for number, (a, b) in enumerate(zip(first, again, strict=True)):
        same = _same_bits(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b
        if not same:
            return f"result {number} differs between two runs"
    return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(bits(a.resolve_conj().resolve_neg()), bits(b.resolve_conj().resolve_neg()))


def difference_of_values(found: Sequence[Any], wanted: Sequence[Any], dtype: torch.dtype) -> str | None:
    """The first result that is further from the wanted one than ``RELATIVE[dtype]`` allows, or None."""
    if len(found) != len(wanted):
        return f"{len(found)} results, expected {len(wanted)}"
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            why = _difference(a, b, RELATIVE.get(dtype, RELATIVE[torch.float32]))
        elif a is None and isinstance(b, Tensor):
            # A compiled function leaves out the gradient of an input that nothing depends on; eager may give zeros.
            why = None if not b.any() else "no gradient"
        elif b is None and isinstance(a, Tensor):
            why = None if not a.any() else "a gradient where eager has none"
        else:
            why = None if type(a) is type(b) and a == b else f"{a!r}, expected {b!r}"
        if why is not None:
            return f"result {number} of {len(found)}: {why}"
    return None


def _difference(found: Tensor, wanted: Tensor, relative: float) -> str | None:
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
    if not (found.is_floating_point() or found.is_complex()):
        wrong = found.resolve_conj() != wanted
        return None if not wrong.any() else f"{int(wrong.sum())} of {wrong.numel()} integers differ"
    a, b = _components(found), _components(wanted)
    if not torch.equal(a.isnan(), b.isnan()):
        return "NaN at other places"
    finite = b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return "infinities at other places"
    if not finite.any():
        return None
    limit = relative * max(b[finite].abs().max().item(), 1e-30)
    error = (a[finite] - b[finite]).abs().max().item()
    return None if error <= limit else f"error {error:.3g}, allowed {limit:.3g}"


def _components(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.double()
