"""What around the model decides whether its bits repeat: versions, compiler, threads, and settings of torch.

Read only; nothing is changed. Neighbours: ``cli/doctor.py`` prints these findings.
"""

from __future__ import annotations

import enum
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch

from detpass import _torch_private
from detpass.config import CUBLAS_ADVICE, CUBLAS_SETTING, cublas_repeats

SUPPORTED_TORCH = ((2, 11), (2, 14))
"""The first and the last release of torch that detpass is tested on."""
TRITON_FOR_TORCH = {(2, 11): "3.6", (2, 12): "3.7", (2, 13): "3.7", (2, 14): "3.8"}
"""The triton release that goes with each torch release."""


class Level(str, enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Finding:
    """One fact about the environment."""

    name: str
    """What was looked at."""
    value: str
    """What was found."""
    level: Level = Level.OK
    """``warning`` where it can cost repeatability or speed as it stands, ``note`` where it may."""
    advice: str = ""
    """What to do, or why it matters; empty when nothing need be done."""


def findings() -> tuple[Finding, ...]:
    """All findings, in a fixed order."""
    return tuple(check() for check in CHECKS)


def _python() -> Finding:
    return Finding("python", f"{platform.python_version()} on {platform.platform(terse=True)}")


def _torch() -> Finding:
    release = _release(torch.__version__)
    first, last = SUPPORTED_TORCH
    if first <= release <= last:
        return Finding("torch", torch.__version__)
    known = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
    return Finding("torch", torch.__version__, Level.WARNING, f"detpass is tested on torch {known}")


def _triton() -> Finding:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        cuda = torch.cuda.is_available()
        return Finding("triton", "not installed", Level.WARNING if cuda else Level.OK, "CUDA needs it" if cuda else "")
    expected = TRITON_FOR_TORCH.get(_release(torch.__version__))
    if expected is None or version.startswith(expected + "."):
        return Finding("triton", version)
    return Finding("triton", version, Level.WARNING, f"torch {torch.__version__} goes with triton {expected}")


def _device() -> Finding:
    if not torch.cuda.is_available():
        return Finding("device", "CPU only")
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    level = Level.NOTE if len(names) > 1 else Level.OK
    return Finding(
        "device", ", ".join(sorted(names)), level, "results may differ between models" if len(names) > 1 else ""
    )


def _cpu() -> Finding:
    return Finding("CPU capability", torch.backends.cpu.get_cpu_capability())


def _threads() -> Finding:
    count = torch.get_num_threads()
    policy = os.environ.get("OMP_WAIT_POLICY")
    value = f"{count} of {os.cpu_count()} cores, OMP_WAIT_POLICY={policy or 'unset'}"
    if count > (os.cpu_count() or count):
        return Finding("threads", value, Level.NOTE, "more threads than cores: slow")
    return Finding("threads", value)


def _compiler() -> Finding:
    compiler = _torch_private.cpp_compiler()
    if compiler is not None and shutil.which(compiler):
        return Finding("C++ compiler", shutil.which(compiler) or compiler)
    return Finding("C++ compiler", "none found", Level.WARNING, "install g++ or clang++, or set CXX: Inductor needs it")


def _caches() -> Finding:
    place = _torch_private.cache_directory()
    if os.access(place, os.W_OK):
        return Finding("cache", place)
    return Finding("cache", place, Level.WARNING, "not writable; set TORCHINDUCTOR_CACHE_DIR")


def _registered() -> Finding:
    entries = importlib.metadata.entry_points(group="torch_dynamo_backends")
    if any(entry.name == "detpass" for entry in entries):
        return Finding("backend", 'registered: torch.compile(backend="detpass")')
    return Finding("backend", "not registered", Level.WARNING, "install the package: pip install . (or import detpass)")


def _global_flag() -> Finding:
    if torch.are_deterministic_algorithms_enabled():
        advice = "detpass does not need it; it makes torch fall back to slower kernels"
        return Finding("torch's deterministic flag", "on", Level.NOTE, advice)
    return Finding("torch's deterministic flag", "off")


def _cublas() -> Finding:
    value = os.environ.get(CUBLAS_SETTING) or "unset"
    if cublas_repeats():
        return Finding(CUBLAS_SETTING, value)
    cuda = torch.cuda.is_available()
    return Finding(CUBLAS_SETTING, value, Level.WARNING if cuda else Level.OK, CUBLAS_ADVICE if cuda else "")


def _tf32() -> Finding:
    precision = torch.get_float32_matmul_precision()
    level = Level.NOTE if precision != "highest" and torch.cuda.is_available() else Level.OK
    return Finding(
        "float32 matmul precision",
        precision,
        level,
        "TF32 repeats, but other GPUs give other bits" if level != Level.OK else "",
    )


def _cudnn() -> Finding:
    if torch.backends.cudnn.benchmark:
        advice = "timings choose the algorithm: set torch.backends.cudnn.benchmark = False"
        return Finding("cuDNN benchmark", "on", Level.WARNING, advice)
    return Finding("cuDNN benchmark", "off")


def _suppress_errors() -> Finding:
    if _torch_private.suppress_errors():
        advice = "a failed compile runs eagerly, outside detpass: set torch._dynamo.config.suppress_errors = False"
        return Finding("Dynamo suppress_errors", "on", Level.WARNING, advice)
    return Finding("Dynamo suppress_errors", "off")


def _joint_passes() -> Finding:
    settings = _torch_private.inductor_settings()
    disabled = str(settings.get("disabled_passes") or "")
    if "joint" in disabled:
        advice = "detpass works in a joint pass: unset TORCHINDUCTOR_DISABLED_PASSES"
        return Finding("Inductor joint passes", f"disabled: {disabled}", Level.WARNING, advice)
    if not settings.get("use_joint_graph_passes", True):
        return Finding("Inductor joint passes", "off", Level.WARNING, "detpass works in a joint pass: turn them on")
    return Finding("Inductor joint passes", "on")


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _torch,
    _triton,
    _device,
    _cpu,
    _threads,
    _compiler,
    _caches,
    _registered,
    _global_flag,
    _cublas,
    _tf32,
    _cudnn,
    _suppress_errors,
    _joint_passes,
)
"""Every check, in the order printed."""


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)
