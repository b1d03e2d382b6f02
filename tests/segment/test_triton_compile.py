"""The CUDA kernels compiled ahead of time for sm_80 and sm_90 with no GPU, and what the machine code shows.

The interpreter accepts what the compiler rejects, so this is a test of its own. ``benchmarks/cuda_kernels.py`` compiles
and prints the table of registers.
"""

from __future__ import annotations

import re

import pytest
import torch

from detpass.segment import triton_kernels
from tests.test_benchmarks import load

triton = pytest.importorskip("triton")

cuda_kernels = load("benchmarks/cuda_kernels.py")
NAMES = cuda_kernels.NAMES
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def compiler() -> None:
    if triton_kernels.interpreted():
        pytest.skip("TRITON_INTERPRET is set: there is nothing to compile")


def check(kernel: cuda_kernels.Kernel) -> None:
    """What holds for every kernel: no spill, no contraction, no flushed denormal, no atomic."""
    assert kernel.stack == 0
    assert kernel.spills == 0
    assert not re.search(r"\bfma\b|\bmad\.(rn\.)?f", kernel.ptx)
    assert ".ftz" not in kernel.ptx
    assert not re.search(r"\b[FD]FMA\b|\bF(ADD|MUL)\.FTZ", kernel.sass)
    assert not re.search(r"^\s*(@%p\d+ )?(atom|red)\.", kernel.ptx, re.MULTILINE)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize("columns", cuda_kernels.WIDTHS)
def test_sums_are_plain_additions(dtype: torch.dtype, columns: int, level: int) -> None:
    kernel = cuda_kernels.level(dtype, columns, level)
    check(kernel)
    assert re.search(rf"add(\.rn)?\.{'f64' if dtype == torch.float64 else 'f32'}", kernel.ptx)
    assert not re.search(r"\b(FMUL|DMUL)\b", kernel.sass)
    assert kernel.registers <= 64


@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
def test_loads_are_as_wide_as_a_row_allows(dtype: torch.dtype) -> None:
    wide, odd = cuda_kernels.level(dtype, 64, 0), cuda_kernels.level(dtype, 33, 0)
    assert wide.widest_load == 128
    assert "STG.E.128" in wide.sass
    assert odd.widest_load == 64, "perm's"
    bits = 8 * dtype.itemsize
    assert (cuda_kernels.level(dtype, 20, 0).widest_load == 128) == (20 * bits % 128 == 0)
    assert cuda_kernels.level(dtype, 64, 1).widest_load == 128, "partials of a level are read as wide"


@pytest.mark.parametrize("columns", [64, 33])
def test_updates_of_rows_compile(columns: int) -> None:
    kernel = cuda_kernels.update(torch.bfloat16, columns)
    check(kernel)
    assert kernel.widest_load == (128 if columns == 64 else 64)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
def test_every_kernel_of_every_dtype_compiles(dtype: torch.dtype, capability: int) -> None:
    for columns in (64, 33):
        for level in (0, 1):
            kernel = cuda_kernels.level(dtype, columns, level, capability)
            check(kernel)
            assert kernel.registers <= (64 if dtype.itemsize >= 4 or dtype.is_floating_point else 96)  # int64 inside
            assert columns != 64 or kernel.widest_load == 128
        check(cuda_kernels.update(dtype, columns, capability))


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["prod", "amax", "amin"])
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
def test_other_reductions_compile(dtype: torch.dtype, reduce: str) -> None:
    for level in (0, 1):
        check(cuda_kernels.level(dtype, 20, level, reduce=reduce, has_dest=True))
    check(cuda_kernels.update(dtype, 20, reduce=reduce))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
def test_last_levels_and_destinations_compile(dtype: torch.dtype) -> None:
    for level, columns in ((0, 64), (0, 33), (1, 64), (2, 1), (3, 1)):
        for has_dest in (False, True):
            check(cuda_kernels.level(dtype, columns, level, last=True, has_dest=has_dest))


def test_sizes_beyond_32_bits_compile() -> None:
    for level in (0, 1):
        check(cuda_kernels.level(torch.float32, 1, level, sizes="i64"))
    check(cuda_kernels.update(torch.float32, 1, sizes="i64"))
