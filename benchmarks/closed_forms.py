"""Forward and backward time of resampling, pooling and padding under detpass, divided by Inductor's.

    python benchmarks/closed_forms.py [--quick]

Their index maps are known at compile time, so detpass uses gathers and small dense products instead of a segment sum.
Where torch's own flag refuses an operation, the column says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measuring import RESULTS, describe, geometric_mean, interleaved, machine, store, table, under_flag

SHAPE = (8, 64, 64, 64)
"""Batch, channels, height, width."""


def _grid() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(SHAPE[0], SHAPE[2], SHAPE[3], 2, generator=generator) * 2 - 1


def operations() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """What is measured, by name; each maps ``[8, 64, 64, 64]`` to a tensor."""
    grid = _grid()
    return {
        "bilinear upsampling x2": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
        "bicubic upsampling x2": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False),
        "nearest upsampling x2": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
        "max pool 3x3, stride 2": lambda x: F.max_pool2d(x, 3, stride=2, padding=1),
        "avg pool 3x3, stride 2": lambda x: F.avg_pool2d(x, 3, stride=2, padding=1),
        "adaptive avg pool to 7x7": lambda x: F.adaptive_avg_pool2d(x, 7),
        "reflection pad 3": lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"),
        "replication pad 3": lambda x: F.pad(x, (3, 3, 3, 3), mode="replicate"),
        "grid_sample, bilinear": lambda x: F.grid_sample(x, grid, align_corners=False),
    }


def measure(name: str, function: Callable[[torch.Tensor], torch.Tensor], budget_s: float) -> dict[str, Any]:
    """Times and ratios of one operation's forward and backward."""
    torch._dynamo.reset()
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.randn_like(function(x))

    def step(compiled: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return lambda: torch.autograd.grad(compiled(x), x, weight)[0]

    calls = {backend: step(torch.compile(function, backend=backend)) for backend in ("detpass", "inductor")}
    first, again = calls["detpass"](), calls["detpass"]()
    if not torch.equal(first.view(torch.uint8), again.view(torch.uint8)):
        raise RuntimeError(f"{name}: detpass gave other bits in a second call; nothing was timed")
    # The same sums in another order: at most a few dozen float32 terms for each element of these operations.
    torch.testing.assert_close(first, step(function)(), rtol=1e-4, atol=1e-4)
    flagged = under_flag(step(torch.compile(lambda x: function(x), backend="inductor")))
    try:
        flagged()
        calls["flag"] = flagged
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
    timing = interleaved(calls, budget_s)
    return {
        "operation": name,
        "disturbed": timing.disturbed,
        "threads": torch.get_num_threads(),
        "detpass_ms": timing.median_ms("detpass"),
        "ratio_to_inductor": timing.ratio("detpass", "inductor"),
        "ratio_to_flag": timing.ratio("detpass", "flag") if "flag" in calls else None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="half a second for each operation, two threads; print only"
    )
    parser.add_argument("--only", help="operations whose name contains this")
    parser.add_argument("--out", type=Path, help=f"folder for the table (default {RESULTS}; with --quick nowhere)")
    chosen = parser.parse_args(arguments)
    where = machine()
    print(describe(where), flush=True)
    rows = []
    for threads in (2,) if chosen.quick else (2, 1):
        torch.set_num_threads(threads)
        for name, function in operations().items():
            if chosen.only and chosen.only not in name:
                continue
            rows.append(measure(name, function, 0.5 if chosen.quick else 4.0))
            flag = rows[-1]["ratio_to_flag"]
            print(
                f"{name}, {threads} threads: {rows[-1]['detpass_ms']:.2f} ms, /inductor "
                f"{rows[-1]['ratio_to_inductor']:.3f}, /inductor with torch's flag "
                f"{'refused' if flag is None else f'{flag:.3f}'}",
                flush=True,
            )
    means = {
        threads: geometric_mean(row["ratio_to_inductor"] for row in rows if row["threads"] == threads)
        for threads in dict.fromkeys(row["threads"] for row in rows)
    }
    text = "\n\n".join(
        [
            "# Closed forms on a CPU",
            f"Forward and backward of each operation on {list(SHAPE)} float32: detpass's time divided by the rival's.",
            f"Machine: {describe(where)}.",
            table(
                ("operation", "threads", "detpass ms", "by Inductor", "by Inductor with torch's flag"),
                (
                    (
                        row["operation"] + (" ~ (disturbed by other work)" if row["disturbed"] else ""),
                        row["threads"],
                        row["detpass_ms"],
                        row["ratio_to_inductor"],
                        "refused" if row["ratio_to_flag"] is None else row["ratio_to_flag"],
                    )
                    for row in rows
                ),
            ),
            "Geometric means by Inductor: "
            + ", ".join(f"{mean:.2f} with {threads} threads" for threads, mean in means.items())
            + ".",
        ]
    )
    print(text)
    folder = chosen.out or (None if chosen.quick else RESULTS)
    if folder is not None:
        store("cpu_closed_forms", {"machine": where, "rows": rows, "geometric_means": means}, text, folder)


if __name__ == "__main__":
    main()
