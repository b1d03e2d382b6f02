"""cuBLAS's workspace: its absence is one warning with the remedy, for CUDA alone."""

from __future__ import annotations

import warnings

import pytest
import torch

from detpass import escapes
from detpass.config import CUBLAS_SETTING
from detpass.environment import findings
from detpass.errors import EnvironmentWarning


def compile_for(target):
    torch._dynamo.reset()
    model = torch.compile(torch.sin, backend="detpass", options={} if target is None else {"target": target})
    model(torch.ones(3))


@pytest.fixture(autouse=True)
def not_warned_yet():
    escapes._warn_of_cublas.cache_clear()
    yield
    escapes._warn_of_cublas.cache_clear()


def test_a_compile_for_cuda_warns_once_and_names_the_remedy(monkeypatch):
    monkeypatch.delenv(CUBLAS_SETTING, raising=False)
    with pytest.warns(EnvironmentWarning, match=f"{CUBLAS_SETTING}=:4096:8"):
        compile_for("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error", EnvironmentWarning)
        compile_for("cuda")


@pytest.mark.parametrize(("target", "value"), [(None, None), ("cpu", None), ("cuda", ":4096:8"), ("cuda", ":16:8")])
def test_no_warning_on_a_cpu_nor_where_it_is_set(monkeypatch, target, value):
    monkeypatch.delenv(CUBLAS_SETTING, raising=False)
    if value is not None:
        monkeypatch.setenv(CUBLAS_SETTING, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EnvironmentWarning)
        compile_for(target)


@pytest.mark.parametrize("value", [None, ":0:0", "4096"])
def test_other_values_do_not_count(monkeypatch, value):
    monkeypatch.delenv(CUBLAS_SETTING, raising=False)
    if value is not None:
        monkeypatch.setenv(CUBLAS_SETTING, value)
    with pytest.warns(EnvironmentWarning):
        escapes.check_cublas({"cuda"})
    finding = next(finding for finding in findings() if finding.name == CUBLAS_SETTING)
    assert finding.value == (value or "unset")
