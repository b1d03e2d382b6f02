"""Native calls: the schema of what they wrap, flags set for the call alone and restored even when it raises."""

from __future__ import annotations

import pytest
import torch

from detpass.backend import detpass, reports
from detpass.rule import Match, Safe, Treatment
from detpass.rules.native import DeterministicKernel
from detpass.rules.native_calls import deterministic_kernels, native
from tests.rules.direct import verdict_of

aten = torch.ops.aten
RULE = DeterministicKernel()


def flags():
    return (
        torch.get_deterministic_debug_mode(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def call():
    torch.manual_seed(0)
    x, w, grad = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 6, 6)
    return grad, x, w, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]


def test_flags_are_set_inside_and_restored():
    before = flags()
    with deterministic_kernels():
        assert flags() == (2, True, False, False)
        with deterministic_kernels():
            assert flags() == (2, True, False, False)
        assert flags() == (2, True, False, False)
    assert flags() == before


def test_flags_are_restored_when_the_call_raises():
    before = flags()
    grad, *rest = call()
    with pytest.raises(RuntimeError):
        native(aten.convolution_backward.default)(grad[:, :1], *rest)
    assert flags() == before


def test_the_users_own_settings_survive():
    torch.backends.cudnn.benchmark = True
    try:
        with deterministic_kernels():
            assert not torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = False


def test_the_wrapped_operator_is_called_under_the_flags_with_its_own_result():
    for mine, theirs in zip(
        native(aten.convolution_backward.default)(*call()), aten.convolution_backward(*call()), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("target", DeterministicKernel.targets, ids=str)
def test_schemas_are_those_of_the_wrapped_operators(target):
    def signature(overload):
        return str(overload._schema).split("(", 1)[1]

    assert signature(native(target)) == signature(target)
    assert native(target) is native(target)


def test_fake_tensors_get_the_wrapped_operators_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in call()]
        shapes = [tuple(out.shape) for out in native(aten.convolution_backward.default)(*fakes)]
    assert shapes == [(2, 3, 8, 8), (4, 3, 3, 3), (4,)]


def test_what_is_wrapped():
    verdict = verdict_of(RULE, aten.convolution_backward.default, *call(), device="cuda")
    assert isinstance(verdict, Match)
    assert verdict.treatment is Treatment.NATIVE
    assert isinstance(verdict_of(RULE, aten.convolution_backward.default, *call()), Safe)
    x, w = torch.randn(1, 3, 8, 8), torch.randn(3, 3, 3, 3)
    tail = (None, [1, 1], [0, 0], [1, 1])
    assert isinstance(verdict_of(RULE, aten.convolution.default, x, w, *tail, False, [0, 0], 1, device="cuda"), Safe)
    assert isinstance(verdict_of(RULE, aten.convolution.default, x, w, *tail, True, [0, 0], 1, device="cuda"), Match)


def test_compiled_for_cuda():
    torch.manual_seed(0)
    torch._dynamo.reset()
    before = len(reports())
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ConvTranspose2d(4, 3, 2, stride=2))
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    compiled = torch.compile(model, backend=detpass, options={"target": "cuda"})
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled(x).sum().backward()
    got, x.grad = x.grad, None
    model(x).sum().backward()
    torch.testing.assert_close(got, x.grad)
    records = [(r.op, str(r.treatment)) for report in reports()[before:] for r in report.records]
    assert sorted(records) == [
        ("aten.convolution.default", "native"),
        ("aten.convolution.default", "safe"),
        ("aten.convolution_backward.default", "native"),
        ("aten.convolution_backward.default", "native"),
    ]
    assert not torch.are_deterministic_algorithms_enabled()


def test_where_cudnn_flags_are_frozen_the_rest_is_set_and_restored():
    """After ``torch.backends.disable_global_flags`` (torch's own test library calls it) cuDNN's flags cannot be set."""
    before = flags()
    torch.backends.disable_global_flags()
    try:
        with deterministic_kernels():
            assert torch.get_deterministic_debug_mode() == 2
        assert flags() == before
    finally:
        # torch has no way back in its interface.
        torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    assert not torch.backends.flags_frozen()
