"""The CUDA kernels compiled ahead of time for sm_80 and sm_90 with no GPU, and what the machine code shows.

The interpreter accepts what the compiler rejects, so this is a test of its own. Printed with ``pytest -s``: registers.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from detpass.segment import triton_kernels
from detpass.segment.constants import CHUNK_ROWS, FAN_IN

triton = pytest.importorskip("triton")

NAMES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WIDTHS = [64, 20, 33, 1]


@dataclass(frozen=True)
class Compiled:
    ptx: str
    sass: str
    usage: str

    @property
    def registers(self) -> int:
        return int(re.search(r"REG:(\d+)", self.usage)[1])  # type: ignore[index]

    @property
    def stack(self) -> int:
        return int(re.search(r"STACK:(\d+)", self.usage)[1])  # type: ignore[index]


def _tool(name: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([str(path), *arguments], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout + done.stderr


@functools.cache
def compiled(
    dtype: torch.dtype,
    columns: int,
    level: int,
    capability: int = 90,
    reduce: str = "sum",
    last: bool = False,
    has_dest: bool = False,
) -> Compiled:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from detpass.segment.triton_level import segment_level

    if triton_kernels.interpreted():
        pytest.skip("TRITON_INTERPRET is set: there is nothing to compile")
    accumulate = triton_kernels.accumulator(dtype)
    read = dtype if level == 0 else accumulate
    tile = triton_kernels.tile_for(columns, read.itemsize)
    pointers = {"source": read, "perm": torch.int64, "offsets": torch.int32, "partial": accumulate}
    pointers.update(dest=dtype, out=dtype)
    sizes = ("num_segments", "num_rows", "source_rows", "partial_rows", "tiles")
    span = CHUNK_ROWS * FAN_IN**level
    constants: dict[str, Any] = {
        "D": columns,
        "BELOW": 0 if level == 0 else span // FAN_IN,
        "SPAN": span,
        "FAN": CHUNK_ROWS if level == 0 else FAN_IN,
        "LAST": last,
        "HAS_DEST": has_dest,
        "REDUCE": reduce,
        "IDENTITY": triton_kernels._integer_identity(dtype, reduce),
        "ACC": triton_kernels.language_dtype(accumulate),
        "BLOCK_R": tile.block_r,
        "BLOCK_D": tile.block_d,
        "COLUMN_BLOCKS": -(-columns // tile.block_d),
        "UNROLL": tile.unroll,
        "INTERPRETED": False,
    }
    signature = {name: "*" + NAMES[kind] for name, kind in pointers.items()}
    signature |= dict.fromkeys(sizes, "i32") | dict.fromkeys(constants, "constexpr")
    place = segment_level.arg_names.index
    source = ASTSource(
        segment_level,
        signature,
        {(place(name),): value for name, value in constants.items()},
        {(place(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return Compiled(
            kernel.asm["ptx"], _tool("nvdisasm", "-c", file.name), _tool("cuobjdump", "-res-usage", file.name)
        )


def _no_spill(kernel: Compiled) -> None:
    assert kernel.stack == 0
    assert not re.search(r"\b(LDL|STL)\b", kernel.sass)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
@pytest.mark.parametrize("columns", WIDTHS)
def test_sums_are_plain_additions_without_spills(dtype: torch.dtype, columns: int, level: int) -> None:
    kernel = compiled(dtype, columns, level)
    _no_spill(kernel)
    kind = "f64" if dtype == torch.float64 else "f32"
    assert re.search(rf"add(\.rn)?\.{kind}", kernel.ptx)
    assert not re.search(r"\bfma\b|\bmad\.(rn\.)?f", kernel.ptx)
    assert ".ftz" not in kernel.ptx
    assert not re.search(r"\b(FFMA|DFMA|FMUL|DMUL)\b|\bFADD\.FTZ", kernel.sass)
    assert not re.search(r"^\s*(@%p\d+ )?(atom|red)\.", kernel.ptx, re.MULTILINE)
    assert kernel.registers <= 64
    print(f"sm_90 {NAMES[dtype]:>5} D={columns:<3} level {level}: {kernel.registers} registers")


@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
def test_loads_are_as_wide_as_a_row_allows(dtype: torch.dtype) -> None:
    vector = 16 // dtype.itemsize
    wide, odd = compiled(dtype, 64, 0), compiled(dtype, 33, 0)
    assert "LDG.E.128" in wide.sass
    assert "STG.E.128" in wide.sass
    assert "LDG.E.128" not in odd.sass
    assert ("LDG.E.128" in compiled(dtype, 20, 0).sass) == (20 % vector == 0)
    assert "LDG.E.128" in compiled(dtype, 64, 1).sass  # partials of a level are read as wide


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=NAMES.get)
def test_the_same_holds_for_sm_80(dtype: torch.dtype) -> None:
    for level in (0, 1):
        kernel = compiled(dtype, 64, level, capability=80)
        _no_spill(kernel)
        assert "LDG.E.128" in kernel.sass
        assert not re.search(r"\bfma\b", kernel.ptx)
        assert ".ftz" not in kernel.ptx


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["prod", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8], ids=NAMES.get)
def test_other_reductions_compile(dtype: torch.dtype, reduce: str) -> None:
    for level in (0, 1):
        kernel = compiled(dtype, 20, level, reduce=reduce, has_dest=True)
        _no_spill(kernel)
        assert not re.search(r"\bfma\b", kernel.ptx)
        assert ".ftz" not in kernel.ptx


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.uint8], ids=NAMES.get)
def test_last_levels_and_destinations_compile(dtype: torch.dtype) -> None:
    for level, columns in ((0, 64), (0, 33), (1, 64), (2, 1)):
        for has_dest in (False, True):
            kernel = compiled(dtype, columns, level, last=True, has_dest=has_dest)
            _no_spill(kernel)
            assert not re.search(r"\bfma\b", kernel.ptx)
