"""The plain torch form against the reference, and an installation without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detpass.segment import fallback, ops, reference
from tests.segment.forms import COMPLEX, FLOATS, INTEGERS, assert_same_bits, index, values

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + COMPLEX, ids=str)
@pytest.mark.parametrize("reduce", reference.REDUCTIONS)
def test_same_bits_as_the_reference(dtype, reduce):
    if dtype.is_complex and reduce in ("amax", "amin"):
        pytest.skip("complex numbers have no order")
    where = index(1500, 6, skip=True, wrap=True)
    dest, source = values((2, 6, 3), dtype), values((2, 1500, 3), dtype)
    total = reference.segment_accumulate(None, where, source, 6, reduce, True)
    onto = reference.segment_accumulate(dest, where, source, 6, reduce, True)
    assert_same_bits(fallback.segment_reduce(source, where, 6, reduce, True, ""), total)
    assert_same_bits(fallback.segment_accumulate(dest, where, source, reduce, True, ""), onto)
    assert_same_bits(fallback.segment_accumulate_(dest, where, source, reduce, True, ""), onto)


@pytest.mark.parametrize("members", [255, 256, 257, 65536, 65537])
def test_levels(members):
    where = torch.cat([torch.ones(members, dtype=torch.int64), torch.tensor([0, 2])])
    source = values((1, members + 2, 1), torch.float32)
    expected = reference.segment_accumulate(None, where, source, 3)
    assert_same_bits(fallback.segment_reduce(source, where, 3, "sum", False, ""), expected)


SCRIPT = """
import warnings, torch
from detpass import segment
from detpass.errors import KernelBuildWarning
from detpass.segment import reference
torch.manual_seed(0)
source, dest, where = torch.randn(2, 900, 3), torch.randn(2, 5, 3), torch.randint(0, 5, (900,))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        got = segment.segment_accumulate(dest, where, source)
    assert segment.last_positions(where, 5).shape == (900,)
    assert segment.linear_index([where], [5]).tolist() == where.tolist()
    perm, offsets = segment.plan(where, 5)
    planned = segment.planned_accumulate(dest, perm, offsets, source)
kinds = [w.category for w in caught]
assert kinds == [KernelBuildWarning], kinds
print(str(caught[0].message))
expected = reference.segment_accumulate(dest, where, source, 5)
assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
assert torch.equal(planned.view(torch.int32), expected.view(torch.int32))
"""


@pytest.mark.parametrize("compiler", ["missing", "failing"])
def test_without_a_compiler_one_warning_and_the_same_bits(compiler, tmp_path):
    broken = tmp_path / "broken-cxx"
    if compiler == "failing":
        broken.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho no such header >&2\nexit 1\n'
        )
        broken.chmod(0o755)
    environment = {**os.environ, "CXX": str(broken), "DETPASS_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert ("no such header" if compiler == "failing" else "no C++ compiler") in done.stdout
    assert "Install a C++17 compiler" in done.stdout


@settings(max_examples=int(os.environ.get("DETPASS_FUZZ_EXAMPLES", "40")), deadline=None)
@given(data=st.data())
def test_fuzz_kernels_against_the_fallback(data):
    """Any sizes, strides, dtypes and thread counts: the operators and the plain torch form agree in every bit."""
    draw = data.draw
    batch, rows, segments, columns = (draw(st.integers(0, high)) for high in (3, 3000, 40, 40))
    if not segments:
        rows = 0
    dtype = draw(st.sampled_from(FLOATS + INTEGERS + COMPLEX))
    reduce = draw(st.sampled_from(("sum", "prod") if dtype.is_complex else reference.REDUCTIONS))
    torch.set_num_threads(draw(st.integers(1, 4)))
    wrap = draw(st.booleans())
    where = index(rows, segments, draw(st.sampled_from((torch.int32, torch.int64))), draw(st.booleans()), wrap)
    order = draw(st.permutations(range(3)))
    back = [order.index(axis) for axis in range(3)]

    def laid_out(shape):
        return values(tuple(shape[axis] for axis in order), dtype).permute(*back)

    dest, source = laid_out((batch, segments, columns)), laid_out((batch, rows, columns))
    expected = fallback.segment_accumulate(dest, where, source, reduce, wrap, "")
    assert_same_bits(ops._segment_accumulate(dest, where, source, reduce, wrap), expected)
    total = fallback.segment_reduce(source, where, segments, reduce, wrap, "")
    assert_same_bits(ops._segment_reduce(source, where, segments, reduce, wrap), total)
    assert_same_bits(ops._segment_accumulate_(dest, where, source, reduce, wrap), expected)
