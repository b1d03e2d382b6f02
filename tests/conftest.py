"""What every test shares: an Inductor cache of this session alone, two threads, torch's flag off, a clean Dynamo."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

# Before torch is imported, and inherited by pytest-xdist's workers and by the processes that tests start. Threads that
# spin at a barrier starve each other when several tests share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# detpass's own kernels are keyed by everything they depend on; building them anew for each session proves nothing.
os.environ.setdefault("DETPASS_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"detpass_kernels_{os.getuid()}"))
_OWN_CACHE = None
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    _OWN_CACHE = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="detpass_tests_")

import pytest
import torch

THREADS = 2
"""Threads of every test: with one, the nondeterminism that tests look for cannot happen."""


def pytest_unconfigure(config: pytest.Config) -> None:
    """The process that made the cache removes it."""
    if _OWN_CACHE is not None:
        shutil.rmtree(_OWN_CACHE, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests are skipped, with the reason, where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def clean_torch() -> Iterator[None]:
    """Two threads and a fresh Dynamo for each test; afterwards torch's determinism flag must still be off."""
    assert not torch.are_deterministic_algorithms_enabled(), (
        "torch's flag was on before the test: it would pass it for us"
    )
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    yield
    left_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(THREADS)
    torch._dynamo.reset()
    assert not left_on, "the test, or the code under test, left torch's determinism flag on"
