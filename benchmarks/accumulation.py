"""Time of an accumulating index_put under detpass, divided by Inductor's, by torch's flag's, and by eager's under it.

    python benchmarks/accumulation.py             the whole table (about half an hour), stored under results/
    python benchmarks/accumulation.py --quick     a few cells, printed only

Rounds are interleaved in one process; a cell is the median over the rounds of the ratio of two times of one round.
Run it on a quiet machine. Before timing, each cell is checked: detpass gives the same bits twice, and they agree with
a float64 sum.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measuring import RESULTS, describe, geometric_mean, interleaved, machine, peak_bytes, store, table, under_flag

SHAPES = (
    (200_000, 64, 8),
    (1_000_000, 100_000, 1),
    (1_000_000, 100_000, 16),
    (100_000, 10_000, 64),
    (100_000, 10_000, 256),
    (32_768, 50_000, 768),
    (2_000_000, 200_000, 32),
    (500_000, 500_000, 4),
)
"""Rows, segments, columns."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DISTRIBUTIONS = ("uniform", "zipf", "one segment")
RIVALS = ("inductor", "inductor, torch's flag", "eager, torch's flag")
TARGETS: dict[int, dict[str, tuple[float, float | None]]] = {
    2: {"inductor": (0.20, 0.6), "inductor, torch's flag": (0.4, None)},
    1: {"inductor": (1.15, 2.0)},
}
"""Threads, rival: the geometric mean and the worst cell aimed at."""


@dataclass(frozen=True)
class Cell:
    """One measured configuration."""

    threads: int
    dtype: str
    distribution: str
    shape: tuple[int, int, int]
    milliseconds: dict[str, float]
    ratios: dict[str, float]
    memory_ratio: float | None
    """(inputs + rise of the resident set) of detpass by the same of Inductor."""
    disturbed: bool
    """Whether other work on the machine disturbed nearly all rounds."""


def make_index(distribution: str, rows: int, segments: int) -> torch.Tensor:
    """``int64[rows]`` below ``segments``: uniform, Zipf with exponent 1.1 over shuffled ids, or 90 % in one segment."""
    generator = torch.Generator().manual_seed(rows + segments)
    uniform = torch.randint(0, segments, (rows,), generator=generator)
    if distribution == "uniform":
        return uniform
    if distribution == "zipf":
        weights = torch.arange(1, segments + 1, dtype=torch.float64).pow(-1.1).cumsum(0)
        draws = torch.rand(rows, dtype=torch.float64, generator=generator) * weights[-1]
        ranks = torch.searchsorted(weights, draws).clamp_(max=segments - 1)
        return torch.randperm(segments, generator=generator)[ranks]
    hot = torch.rand(rows, generator=generator) < 0.9
    return torch.where(hot, segments // 3, uniform)


def accumulate(segments: int, source: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The function under test: rows of a source added into zeros."""
    columns, dtype = source.shape[1], source.dtype

    def function(index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros(segments, columns, dtype=dtype).index_put((index,), rows, accumulate=True)

    return function


def check(result: torch.Tensor, again: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
    """Same bits twice, and within the error of summing in float32 of a float64 sum."""
    if not torch.equal(result.view(torch.uint8), again.view(torch.uint8)):
        raise RuntimeError("detpass gave other bits in a second call; nothing was timed")
    exact = torch.zeros(result.shape, dtype=torch.float64).index_add_(0, index, source.double())
    scale = torch.zeros(result.shape, dtype=torch.float64).index_add_(0, index, source.double().abs())
    # Rounding of the output, plus at most 256 + 256 + ... additions in float32 along any path to it.
    bound = exact.abs() * torch.finfo(result.dtype).eps + scale * 1024 * torch.finfo(torch.float32).eps
    worst = ((result.double() - exact).abs() - bound).max().item()
    if worst > 0:
        raise RuntimeError(f"detpass is {worst:.3g} outside the error bound; nothing was timed")


def cells(
    shapes: Sequence[tuple[int, int, int]],
    dtypes: Sequence[str],
    distributions: Sequence[str],
    threads: Sequence[int],
    budget_s: float,
) -> Iterator[Cell]:
    """Measure every combination; each shape and dtype is compiled once a thread count."""
    for count in threads:
        torch.set_num_threads(count)
        for shape in shapes:
            rows, segments, columns = shape
            for dtype in dtypes:
                torch._dynamo.reset()
                source = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(DTYPES[dtype])
                function = accumulate(segments, source)
                compiled = {name: torch.compile(function, backend=name) for name in ("detpass", "inductor")}
                flagged = torch.compile(accumulate(segments, source), backend="inductor")
                for distribution in distributions:
                    index = make_index(distribution, rows, segments)
                    calls = _calls(compiled, flagged, function, index, source)
                    check(calls["detpass"](), calls["detpass"](), index, source)
                    timing = interleaved(calls, budget_s)
                    inputs = index.nbytes + source.nbytes
                    own, other = peak_bytes(calls["detpass"]), peak_bytes(calls["inductor"])
                    memory = None if own is None or other is None else (inputs + own) / (inputs + other)
                    yield Cell(
                        count,
                        dtype,
                        distribution,
                        shape,
                        {name: timing.median_ms(name) for name in calls},
                        {rival: timing.ratio("detpass", rival) for rival in RIVALS},
                        memory,
                        timing.disturbed,
                    )


def _calls(
    compiled: dict[str, Any], flagged: Any, function: Any, index: torch.Tensor, source: torch.Tensor
) -> dict[str, Callable[[], Any]]:
    return {
        "detpass": lambda: compiled["detpass"](index, source),
        "inductor": lambda: compiled["inductor"](index, source),
        "inductor, torch's flag": under_flag(lambda: flagged(index, source)),
        "eager, torch's flag": under_flag(lambda: function(index, source)),
    }


def summary(found: Sequence[Cell]) -> list[dict[str, Any]]:
    """Geometric mean and extremes of the ratios for each thread count, dtype and rival."""
    rows = []
    for threads in sorted({cell.threads for cell in found}, reverse=True):
        for rival in RIVALS:
            for dtype in ("all", *sorted({cell.dtype for cell in found}, reverse=True)):
                chosen = [cell for cell in found if cell.threads == threads and dtype in ("all", cell.dtype)]
                if not chosen:
                    continue
                worst = max(chosen, key=lambda cell: cell.ratios[rival])
                mean_target, worst_target = TARGETS.get(threads, {}).get(rival, (None, None))
                rows.append(
                    {
                        "threads": threads,
                        "rival": rival,
                        "dtype": dtype,
                        "geometric_mean": geometric_mean(cell.ratios[rival] for cell in chosen),
                        "mean_aimed_at": mean_target,
                        "best": min(cell.ratios[rival] for cell in chosen),
                        "worst": worst.ratios[rival],
                        "worst_aimed_at": worst_target,
                        "worst_cell": f"{worst.shape} {worst.dtype} {worst.distribution}",
                    }
                )
    return rows


def markdown(found: Sequence[Cell], where: dict[str, Any]) -> str:
    """The stored text: the machine, the summary, every cell."""
    rows = summary(found)
    memory = [cell.memory_ratio for cell in found if cell.memory_ratio is not None]
    parts = [
        "# Accumulation on a CPU",
        "Time of `zeros.index_put((index,), source, accumulate=True)` under detpass, divided by the rival's time.",
        f"Machine: {describe(where)}.",
        table(
            ("threads", "divided by", "dtype", "geometric mean", "aim", "best cell", "worst cell", "aim", "which"),
            (
                tuple(row[key] for key in ("threads", "rival", "dtype", "geometric_mean", "mean_aimed_at", "best"))
                + tuple(row[key] for key in ("worst", "worst_aimed_at", "worst_cell"))
                for row in rows
            ),
        ),
    ]
    if memory:
        parts.append(
            f"Peak memory (inputs and the rise of the resident set) against Inductor's: median "
            f"{sorted(memory)[len(memory) // 2]:.2f}, worst {max(memory):.2f}."
        )
    if any(cell.disturbed for cell in found):
        share = f"{sum(cell.disturbed for cell in found)} of {len(found)}"
        parts.append(f"Other work on the machine disturbed {share} cells; they are marked with ~.")
    header = ("rows, segments, columns", "dtype", "index", "threads", "detpass ms", *RIVALS, "memory")
    parts += [
        "## Every cell",
        table(
            header,
            (
                (
                    f"{cell.shape}{' ~' if cell.disturbed else ''}",
                    cell.dtype,
                    cell.distribution,
                    cell.threads,
                    cell.milliseconds["detpass"],
                    *(cell.ratios[rival] for rival in RIVALS),
                    cell.memory_ratio,
                )
                for cell in found
            ),
        ),
    ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print as cells come in, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three shapes, fp32, two distributions; print only")
    parser.add_argument("--threads", default="2,1", help="thread counts (default 2,1)")
    parser.add_argument("--shapes", help="rows,segments,columns;... instead of the usual eight")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds of timing for each cell (default 3)")
    parser.add_argument("--out", type=Path, help=f"folder for the table (default {RESULTS}; with --quick nowhere)")
    chosen = parser.parse_args(arguments)
    shapes: Sequence[tuple[int, int, int]] = SHAPES
    if chosen.quick:
        shapes = (SHAPES[0], SHAPES[3], SHAPES[7])
    if chosen.shapes:
        triples = [tuple(int(part) for part in text.split(",")) for text in chosen.shapes.split(";")]
        shapes = [(rows, segments, columns) for rows, segments, columns in triples]
    dtypes = ("fp32",) if chosen.quick else tuple(DTYPES)
    distributions = ("uniform", "one segment") if chosen.quick else DISTRIBUTIONS
    where = machine()
    print(describe(where), flush=True)
    found = []
    begin = time.perf_counter()
    for cell in cells(shapes, dtypes, distributions, [int(part) for part in chosen.threads.split(",")], chosen.budget):
        found.append(cell)
        ratios = "  ".join(f"/{rival} {cell.ratios[rival]:.3f}" for rival in RIVALS)
        memory = "" if cell.memory_ratio is None else f"  memory {cell.memory_ratio:.2f}"
        print(
            f"{time.perf_counter() - begin:6.0f}s  {cell.shape} {cell.dtype} {cell.distribution} {cell.threads}t: "
            f"{cell.milliseconds['detpass']:.2f} ms  {ratios}{memory}{'  (disturbed)' if cell.disturbed else ''}",
            flush=True,
        )
    text = markdown(found, where)
    print(text.partition("## Every cell")[0])
    folder = chosen.out or (None if chosen.quick else RESULTS)
    if folder is not None:
        data = {"machine": where, "summary": summary(found), "cells": [vars(cell) for cell in found]}
        store("cpu_accumulation", data, text, folder)


if __name__ == "__main__":
    main()
