"""Speed on a GPU: the accumulation against its rivals, the kernels against the copy ceiling, tiles and constants."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from gpu_setting import NAN, Found, Setting, captured, make_index, microseconds
from measuring import geometric_mean, table, under_flag

from detpass.backend import detpass as backend
from detpass.segment.triton_kernels import Tile, launches, sorted_plan, tile_for

SHAPES = ((1_000_000, 100_000, 16), (2_000_000, 200_000, 64), (32_768, 50_000, 768), (8_000_000, 1_000_000, 32))
"""Rows, segments, columns."""
DRY_SHAPES = ((200, 9, 4),)
DISTRIBUTIONS = ("uniform", "zipf", "hot")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RIVALS = ("inductor", "inductor + flag", "eager + flag", "eager atomics", "embedding backward")
TARGETS = "targets: 2x over inductor + flag, 1.0 of inductor when hot, 60 % of copy bandwidth at D >= 64"


def _ceiling(setting: Setting) -> float:
    """Bytes a microsecond of a large copy, read and written."""
    if setting.dry:
        return NAN
    size = 1 << 30
    source = torch.empty(size, dtype=torch.int8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * size / microseconds(setting, lambda: target.copy_(source))


def _accumulate(
    segments: int, columns: int, dtype: torch.dtype
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def accumulate(index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(segments, columns, dtype=dtype, device=source.device)
        return zeros.index_put((index,), source, accumulate=True)

    return accumulate


def speed(setting: Setting) -> Found:
    """The table of (N, S, D) x dtype x distribution, in microseconds, and ratios of detpass to each rival."""
    ceiling = _ceiling(setting)
    cells: list[dict[str, Any]] = []
    shapes = DRY_SHAPES if setting.dry else SHAPES
    for shape in shapes:
        for name, dtype in DTYPES.items():
            if not setting.over:
                cells += _cells(setting, shape, name, dtype, ceiling)
    wanted = [(*shape, name, rows) for shape in shapes for name in DTYPES for rows in DISTRIBUTIONS]
    measured = {tuple(cell[key] for key in ("N", "S", "D", "dtype", "distribution")) for cell in cells}
    left_out = [" ".join(map(str, cell)) for cell in wanted if cell not in measured]
    header = ["N", "S", "D", "dtype", "rows", "detpass", *RIVALS, "sum alone", "of copy"]
    keys = ["N", "S", "D", "dtype", "distribution", "detpass", *RIVALS, "sum alone", "share of copy"]
    lines = [table(header, [[cell[key] for key in keys] for cell in cells]), TARGETS]
    means = {rival: _mean([cell["detpass"] / cell[rival] for cell in cells]) for rival in RIVALS}
    lines.append(
        "geometric mean of detpass / rival: " + ", ".join(f"{name} {value:.3g}" for name, value in means.items())
    )
    lines.append(f"copy ceiling: {ceiling / 1e6:.3g} TB/s")
    lines += [f"no time left for {text}" for text in left_out]
    return Found(
        {"cells": cells, "copy_bytes_per_us": ceiling, "means": means, "left_out": left_out}, "\n\n".join(lines)
    )


def _mean(values: list[float]) -> float:
    known = [value for value in values if value == value]
    return geometric_mean(known) if known else NAN


def _cells(
    setting: Setting, shape: tuple[int, int, int], name: str, dtype: torch.dtype, ceiling: float
) -> list[dict[str, Any]]:
    rows, segments, columns = shape
    torch._dynamo.reset()
    function = _accumulate(segments, columns, dtype)
    ours = torch.compile(function, backend=backend)
    plain = torch.compile(_accumulate(segments, columns, dtype), backend="inductor")
    flagged = torch.compile(_accumulate(segments, columns, dtype), backend="inductor")
    source = torch.randn(rows, columns, device=setting.device).to(dtype)
    found = []
    for distribution in DISTRIBUTIONS:
        if setting.over:
            break
        index = make_index(distribution, rows, segments).to(setting.device)
        zeros = functools.partial(torch.zeros, segments, columns, dtype=dtype, device=setting.device)
        embedding = torch.ops.aten.embedding_dense_backward
        calls: dict[str, Callable[[], Any]] = {
            "detpass": functools.partial(ours, index, source),
            "inductor": functools.partial(plain, index, source),
            "inductor + flag": under_flag(functools.partial(flagged, index, source)),
            "eager + flag": under_flag(functools.partial(function, index, source)),
            "eager atomics": functools.partial(_index_add, zeros, index, source),
            "embedding backward": functools.partial(embedding, source, index, segments, -1, False),
        }
        cell: dict[str, Any] = {"N": rows, "S": segments, "D": columns, "dtype": name, "distribution": distribution}
        cell |= {label: microseconds(setting, call) for label, call in calls.items()}
        perm, offsets = sorted_plan(index, segments)
        replay, _ = captured(setting, functools.partial(launches, source[None], perm, offsets, "sum", dtype))
        cell["sum alone"] = microseconds(setting, replay)
        moved = (rows + segments) * columns * source.element_size() + rows * perm.element_size()
        cell["bytes"] = moved
        cell["share of copy"] = moved / cell["sum alone"] / ceiling
        replay, _ = captured(setting, functools.partial(sorted_plan, index, segments))
        cell["plan alone"] = microseconds(setting, replay)
        found.append(cell)
    return found


def _index_add(zeros: Callable[[], torch.Tensor], index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return zeros().index_add_(0, index, source)


def tiles(setting: Setting) -> Found:
    """Other tiles and other constants of the canonical order: what to set when a GPU was measured."""
    rows: list[list[object]] = []
    left_out = []
    for n, s, d in DRY_SHAPES if setting.dry else SHAPES[:3]:
        for name, dtype in DTYPES.items():
            source = torch.randn(1, n, d, device=setting.device).to(dtype)
            for distribution in ("uniform", "hot"):
                if setting.over:
                    left_out.append(f"N={n} {name} {distribution}")
                    continue
                perm, offsets = sorted_plan(make_index(distribution, n, s).to(setting.device), s)
                default = tile_for(d, source.element_size())
                chosen = [default, *(Tile(default.block_r, default.block_d, unroll) for unroll in (2, 8, 16))]
                chosen += [
                    Tile(max(1, default.block_r // 2), default.block_d),
                    Tile(2 * default.block_r, default.block_d),
                ]
                settings = [(tile, 256, 256) for tile in chosen]
                settings += [(default, chunk, fan) for chunk, fan in ((64, 256), (128, 256), (512, 256), (256, 64))]
                for tile, chunk, fan in settings:
                    call = _launcher(source, perm, offsets, dtype, tile, chunk, fan)
                    replay, _ = captured(setting, call)
                    rows.append([n, s, d, name, distribution, str(tile), chunk, fan, microseconds(setting, replay)])
    header = ["N", "S", "D", "dtype", "rows", "tile", "chunk rows", "fan-in", "us"]
    notes = [f"no time left for {text}" for text in left_out]
    return Found({"rows": rows, "left_out": left_out}, "\n\n".join([table(header, rows), *notes]))


def _launcher(
    source: torch.Tensor,
    perm: torch.Tensor,
    offsets: torch.Tensor,
    dtype: torch.dtype,
    tile: Tile,
    chunk: int,
    fan: int,
) -> Callable[[], torch.Tensor]:
    return lambda: launches(source, perm, offsets, "sum", dtype, tile=tile, chunk_rows=chunk, fan_in=fan)
