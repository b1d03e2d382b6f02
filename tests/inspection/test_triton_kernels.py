"""Users' Triton kernels in an inspection and in generated code: found, read and judged with no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import detpass

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


def compacted(x: Tensor, index: Tensor) -> Tensor:
    out, count = torch.zeros(128), torch.zeros(1, dtype=torch.int32)
    kernels.compacted[(1,)](x, out, count, x.numel(), BLOCK=128)
    return out


@pytest.mark.parametrize(
    ("function", "operations"),
    [
        (histogram, ["fadd on f32"]),
        (locked, ["cas on i32", "exch on i32"]),
        (compacted, ["add on i32"]),
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


def test_a_kernel_is_a_record_of_the_report() -> None:
    report = detpass.inspect(histogram, torch.randn(100), torch.randint(0, 8, (100,)), target="cuda")
    (record,) = report.remaining
    assert "histogram, fadd on f32" in record.reason
    (record,) = detpass.inspect(counted, torch.randn(100), torch.randint(0, 8, (100,)), target="cuda").records
    assert (str(record.treatment), record.rule) == ("safe", "exact_kernel")


CODE = [
    (histogram, "float_atomics", ["fadd"]),
    (locked, "locks", ["cas", "exch"]),
    (compacted, "locks", ["add"]),
    (counted, "other_atomics", ["add"]),
    (largest, "other_atomics", ["max", "umin"]),
    (doubled, "other_atomics", []),
]


@pytest.mark.parametrize(("function", "field", "operations"), CODE, ids=[row[0].__name__ for row in CODE])
def test_generated_code_with_a_users_kernel(function: Callable[..., Tensor], field: str, operations: list[str]) -> None:
    inputs = torch.randn(100), torch.randint(0, 8, (100,))
    for backend in ("detpass", "inductor"):
        code = detpass.cuda_code(function, *inputs, backend=backend)
        found = {name: sorted({a.operation for a in getattr(code, name)}) for name in FIELDS}
        assert found == {name: operations if name == field else [] for name in FIELDS}
        assert code.deterministic == (field == "other_atomics")


FIELDS = ("float_atomics", "locks", "other_atomics")


def test_a_declared_kernel_is_accepted_everywhere() -> None:
    inputs = torch.randn(100), torch.randint(0, 8, (100,))
    detpass.register_rule(detpass.Declared(kernels.histogram, "the caller sorts the index into blocks"))
    try:
        code = detpass.cuda_code(histogram, *inputs)
        report = detpass.inspect(histogram, *inputs, target="cuda")
    finally:
        detpass.unregister_rule("declared: histogram")
    assert [atomic.operation for atomic in code.other_atomics] == ["fadd"]
    assert code.deterministic
    assert report.verdict("remaining") == "clean"
    assert not detpass.cuda_code(histogram, *inputs, backend="inductor").deterministic
