"""Compile time of a few models under detpass, divided by Inductor's: cold, and starting with a warm cache.

    python benchmarks/compile_time.py [--quick]

Each measurement is a fresh process with a cache folder of its own that runs one training step; further processes with
the same folder give warm starts. Backends alternate. Importing torch is not counted. detpass's CPU kernels are
built once on a machine, not once a model: they are built before and counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measuring import RESULTS, describe, machine, store, table

BACKENDS = ("detpass", "inductor")
WARM_STARTS = 4
"""For each cold one: they take a tenth of its time, and the ratios that are asked of them are nearer to 1."""


class Transformer(nn.Module):
    """Two encoder layers over token and position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(1000, 64), nn.Embedding(128, 64)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(64, 1000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()  # type: ignore[no-any-return]


class GraphNetwork(nn.Module):
    """Three message-passing layers that add along the same edges."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            messages = layer(nodes[edges[0]])
            nodes = torch.relu(nodes + torch.zeros_like(nodes).index_add(0, edges[1], messages))
        return nodes.square().mean()


class Convolutions(nn.Module):
    """Down and up again: convolution, max pooling, bilinear upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.first(image)), 3, stride=2, padding=1)
        x = nn.functional.interpolate(torch.relu(self.second(x)), scale_factor=2, mode="bilinear")
        return x.square().mean()


class Perceptron(nn.Module):
    """Dense layers alone: nothing to rewrite, so what is seen is the cost of looking."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "transformer": lambda: (Transformer(), (torch.randint(0, 1000, (4, 64)),)),
    "graph network": lambda: (GraphNetwork(), (torch.randn(500, 32), torch.randint(0, 500, (2, 4000)))),
    "convolutions": lambda: (Convolutions(), (torch.randn(2, 3, 32, 32),)),
    "perceptron": lambda: (Perceptron(), (torch.randn(64, 64),)),
}


def step_seconds(model_name: str, backend: str) -> float:
    """Seconds of the first training step in this process, compilation included."""
    torch.manual_seed(0)
    model, inputs = MODELS[model_name]()
    # What the first use of torch.compile imports is the same for every backend and no part of a compile.
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    begin = time.perf_counter()
    torch.compile(model, backend=backend)(*inputs).backward()
    return time.perf_counter() - begin


def child_seconds(model_name: str, backend: str, cache: str, kernels: str) -> float:
    """:func:`step_seconds` in a fresh process with these folders for Inductor's artifacts and for detpass's kernels."""
    # An installed package has its bytecode, as torch has: the first child may write ours.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**inherited, "TORCHINDUCTOR_CACHE_DIR": cache, "DETPASS_CACHE_DIR": kernels}
    command = [sys.executable, __file__, "--child", model_name, backend]
    finished = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    return float(json.loads(finished.stdout.splitlines()[-1]))


def kernel_build_seconds(kernels: str) -> float:
    """Build detpass's CPU kernels into this folder in a fresh process; seconds, importing torch left out."""
    code = (
        "import time; from detpass.segment.build import build, cpu_capability; begin = time.perf_counter(); "
        "from detpass.segment.build import LIBRARIES; [build(name, cpu_capability()) for name in LIBRARIES]; "
        "print(time.perf_counter() - begin)"
    )
    environment = {**os.environ, "DETPASS_CACHE_DIR": kernels}
    finished = subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment, stdout=subprocess.PIPE, text=True
    )
    return float(finished.stdout.split()[-1])


def measure(model_name: str, rounds: int, kernels: str) -> dict[str, Any]:
    """Cold and warm seconds of both backends, alternating."""
    cold: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    warm: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for _ in range(rounds):
        folders = {backend: tempfile.TemporaryDirectory(prefix="detpass_compile_") for backend in BACKENDS}
        for seconds in (cold, *[warm] * WARM_STARTS):
            for backend, folder in folders.items():
                seconds[backend].append(child_seconds(model_name, backend, folder.name, kernels))
        for folder in folders.values():
            folder.cleanup()

    def ratio(seconds: dict[str, list[float]]) -> float:
        return statistics.median(a / b for a, b in zip(seconds["detpass"], seconds["inductor"], strict=True))

    return {
        "model": model_name,
        "cold_s": {backend: statistics.median(cold[backend]) for backend in BACKENDS},
        "warm_s": {backend: statistics.median(warm[backend]) for backend in BACKENDS},
        "cold_ratio": ratio(cold),
        "warm_ratio": ratio(warm),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, store; or be the child."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of each model; print only")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each model (default 5)")
    parser.add_argument("--only", choices=sorted(MODELS), help="one model")
    parser.add_argument("--out", type=Path, help=f"folder for the table (default {RESULTS}; with --quick nowhere)")
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "BACKEND"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        print(json.dumps(step_seconds(*chosen.child)))
        return
    where = machine()
    print(describe(where), flush=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="detpass_kernels_") as kernels:
        build_seconds = kernel_build_seconds(kernels)
        print(f"building detpass's kernels, once a machine: {build_seconds:.1f} s", flush=True)
        for name in (chosen.only,) if chosen.only else MODELS:
            rows.append(measure(name, 1 if chosen.quick else chosen.rounds, kernels))
            print(f"{name}: cold {rows[-1]['cold_ratio']:.3f}, warm {rows[-1]['warm_ratio']:.3f}", flush=True)
    header = (
        "model",
        "cold, detpass s",
        "cold, Inductor s",
        "cold ratio",
        "warm, detpass s",
        "warm, Inductor s",
        "warm ratio",
    )
    lines = [
        (
            row["model"],
            *(row["cold_s"][backend] for backend in BACKENDS),
            row["cold_ratio"],
            *(row["warm_s"][backend] for backend in BACKENDS),
            row["warm_ratio"],
        )
        for row in rows
    ]
    medians = {kind: statistics.median(row[f"{kind}_ratio"] for row in rows) for kind in ("cold", "warm")}
    text = "\n\n".join(
        [
            "# Compile time",
            "First training step in a fresh process with compilation: cold (empty cache) and warm (later processes).",
            f"Machine: {describe(where)}.",
            table(header, lines),
            f"Building detpass's CPU kernels, once a machine and not counted above: {build_seconds:.1f} s.",
            f"Median ratio: cold {medians['cold']:.2f} (aim 1.10), warm {medians['warm']:.2f} (aim 1.05).",
        ]
    )
    print(text)
    folder_out = chosen.out or (None if chosen.quick else RESULTS)
    if folder_out is not None:
        store(
            "compile_time",
            {"machine": where, "kernel_build_s": build_seconds, "rows": rows, "median_ratios": medians},
            text,
            folder_out,
        )


if __name__ == "__main__":
    main()
