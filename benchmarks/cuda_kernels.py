"""What Triton and ptxas make of the CUDA kernels: registers, stack, width of loads, with no GPU in the machine.

    python benchmarks/cuda_kernels.py [--capability 90 80] [--quick]

Every kernel is compiled ahead of time, for each dtype, several widths of a row and each level of the canonical order.
Nothing is timed. ``tests/segment/test_triton_compile.py`` asserts what the table shows. Needs triton.
"""

from __future__ import annotations

import argparse
import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measuring import RESULTS, store, table

from detpass.segment import triton_kernels, triton_update
from detpass.segment.constants import CHUNK_ROWS, FAN_IN

NAMES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}
"""Triton's name of each dtype that a kernel reads; complex numbers are pairs of columns, bool is u8."""
WIDTHS = (64, 20, 33, 1)
REGISTERS, THREADS, WARPS = 65536, 128, 64
"""Of a multiprocessor; of a program; resident at most."""


@dataclass(frozen=True)
class Kernel:
    """One kernel compiled for one GPU."""

    ptx: str
    sass: str
    usage: str

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return self._used("REG")

    @property
    def stack(self) -> int:
        """Bytes of stack of a thread."""
        return self._used("STACK")

    @property
    def spills(self) -> int:
        """Instructions that read or write local memory."""
        return len(re.findall(r"\b(?:LDL|STL)\b", self.sass))

    @property
    def widest_load(self) -> int:
        """Bits of the widest load from global memory."""
        return max(map(int, re.findall(r"\bLDG\.E\S*\.(64|128)\b", self.sass)), default=32)

    @property
    def resident_warps(self) -> int:
        """Warps of a multiprocessor that the registers leave room for (they are given out by 8 a thread)."""
        programs = REGISTERS // (-(-self.registers // 8) * 8 * THREADS)
        return min(WARPS, programs * THREADS // 32)

    def _used(self, name: str) -> int:
        found = re.search(rf"{name}:(\d+)", self.usage)
        if found is None:
            raise RuntimeError(f"cuobjdump does not say {name}: {self.usage}")
        return int(found[1])


def level(
    dtype: torch.dtype,
    columns: int,
    depth: int,
    capability: int = 90,
    reduce: str = "sum",
    last: bool = False,
    has_dest: bool = False,
    sizes: str = "i32",
) -> Kernel:
    """Level ``depth`` of the segment sum of rows of ``columns`` values; ``sizes``: the dtype of N, S and strides."""
    accumulate = triton_kernels.accumulator(dtype)
    read = dtype if depth == 0 else accumulate
    tile = triton_kernels.tile_for(columns, read.itemsize)
    step = triton_kernels.levels(CHUNK_ROWS * FAN_IN ** (depth + 1))[depth]
    constants = triton_kernels.level_constants(dtype, columns, replace(step, last=last), tile, reduce, has_dest)
    pointers = {"source": read, "perm": torch.int64, "offsets": torch.int32, "partial": accumulate}
    names = ("num_segments", "num_rows", "source_rows", "partial_rows", "tiles")
    return _compiled("segment_level", pointers | {"dest": dtype, "out": dtype}, names, constants, capability, sizes)


def update(dtype: torch.dtype, columns: int, capability: int = 90, reduce: str = "sum", sizes: str = "i32") -> Kernel:
    """The kernel that combines totals with a few rows of a large table."""
    accumulate = triton_kernels.accumulator(dtype)
    tile = triton_kernels.tile_for(columns, accumulate.itemsize)
    constants = triton_update.update_constants(accumulate, columns, tile, reduce)
    pointers = {"table": dtype, "rows": torch.int64, "totals": accumulate}
    return _compiled("update_rows", pointers, ("num_segments", "num_groups", "tiles"), constants, capability, sizes)


def _compiled(
    name: str,
    pointers: Mapping[str, torch.dtype],
    sizes: Sequence[str],
    constants: Mapping[str, Any],
    capability: int,
    size_type: str,
) -> Kernel:
    signature = {pointer: "*" + NAMES[kind] for pointer, kind in pointers.items()}
    constants = {**constants, "INTERPRETED": False}
    signature |= dict.fromkeys(sizes, size_type) | dict.fromkeys(constants, "constexpr")
    return _machine_code(name, tuple(signature.items()), tuple(constants.items()), capability)


@functools.cache
def _machine_code(
    name: str, signature: tuple[tuple[str, str], ...], constants: tuple[tuple[str, Any], ...], capability: int
) -> Kernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(triton_kernels.kernels(), name)
    place = function.arg_names.index
    source = ASTSource(
        function,
        dict(signature),
        {(place(constant),): value for constant, value in constants},
        {(place(argument),): [["tt.divisibility", 16]] for argument, kind in signature if kind.startswith("*")},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": THREADS // 32})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return Kernel(
            kernel.asm["ptx"], _tool("nvdisasm", "-c", file.name), _tool("cuobjdump", "-res-usage", file.name)
        )


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([str(path), *arguments], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout + done.stderr


def rows(capability: int, dtypes: Sequence[torch.dtype]) -> list[dict[str, Any]]:
    """What the table shows for one GPU: sums and updates of rows."""
    found = []
    for dtype in dtypes:
        for columns in WIDTHS:
            made = {f"level {depth}": level(dtype, columns, depth, capability) for depth in (0, 1)}
            made["update of rows"] = update(dtype, columns, capability)
            for what, kernel in made.items():
                found.append(
                    {
                        "sm": capability,
                        "kernel": what,
                        "dtype": NAMES[dtype],
                        "D": columns,
                        "registers": kernel.registers,
                        "resident warps": kernel.resident_warps,
                        "stack": kernel.stack,
                        "spills": kernel.spills,
                        "widest load": kernel.widest_load,
                    }
                )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, print the table and store it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", default=[90, 80])
    parser.add_argument("--quick", action="store_true", help="float32 alone")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    import triton

    dtypes = [torch.float32] if options.quick else list(NAMES)
    found = [row for capability in options.capability for row in rows(capability, dtypes)]
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    text = (
        f"# CUDA kernels, compiled ahead of time by triton {versions['triton']}\n\n"
        f"Registers and bytes of stack of a thread; of {WARPS} warps of a multiprocessor, those for which there are "
        "registers; instructions that spill; bits of the widest load. Rows of D values; D = 33 and 1 allow loads of "
        "single values only (64 bits are the row numbers). Nothing was timed.\n\n"
    )
    text += table(found[0], [row.values() for row in found])
    print(text)
    store("cuda_kernels", {"machine": versions, "kernels": found}, text, options.out)


if __name__ == "__main__":
    main()
