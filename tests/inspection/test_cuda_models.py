"""CUDA code of many small models, generated with no GPU: Inductor's has hazards, detpass's has none."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from detpass.errors import InspectionError
from detpass.inspection.cuda_code import CudaCode, CudaSettings, cuda_code_with
from tests.inspection.cuda_models import MODELS, ModelCase

pytestmark = pytest.mark.slow

REFUSED = "recurrent layers"
"""Dynamo compiles no graph of it."""
BROKEN = "mixed"
"""Has a GRU in the middle: two graphs and eager code between them."""
DYNAMIC = {"convolutions", "messages", "half precision", "complex", "view scatter", "experts"}
"""Generated with symbolic sizes; the others, to save time, with fixed ones."""
COMPILED = [case for case in MODELS if case.name != REFUSED]


def generated(case: ModelCase, backend: str) -> CudaCode:
    function, inputs = case.make()
    dynamic = True if case.name in DYNAMIC else None
    return cuda_code_with(CudaSettings(backend, dynamic=dynamic, compile_kernels=False), function, inputs)


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_detpass_leaves_no_hazard(case: ModelCase) -> None:
    code = generated(case, "detpass")
    assert code.float_atomics == code.locks == code.float_scans == code.nondeterministic_externs == ()
    assert any(name.startswith("backward") for name in code.sources)
    assert bool(code.graph_breaks) == (case.name == BROKEN)
    assert code.deterministic == (case.name != BROKEN)


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_inductors_code_has_hazards(case: ModelCase) -> None:
    code = generated(case, "inductor")
    assert code.float_atomics or code.float_scans or code.nondeterministic_externs
    assert not code.deterministic


@pytest.mark.parametrize("backend", ["detpass", "inductor"])
def test_a_model_of_recurrent_layers_alone_is_refused(backend: str) -> None:
    (case,) = (case for case in MODELS if case.name == REFUSED)
    with pytest.raises(InspectionError, match=r"no graph was compiled: .*LSTM\(8, 8.*allow_rnn = True"):
        generated(case, backend)
