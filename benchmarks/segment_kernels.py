"""Time of the CPU segment sum against Inductor's scatter, as ratios: ``python benchmarks/segment_kernels.py --help``.

Both sides are timed in turn in one process and the median ratio is printed, so a busy machine disturbs them alike. The
rival is the compiled graph ``zeros.index_put((index,), source, accumulate=True)``: atomics at several threads, plain
additions at one; ``--deterministic`` compiles it under ``torch.use_deterministic_algorithms(True)``. Run it with
``OMP_WAIT_POLICY=passive`` on a machine that does other work.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable

import torch

from detpass import segment

SHAPES = {
    "A": (200_000, 64, 8),
    "B": (1_000_000, 100_000, 1),
    "C": (1_000_000, 100_000, 16),
    "D": (100_000, 10_000, 64),
    "E": (100_000, 10_000, 256),
    "F": (32_768, 50_000, 768),
    "G": (2_000_000, 200_000, 32),
    "H": (500_000, 500_000, 4),
}
"""Name: rows, segments, columns."""


def make_index(rows: int, segments: int, distribution: str) -> torch.Tensor:
    """Return ``int64[rows]``: ``uniform``, ``zipf`` (exponent 1.1, shuffled names) or ``hot`` (90 % in one segment)."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.randint(segments, (rows,), generator=generator)
    if distribution == "uniform":
        return uniform
    if distribution == "hot":
        return torch.where(torch.rand(rows, generator=generator) < 0.9, segments // 3, uniform)
    weights = torch.arange(1, segments + 1, dtype=torch.float64) ** -1.1
    picked = torch.searchsorted(weights.cumsum(0) / weights.sum(), torch.rand(rows, generator=generator).double())
    return torch.randperm(segments, generator=generator)[picked.clamp(max=segments - 1)]


def compiled_rival(segments: int, deterministic: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the compiled scatter; the flag matters when it is first called."""

    def scatter(index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        zeros = source.new_zeros(segments, source.shape[1])
        return zeros.index_put((index,), source, accumulate=True)

    compiled = torch.compile(scatter, dynamic=False)

    def run(index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        torch.use_deterministic_algorithms(deterministic)
        try:
            return compiled(index, source)
        finally:
            torch.use_deterministic_algorithms(False)

    return run


def wall_time(function: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def busiest_thread(function: Callable[[], object]) -> float:
    """Return the processor seconds of the thread of this process that worked most: on a busy machine the wall lies."""

    def clocks() -> dict[str, float]:
        return {task: time.clock_gettime((~int(task) << 3) | 6) for task in os.listdir("/proc/self/task")}

    before = clocks()
    function()
    return max(after - before.get(task, 0.0) for task, after in clocks().items())


CLOCKS = {"wall": wall_time, "busiest": busiest_thread}


def ratio(
    ours: Callable[[], object],
    rival: Callable[[], object],
    seconds: float,
    clock: Callable[[Callable[[], object]], float],
) -> tuple[float, float]:
    """Return the median of ``time(ours) / time(rival)`` over alternating calls, and the rival's median in ms."""
    for function in (rival, ours, rival, ours):
        function()
    ratios: list[float] = []
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(ratios) < 3 or (time.perf_counter() < stop and len(ratios) < 101):
        times.append(clock(rival))
        ratios.append(clock(ours) / times[-1])
    return statistics.median(ratios), 1e3 * statistics.median(times)


def main(arguments: list[str] | None = None) -> None:
    """Print a table of ratios (below 1: ours is faster) and their geometric mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="ABCDEFGH", help="letters of SHAPES")
    parser.add_argument("--distributions", default="uniform,zipf,hot")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each cell")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--deterministic", action="store_true", help="the rival runs under torch's deterministic flag")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    found = []
    for dtype_name in options.dtypes.split(","):
        for distribution in options.distributions.split(","):
            cells = []
            for letter in options.shapes:
                rows, segments, columns = SHAPES[letter]
                torch._dynamo.reset()
                index = make_index(rows, segments, distribution)
                source = torch.randn(rows, columns).to(getattr(torch, dtype_name))
                rival = compiled_rival(segments, options.deterministic)
                batched = source.unsqueeze(0)
                value, milliseconds = ratio(
                    lambda: segment.segment_reduce(batched, index, segments, wrap=True),  # noqa: B023
                    lambda: rival(index, source),  # noqa: B023
                    options.seconds,
                    CLOCKS[options.clock],
                )
                found.append(value)
                cells.append(f"{letter} {value:.3f} ({milliseconds:.1f} ms)")
            print(f"{dtype_name:9} {distribution:8} " + "  ".join(cells), flush=True)
    mean = math.exp(statistics.fmean(map(math.log, found)))
    print(f"threads {options.threads}: geometric mean {mean:.3f}, largest {max(found):.3f}")


if __name__ == "__main__":
    main()
