"""Bits on the GPU: equal to the CPU's, from run to run, under CUDA graphs and for other tiles."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpu_setting import Found, Setting, captured, digest, make_index
from measuring import table

from detpass.segment import fallback, functional
from detpass.segment.triton_kernels import Tile, launches, segment_sum_sorted, sorted_plan

RUNS = 50
TILES = (Tile(2, 8, 3), Tile(16, 32, 2), Tile(4, 64, 8))
CASES = (  # rows, segments, columns, distribution
    (20_000, 300, 16, "hot"),
    (20_000, 2_000, 33, "zipf"),
    (5_000, 1, 64, "uniform"),
    (3_000, 5_000, 1, "uniform"),
    (0, 7, 4, "uniform"),
    (70_000, 3, 20, "hot"),
)
DRY_CASES = ((300, 7, 4, "hot"), (0, 3, 2, "uniform"))
DTYPES = (torch.float32, torch.bfloat16)
MORE_DTYPES = (torch.float64, torch.float16, torch.complex64, torch.int32)
"""Tried on the first two cases alone: compiling a kernel for each costs more than running it."""


def _cases(setting: Setting) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, int]]:
    for number, (rows, segments, columns, distribution) in enumerate(DRY_CASES if setting.dry else CASES):
        index = make_index(distribution, rows, segments)
        for dtype in DTYPES + (MORE_DTYPES if number < 2 else ()):
            generator = torch.Generator().manual_seed(rows + columns)
            scale = torch.exp(2 * torch.randn(1, rows, 1, generator=generator))
            source = torch.randn(1, rows, columns, dtype=torch.float64, generator=generator) * scale
            yield f"N={rows} S={segments} D={columns} {distribution} {dtype}", index, source.to(dtype), segments


def bits(setting: Setting) -> Found:
    """Every case on the GPU against the CPU's bits, then again in several ways."""
    rows: list[list[object]] = []
    failures: list[str] = []
    for name, index, source, segments in _cases(setting):
        if setting.over:
            failures.append(f"no time left for {name} and what follows")
            break
        expected = digest(functional.segment_reduce(source, index, segments))
        found = _ways(setting, index.to(setting.device), source.to(setting.device), segments)
        wrong = [way for way, digests in found.items() if digests != {expected}]
        failures += [f"{name}: {way} gave {sorted(found[way])}, the CPU {expected}" for way in wrong]
        rows.append([name, expected, ", ".join(wrong) or "equal"])
    runs = _runs(setting)
    text = table(["case", "bits on the CPU", f"on the GPU, {runs} runs, CUDA graph, other tiles"], rows)
    return Found({"cases": rows, "runs": runs}, text, failures)


def _runs(setting: Setting) -> int:
    return 3 if setting.dry else RUNS


def _ways(setting: Setting, index: torch.Tensor, source: torch.Tensor, segments: int) -> dict[str, set[str]]:
    def whole() -> torch.Tensor:
        perm, offsets = sorted_plan(index, segments)
        return segment_sum_sorted(source, perm, offsets)

    found = {"run to run": {digest(whole()) for _ in range(_runs(setting))}}
    replay, result = captured(setting, whole)
    graph = set()
    for _ in range(3):
        replay()
        graph.add(digest(result))
    found["CUDA graph"] = graph
    perm, offsets = sorted_plan(index, segments)
    if source.dtype in DTYPES and source.shape[2] in (4, 16, 33):
        for tile in TILES:
            found[f"{tile}"] = {digest(launches(source, perm, offsets, "sum", source.dtype, tile=tile))}
    torch_only = fallback.segment_reduce(source, index, segments, "sum", False, "")
    found["torch operations alone"] = {digest(torch_only)}
    return found
