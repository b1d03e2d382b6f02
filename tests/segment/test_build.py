"""Building: concurrent processes, the cache, and refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from detpass.errors import ConfigurationError
from detpass.segment import build, cpu

ROOT = Path(__file__).parents[2]
LOAD = "import torch, detpass.segment.build as b; assert b.load('sums').detpass_plan; print(b.cpu_capability())"
needs_compiler = pytest.mark.skipif(build.load("sums") is None, reason="no C++ compiler here")


@pytest.mark.slow
@needs_compiler
def test_many_processes_build_at_once(tmp_path):
    environment = {**os.environ, "DETPASS_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", LOAD]
    started = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    left = sorted(path.suffix for path in tmp_path.iterdir())
    assert left == [".lock", ".so"], left


@needs_compiler
def test_one_openmp_runtime():
    build.load("sums")
    runtimes = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    runtimes = {path for path in runtimes if Path(path).name.startswith(("libgomp", "libiomp5", "libomp"))}
    assert len(runtimes) == 1, runtimes


@needs_compiler
def test_the_record_matches_the_c_structure():
    text = (build.SOURCES / "common.h").read_text()
    body = text[text.index("struct Call {") + len("struct Call {") : text.index("};", text.index("struct Call {"))]
    names = body.replace("i64", "").replace(";", ",").replace("\n", " ").split(",")
    assert tuple(name.strip() for name in names if name.strip()) == cpu.FIELDS


def test_capability_is_checked(monkeypatch):
    monkeypatch.setenv("DETPASS_CPU_CAPABILITY", "sse9")
    with pytest.raises(ConfigurationError, match="'sse9'; expected one of default, avx2, avx512"):
        build.cpu_capability()
    monkeypatch.setattr(build.torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setenv("DETPASS_CPU_CAPABILITY", "avx512")
    with pytest.raises(ConfigurationError, match="this processor offers 'default'"):
        build.cpu_capability()
    monkeypatch.delenv("DETPASS_CPU_CAPABILITY")
    assert build.cpu_capability() == "default"


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("DETPASS_CACHE_DIR", str(tmp_path))
    assert build.cache_directory() == tmp_path
    monkeypatch.delenv("DETPASS_CACHE_DIR")
    assert build.cache_directory().name == "detpass"


@needs_compiler
def test_a_damaged_library_is_replaced(tmp_path, monkeypatch):
    good = Path(build.build("sums", build.cpu_capability())._name)
    builds = []

    def compile_(name, compiler, flags, runtime, target):
        builds.append(target)
        target.write_bytes(b"cut short" if len(builds) == 1 else good.read_bytes())

    monkeypatch.setenv("DETPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_compile", compile_)
    assert build.build("sums", build.cpu_capability()).detpass_plan
    assert builds == [builds[0]] * 2
