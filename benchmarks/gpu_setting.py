"""What the parts of ``gpu.py`` share: the device, the deadline, bit comparison, timing, CUDA graphs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from measuring import machine

NAN = float("nan")


@dataclass(frozen=True)
class Setting:
    """How a part runs."""

    dry: bool
    """Tiny sizes on a CPU, nothing timed."""
    deadline: float
    """``time.monotonic()`` by which the part should end; what does not fit is left out and said."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def over(self) -> bool:
        return not self.dry and time.monotonic() > self.deadline


@dataclass
class Found:
    """What a part found."""

    data: Any
    text: str
    failures: list[str] = field(default_factory=list)


def described(dry: bool) -> dict[str, Any]:
    """The machine and versions."""
    import triton

    found = {**machine(), "triton": triton.__version__, "cuda": torch.version.cuda, "dry_run": dry}
    if not dry:
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "multiprocessors": properties.multi_processor_count}
    return found


def digest(*values: torch.Tensor) -> str:
    """A hash of the bits of tensors, dtypes and shapes included."""
    found = hashlib.sha256()
    for value in values:
        plain = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def microseconds(setting: Setting, function: Callable[[], Any], slow_above_ms: float = 50.0) -> float:
    """The median time of a call on the GPU; one timed call where a call is slow. NaN in a dry run (called once)."""
    if setting.dry:
        function()
        return NAN
    import triton.testing

    function()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    once: float = start.elapsed_time(end)
    if once > slow_above_ms:
        return once * 1e3
    return float(triton.testing.do_bench(function, warmup=5, rep=25, return_mode="median")) * 1e3


def captured(setting: Setting, function: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """``function`` as a CUDA graph: what replays it, and its result (the function itself in a dry run)."""
    if setting.dry:
        return function, function()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph.replay, result


def make_index(distribution: str, rows: int, segments: int) -> torch.Tensor:
    """``int64[rows]`` on the CPU: uniform, Zipf(1.1) over shuffled ids, or 90 % in one segment."""
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
