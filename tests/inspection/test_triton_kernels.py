"""Users' Triton kernels are found in the graph, and their atomics in the intermediate code, with no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import detpass
from detpass.inspection.triton_kernels import atomics

pytest.importorskip("triton", reason="triton is not installed")

from tests.inspection import user_kernels as kernels


def histogram(x: Tensor, index: Tensor) -> Tensor:
    out = torch.zeros(8)
    kernels.histogram[(1,)](x, index, out, x.numel(), BLOCK=128)
    return out


def locked(x: Tensor, index: Tensor) -> Tensor:
    out, lock = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    kernels.locked[(1,)](x, out, lock, x.numel(), BLOCK=128)
    return out


def largest(x: Tensor, index: Tensor) -> Tensor:
    out = torch.zeros(1)
    kernels.largest[(1,)](x, out, x.numel(), BLOCK=128)
    return out


def counted(x: Tensor, index: Tensor) -> Tensor:
    out = torch.zeros(8, dtype=torch.int64)
    kernels.counted[(1,)](index, out, index.numel(), BLOCK=128)
    return out


def doubled(x: Tensor, index: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernels.doubled[(1,)](x, out, x.numel(), BLOCK=128)
    return out


@pytest.mark.parametrize(
    ("function", "operations"),
    [
        (histogram, ["fadd on f32"]),
        (locked, ["cas on i32", "exch on i32"]),
        (largest, []),
        (counted, []),
        (doubled, []),
    ],
)
def test_order_dependent_atomics_are_found(function: Callable[..., Tensor], operations: list[str]) -> None:
    report = detpass.inspect(function, torch.randn(100), torch.randint(0, 8, (100,)), target="cuda")
    (kernel,) = report.triton_kernels
    assert kernel.name == function.__name__
    assert kernel.unread is None
    assert [text.split(":")[0] for text in kernel.atomics] == operations
    assert kernel.location is not None
    file, _, line = kernel.location.rpartition(":")
    assert f"kernels.{function.__name__}[" in Path(file).read_text().splitlines()[int(line) - 1]
    assert bool(report.problems()) == bool(operations)


def test_nothing_is_launched() -> None:
    x, out = torch.ones(4), torch.zeros(4)

    def write(x: Tensor, out: Tensor) -> Tensor:
        kernels.doubled[(1,)](x, out, 4, BLOCK=4)
        return out

    detpass.inspect(write, x, out, target="cuda")
    assert torch.equal(out, torch.zeros(4))


def test_a_kernel_is_listed_once_for_each_place() -> None:
    def twice(x: Tensor, index: Tensor) -> Tensor:
        for _ in range(3):
            x = doubled(x, index)
        return x

    report = detpass.inspect(twice, torch.randn(100), torch.randint(0, 8, (100,)))
    assert len(report.triton_kernels) == 1


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("%1 = tt.atomic_rmw fadd, acq_rel, gpu, %a, %b, %m : (...) -> tensor<128xf16> loc(#1)", ["fadd on f16"]),
        ("%1 = tt.atomic_rmw add, acq_rel, gpu, %a, %b, %m : (...) -> tensor<128xi64>", []),
        ("%1 = tt.atomic_rmw max, relaxed, gpu, %a, %b, %m : (...) -> i32", []),
        ("%1 = tt.atomic_rmw exch, acq_rel, gpu, %a, %b, %m : (...) -> bf16", ["exch on bf16"]),
        ("%1 = tt.atomic_cas acq_rel, gpu, %a, %b, %c : (...) -> i32", ["cas on i32"]),
        ("%1 = arith.addf %a, %b : tensor<128xf32>", []),
    ],
)
def test_lines_of_intermediate_code(line: str, found: list[str]) -> None:
    assert [text.split(":")[0] for text in atomics(line)] == found
