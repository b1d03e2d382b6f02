"""Operands and bit comparison for the tests of ``detpass.segment``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from detpass.segment import SKIPPED, cpu
from detpass.segment.strategy import Choice, Strategy

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)

FORMS = {
    "scan": Choice(Strategy.SCAN),
    "scan in runs": Choice(Strategy.SCAN, owner_bytes=64),
    "scan, hot": Choice(Strategy.SCAN, hot_permille=100),
    "sorted": Choice(Strategy.SORTED),
    "sparse": Choice(Strategy.SPARSE),
}
"""Every form of the CPU kernels; ``sparse`` is for updates in place."""


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of ``tensor``, so that NaN payloads and signs of zero count."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def assert_same_bits(got: Tensor, expected: Tensor, what: object = "") -> None:
    """Fail, and name the first element that differs, unless both have the same dtype, shape and bits."""
    kinds = (got.dtype, got.shape), (expected.dtype, expected.shape)
    assert kinds[0] == kinds[1], (what, *kinds)
    if not torch.equal(bits(got), bits(expected)):
        size = max(got.element_size(), 1)
        flat = (bits(got).flatten() != bits(expected).flatten()).view(-1, size).any(1).nonzero()
        first = int(flat[0])
        pair = (got.contiguous().flatten()[first].item(), expected.contiguous().flatten()[first].item())
        pytest.fail(
            f"{what}: element {first} of {got.numel()} is {pair[0]!r}, expected {pair[1]!r} ({len(flat)} differ)"
        )


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return random values whose sums round: several magnitudes, for integers the whole range."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if not dtype.is_floating_point and not dtype.is_complex:
        info = torch.iinfo(dtype)
        return torch.randint(max(info.min, -(2**62)), min(info.max, 2**62), shape).to(dtype)
    if dtype.is_complex:
        return torch.complex(values(shape, dtype.to_real()), values(shape, dtype.to_real()))
    return (torch.randn(shape) * torch.rand(shape).mul(6).exp() / 20).to(dtype)


def index(rows: int, segments: int, dtype: torch.dtype = torch.int64, skip: bool = False, wrap: bool = False) -> Tensor:
    """Return a skewed random index: a third of the rows in one segment, some skipped, some negative."""
    result = torch.randint(0, max(segments, 1), (rows,))
    result[::3] = segments // 2
    if wrap and rows:
        result[1::5] -= segments
    result = result.to(dtype)
    if skip and rows:
        result[2::7] = SKIPPED if dtype == torch.int64 else torch.iinfo(dtype).min
    return result


@contextmanager
def forced(choice: Choice, threads: int) -> Iterator[None]:
    """Make the CPU operators take one form and thread count where the kernel has that form."""
    original, worthwhile, before = cpu.choose, cpu.worthwhile_threads, torch.get_num_threads()

    def choose(sizes):  # type: ignore[no-untyped-def]
        if choice.form is Strategy.SCAN and not sizes.scannable:
            return Choice(Strategy.SORTED)
        if choice.form is Strategy.SPARSE and not sizes.in_place:
            return Choice(Strategy.SORTED)
        return choice

    cpu.choose, cpu.worthwhile_threads = choose, lambda *sizes: threads
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        cpu.choose, cpu.worthwhile_threads = original, worthwhile
        torch.set_num_threads(before)
