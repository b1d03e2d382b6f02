"""Builds the CPU kernels of ``cpp/`` once, with the compiler that Inductor uses, and loads them.

The kernels have a plain C interface (raw pointers, no headers of torch), so a build takes seconds and serves every
release of torch. A library is cached under ``DETPASS_CACHE_DIR`` (default: a folder of Inductor's cache directory),
named by a hash of the sources, the compiler's version and the flags; processes that build at once wait for one another
and publish with an atomic rename. Results do not depend on the instruction set chosen: ``DETPASS_CPU_CAPABILITY`` may
lower it (``avx512``, ``avx2``, ``default``), which the tests use to compare bits.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from detpass import _torch_private
from detpass.errors import ConfigurationError, KernelBuildWarning
from detpass.segment.constants import CHUNK_ROWS, FAN_IN

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpp"
LIBRARIES = {
    "sums": ("sums_float.cpp", "positions.cpp"),
    "wide": ("sums_wide.cpp",),
    "others": ("products.cpp", "extremes.cpp"),
}
"""Each is built when first needed; most models need ``sums`` alone."""

_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=default", "-ffp-contract=off", "-fno-fast-math", "-w")
_CAPABILITIES = {
    "avx512": ("-mavx2", "-mf16c", "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mprefer-vector-width=512"),
    "avx2": ("-mavx2", "-mf16c"),
    "default": (),
}


class BuildError(Exception):
    """Why no library could be built or loaded; ``load`` turns it into a warning."""


def cpu_capability() -> str:
    """Return the instruction set to build for: the processor's best, or ``DETPASS_CPU_CAPABILITY``.

    Raises ConfigurationError for an unknown name and for one that the processor lacks.
    """
    order = ("default", "avx2", "avx512")
    best = torch.backends.cpu.get_cpu_capability().lower()
    best = best if best in order and platform.machine() in ("x86_64", "AMD64") else "default"
    asked = os.environ.get("DETPASS_CPU_CAPABILITY", "").lower() or best
    if asked not in order:
        raise ConfigurationError(f"DETPASS_CPU_CAPABILITY={asked!r}; expected one of {', '.join(order)}")
    if order.index(asked) > order.index(best):
        raise ConfigurationError(f"DETPASS_CPU_CAPABILITY={asked!r}, but this processor offers {best!r}")
    return asked


def cache_directory() -> Path:
    """Return the folder of built libraries: ``DETPASS_CACHE_DIR``, or ``detpass`` in Inductor's cache directory."""
    own = os.environ.get("DETPASS_CACHE_DIR")
    return Path(own) if own else Path(_torch_private.cache_directory()) / "detpass"


@functools.cache
def load(name: str) -> ctypes.CDLL | None:
    """Return the library ``name`` of ``LIBRARIES``, built if need be; None (and one warning) where that fails."""
    try:
        return build(name, cpu_capability())
    except BuildError as error:
        warnings.warn(
            f"the CPU kernels could not be built ({error}); a form in plain torch with the same bits is used, which is "
            "slower. Install a C++17 compiler (g++ or clang++) or point CXX at one.",
            KernelBuildWarning,
            stacklevel=2,
        )
        return None


def build(name: str, capability: str) -> ctypes.CDLL:
    """Return the library for one instruction set, from the cache or freshly built. Raises BuildError."""
    if sys.platform == "win32":
        raise BuildError("no build for Windows yet")
    compiler, version = _compiler()
    runtime = _openmp_runtime()
    flags = (
        *_FLAGS,
        *_CAPABILITIES[capability],
        f"-DDETPASS_CHUNK_ROWS={CHUNK_ROWS}",
        f"-DDETPASS_FAN_IN={FAN_IN}",
        *(("-fopenmp",) if runtime else ()),
    )
    digest = hashlib.sha256("\0".join((version, platform.machine(), runtime or "", *flags)).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    directory = cache_directory()
    target = directory / f"{name}-{capability}-{digest.hexdigest()[:24]}.so"
    try:
        if not target.exists():
            directory.mkdir(parents=True, exist_ok=True)
            with _locked(target.with_suffix(".lock")):
                if not target.exists():
                    _compile(name, compiler, flags, runtime, target)
        try:
            return ctypes.CDLL(str(target))
        except OSError:  # cut short by a full disk, or for another system on a shared home: build it again
            with _locked(target.with_suffix(".lock")):
                _compile(name, compiler, flags, runtime, target)
            return ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(f"{target}: {error}") from error


def _compile(name: str, compiler: str, flags: tuple[str, ...], runtime: str | None, target: Path) -> None:
    log.info("building the CPU kernels %s", target)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:

        def one(source: str) -> str:
            made = str(Path(folder) / source) + ".o"
            _run([compiler, *flags, "-c", str(SOURCES / source), "-o", made])
            return made

        with ThreadPoolExecutor(max(1, min(len(LIBRARIES[name]), os.cpu_count() or 1))) as pool:
            objects = list(pool.map(one, LIBRARIES[name]))
        library = str(Path(folder) / target.name)
        # The OpenMP runtime by path and not by -fopenmp: the one that torch has loaded, never a second.
        _run([compiler, "-shared", *objects, *((runtime,) if runtime else ()), "-o", library])
        os.replace(library, target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")


@functools.cache
def _compiler() -> tuple[str, str]:
    """Return the compiler and a text that names its version."""
    name = os.environ.get("CXX") or _torch_private.cpp_compiler()
    path = shutil.which(name) if name else None
    if path is None:
        raise BuildError(f"no C++ compiler {name or 'in the path'}")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{path} --version: {error}") from error
    return path, done.stdout


@functools.cache
def _openmp_runtime() -> str | None:
    """Return the path of the OpenMP runtime in this process (torch's own), or None: the kernels then use one thread."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = dict.fromkeys(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so[^/\s]*)", mapped))
    beside_torch = [path for path in paths if Path(path).is_relative_to(Path(torch.__file__).parent.parent)]
    return next(iter([*beside_torch, *paths]), None)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock on ``path``; it is released when the process ends, however it ends."""
    import fcntl

    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)
