"""The CUDA kernels against the reference, bit for bit, in Triton's interpreter (``triton_worker.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from detpass.segment import triton_kernels
from detpass.segment.constants import CHUNK_ROWS, FAN_IN
from detpass.segment.triton_kernels import levels, segment_sum_sorted, sorted_plan, tile_for

WORKER = Path(__file__).with_name("triton_worker.py")
COMPARISONS = {
    "sums-float32": 36,
    "sums-float64": 36,
    "sums-float16": 36,
    "sums-bfloat16": 36,
    "long-float32": 4,
    "long-bfloat16": 4,
    "deep": 24,
    "reductions": 94,
    "forms": 13,
    "updates": 12,
}


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(WORKER.parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    settings = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=settings, timeout=600)


SLOW = {"sums-float64", "sums-float16", "sums-bfloat16", "long-float32", "long-bfloat16", "reductions", "deep"}


@pytest.mark.parametrize(
    "group", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in COMPARISONS]
)
def test_kernels_have_the_bits_of_the_reference(group: str) -> None:
    triton, numpy = pytest.importorskip("triton"), pytest.importorskip("numpy")
    if triton.__version__ < "3.7" and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("Triton's interpreter before 3.7 cannot run loops with numpy 2.4: pip install 'numpy<2.4'")
    done = _python(str(WORKER), group, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["interpreted"]
    assert result["different"] == []
    assert result["count"] == COMPARISONS[group]


def test_without_triton_the_module_imports_and_the_call_names_the_remedy() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
from detpass.segment.triton_kernels import segment_sum_sorted, sorted_plan
index = torch.tensor([1, 0, 1])
perm, offsets = sorted_plan(index, 2)
assert perm.tolist() == [1, 0, 2] and offsets.tolist() == [0, 1, 3]
try:
    segment_sum_sorted(torch.ones(3, 2), perm, offsets)
except ImportError as error:
    assert "detpass[triton]" in str(error) and torch.__version__ in str(error), error
else:
    raise AssertionError("no error")
"""
    done = _python("-c", code)
    assert done.returncode == 0, done.stderr


def test_levels_cover_the_rows_and_no_more() -> None:
    for rows in (0, 1, CHUNK_ROWS):
        assert [(level.below, level.span, level.last) for level in levels(rows)] == [(0, CHUNK_ROWS, True)]
    assert [level.last for level in levels(CHUNK_ROWS + 1)] == [False, True]
    assert len(levels(CHUNK_ROWS * FAN_IN)) == 2
    assert len(levels(CHUNK_ROWS * FAN_IN + 1)) == 3
    assert [level.fan for level in levels(CHUNK_ROWS * FAN_IN + 1)] == [CHUNK_ROWS, FAN_IN, FAN_IN]


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_tiles_fill_128_threads_with_the_widest_load_that_divides_a_row(item_bytes: int) -> None:
    for columns in (1, 2, 3, 4, 8, 16, 20, 33, 64, 96, 768, 1000):
        tile = tile_for(columns, item_bytes)
        vector = 16 // item_bytes
        while columns % vector:
            vector //= 2
        per_thread = tile.block_r * tile.block_d / 128
        assert per_thread in (vector, 2, 4)
        assert per_thread >= vector
        assert tile.block_d & (tile.block_d - 1) == 0
        assert tile.block_d >= min(columns, 32 * vector)
        assert tile.block_d // per_thread <= 32


def test_operands_without_a_meaning_are_refused() -> None:
    perm, offsets = sorted_plan(torch.tensor([0, 1, 0]), 2)
    rows = torch.ones(3, 2)
    with pytest.raises(ValueError, match="not one of sum, prod, amax, amin, mean, last"):
        segment_sum_sorted(rows, perm, offsets, "median")
    with pytest.raises(ValueError, match=r"expected source \[B, N, D\] or \[N, D\]"):
        segment_sum_sorted(rows[0], perm, offsets)
    with pytest.raises(TypeError, match=r"detpass\.segment\.fallback"):
        segment_sum_sorted(rows.to(torch.complex64), perm, offsets, "prod")
    with pytest.raises(TypeError, match="no order"):
        segment_sum_sorted(rows.to(torch.complex64), perm, offsets, "amax")
    with pytest.raises(TypeError, match="convert to a floating dtype"):
        segment_sum_sorted(rows.int(), perm, offsets, "mean")
    with pytest.raises(TypeError, match="one is complex"):
        segment_sum_sorted(rows, perm, offsets, out_dtype=torch.complex64)
    with pytest.raises(ValueError, match="another reduction than mean"):
        segment_sum_sorted(rows, perm, offsets, "mean", dest=rows[:2])


def test_addresses_of_chunks_and_partials_never_meet() -> None:
    """The closed forms of ``triton_level.py`` in plain integers: every chunk has one entry, partials do not overlap."""
    generator = torch.Generator().manual_seed(0)
    for below, span in ((0, 4), (4, 12), (12, 36), (0, 7), (7, 14)):
        for _ in range(60):
            lengths = torch.randint(0, 90, (9,), generator=generator).tolist()
            lengths[3] = 0
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
            rows = sum(lengths)
            firsts = len(lengths) if below == 0 else rows // (below + 1)
            entries: set[int] = set()
            slots: set[int] = set()
            for segment, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                if below and length <= below:
                    continue
                for chunk in range(max(1, -(-length // span))):
                    if chunk == 0:
                        entry = segment if below == 0 else start // (below + 1)
                        position = 0 if below == 0 else (entry + 1) * (below + 1)
                    else:
                        entry = firsts + start // span + chunk - 1
                        position = (entry - firsts + 1) * span
                    assert entry not in entries
                    assert entry < firsts + rows // span
                    entries.add(entry)
                    assert position == 0 or start < position <= start + length
                    if length > span:
                        slot = start // (span + 1) + start // span + chunk
                        assert slot not in slots
                        assert slot < rows // (span + 1) + rows // span
                        slots.add(slot)


def test_the_interpreter_is_off_unless_asked_for() -> None:
    pytest.importorskip("triton")
    assert triton_kernels.interpreted() == (os.environ.get("TRITON_INTERPRET") == "1")
