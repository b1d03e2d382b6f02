"""The checks that need a CUDA device, in one run of under six minutes: bits, training, every operator, speed.

    python3 benchmarks/gpu.py                  everything; results under benchmarks/results/ (or $OUT where it is set)
    python3 benchmarks/gpu.py --only bits ops  some of the parts: bits, training, ops, speed, tiles
    python3 benchmarks/gpu.py --dry-run        tiny sizes on the CPU, kernels in Triton's interpreter, nothing is timed

Runs from a bare checkout with the machine's own Python, torch and triton. Without a GPU it says so and ends with 0.
Exit status 1: a check of bits failed (speed never fails a run). The parts are in ``gpu_bits.py``, ``gpu_training.py``,
``gpu_repeats.py`` and ``gpu_speed.py``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

PARTS = ("bits", "training", "ops", "speed", "tiles")
SHARES = {"bits": 0.25, "training": 0.35, "ops": 0.5, "speed": 0.92, "tiles": 1.0}
"""The share of the time budget at which each part has to be done. The parts end in this order; the operators' processes
work beside the first two, and nothing runs beside what is timed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts asked for and store what they found; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--budget", type=float, default=330.0, help="seconds for all parts together (default: 330)")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, no timing")
    options = parser.parse_args(arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, below
    import torch

    if not torch.cuda.is_available() and not options.dry_run:
        print("skipped: no GPU (torch.cuda.is_available() is False); --dry-run tries the script on a CPU")
        return 0
    if options.dry_run and not _interprets():
        print("Triton's interpreter before 3.7 cannot run loops with numpy 2.4 or later: pip install 'numpy<2.4'")
        return 2
    return run(options.only, options.budget, dry=options.dry_run)


def _interprets() -> bool:
    """Whether this Triton's interpreter takes a bound of a loop from a tensor: numpy 2.4 ended what 3.6 relies on."""
    import numpy
    import triton

    triton_version, numpy_version = (tuple(map(int, module.__version__.split(".")[:2])) for module in (triton, numpy))
    return triton_version >= (3, 7) or numpy_version < (2, 4)


def run(parts: Sequence[str], budget: float, dry: bool) -> int:
    """Run ``parts`` within ``budget`` seconds; a part that raises is a failure, and the others still run."""
    import gpu_bits
    import gpu_repeats
    import gpu_speed
    import gpu_training
    from gpu_setting import Setting, described

    start = time.monotonic()
    workers = gpu_repeats.start(dry) if "ops" in parts else None
    functions: dict[str, Any] = {
        "bits": gpu_bits.bits,
        "training": gpu_training.training,
        "ops": workers and workers.found,
        "speed": gpu_speed.speed,
        "tiles": gpu_speed.tiles,
    }
    data: dict[str, Any] = {"setting": described(dry), "seconds": {}, "failures": {}}
    texts = [f"# detpass on a GPU{' (dry run on a CPU: nothing was timed)' if dry else ''}", str(data["setting"])]
    for part in (name for name in PARTS if name in parts):
        began = time.monotonic()
        setting = Setting(dry=dry, deadline=start + SHARES[part] * budget)
        try:
            found = functions[part](setting)
        except Exception as error:  # noqa: BLE001 - one part's error must not lose the others' results
            traceback.print_exc()
            data["failures"][part] = [f"{type(error).__name__}: {error}"]
        else:
            data[part] = found.data
            texts.append(f"## {part}\n\n{found.text}")
            if found.failures:
                data["failures"][part] = found.failures
        data["seconds"][part] = round(time.monotonic() - began, 1)
        print(f"{part}: {data['seconds'][part]} s, {len(data['failures'].get(part, ()))} failures", flush=True)
        _store(data, texts, dry)  # after each part: a killed run keeps what it had
    failures = [f"{part}: {text}" for part, found in data["failures"].items() for text in found]
    print("\n\n".join(texts))
    print("\n".join(["", *(f"FAILED {text}" for text in failures)]) if failures else "\nevery check of bits passed")
    return 1 if failures else 0


def _store(data: dict[str, Any], texts: list[str], dry: bool) -> None:
    from measuring import RESULTS, store

    folder = Path(os.environ["OUT"]) if os.environ.get("OUT") else RESULTS
    if not dry or os.environ.get("OUT"):
        store("gpu", data, "\n\n".join(texts), folder)


if __name__ == "__main__":
    sys.exit(main())
