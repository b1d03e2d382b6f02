"""deform_conv2d backward: the rewritten form against torchvision's kernels."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import pytest
import torch

from detpass.inspection.cuda_code import CudaSettings, cuda_code_with
from detpass.rule import Safe, Treatment
from detpass.rules import deformable
from detpass.rules.deformable import DeformConv2dBackward
from tests.rules.compiled import OnCuda, compile_and_compare
from tests.rules.direct import bits, replaced, verdict_of
from tests.rules.vision import torchvision_ops

ops = torchvision_ops()
RULE, TARGET = DeformConv2dBackward(), torch.ops.torchvision._deform_conv2d_backward.default
GRADIENTS = ("input", "weight", "offset", "mask", "bias")


@dataclass(frozen=True)
class Layer:
    """Sizes of one call."""

    samples: int = 2
    channels: int = 4
    outputs: int = 6
    cells: tuple[int, int] = (7, 8)
    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    offset_groups: int = 1
    masked: bool = True

    @property
    def positions(self) -> list[int]:
        return [
            (cells + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for cells, kernel, stride, pad, dilation in zip(*astuple(self)[3:8], strict=True)
        ]

    def arguments(self, dtype=torch.float64, seed=0):
        """Random operands; offsets are several cells long, so that some points lie outside."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        taps = self.offset_groups * self.kernel[0] * self.kernel[1]
        return [
            normal(self.samples, self.outputs, *self.positions),
            normal(self.samples, self.channels, *self.cells),
            normal(self.outputs, self.channels // self.groups, *self.kernel),
            normal(self.samples, 2 * taps, *self.positions) * 3,
            normal(self.samples, taps, *self.positions) if self.masked else torch.zeros(self.samples, 1, dtype=dtype),
            normal(self.outputs),
            *(*self.stride, *self.pad, *self.dilation, self.groups, self.offset_groups, self.masked),
        ]


LAYERS = {
    "plain": Layer(masked=False),
    "modulated": Layer(),
    "groups": Layer(3, 8, 4, (9, 7), (2, 3), (2, 1), (0, 2), (1, 2), groups=2, offset_groups=4),
    "groups, plain": Layer(3, 8, 4, (9, 7), (2, 3), (1, 2), (2, 0), (2, 1), groups=4, offset_groups=2, masked=False),
    "one row": Layer(1, 2, 2, (1, 5), (1, 1), pad=(0, 0)),
    "no samples": Layer(0),
}


def check(args, rtol, atol):
    got, want = replaced(RULE, TARGET, *args, device="cuda"), TARGET(*args)
    for name, mine, theirs in zip(GRADIENTS, got, want, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", LAYERS)
def test_the_gradients_are_torchvisions(name):
    # Some tens of products of normal numbers.
    check(LAYERS[name].arguments(), rtol=1e-11, atol=1e-12)
    check(LAYERS[name].arguments(torch.float32), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_half_precision(name):
    """torchvision adds in half precision: a hundred roundings of sums up to some tens."""
    check(LAYERS[name].arguments(torch.float16), rtol=1e-2, atol=0.15)


def test_half_precision_sums_in_float32():
    """Points are rounded as torchvision rounds them; then every gradient is that of the same numbers in float32."""
    args = LAYERS["modulated"].arguments(torch.float16)
    # Offsets that need no rounding: half precision has 1/128 up to 16, where the points are.
    args[3] = (args[3] * 64).round() / 64
    wide = [value.float() if isinstance(value, torch.Tensor) else value for value in args]
    got, want = (replaced(RULE, TARGET, *these, device="cuda") for these in (args, wide))
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(bits(mine), bits(theirs.half()))


def test_points_of_half_precision_are_rounded():
    """A tap at 100 moved by 0.03: half precision has 100 and 100.0625 there, so the point is at 100."""
    layer = Layer(1, 1, 1, (128, 1), (1, 1), pad=(0, 0), masked=False)
    args = layer.arguments(torch.float16)
    args[0].zero_()[0, 0, 100, 0] = 1.0
    args[3].zero_()[0, 0] = 0.03
    got, want = replaced(RULE, TARGET, *args, device="cuda"), TARGET(*args)
    assert got[0][0, 0, 101, 0] == 0
    assert torch.equal(bits(got[0]), bits(want[0]))


def test_points_on_cells_and_at_the_borders():
    args = LAYERS["modulated"].arguments()
    args[3] = args[3].round()
    check(args, rtol=1e-11, atol=1e-12)


def test_points_that_are_not_finite_add_nothing():
    args = LAYERS["modulated"].arguments()
    for place, value in enumerate((torch.nan, torch.inf, -torch.inf, 1e30)):
        args[3][0, place, 2, 3] = value
    wild = replaced(RULE, TARGET, *args, device="cuda")[0]
    for place in range(4):
        args[3][0, place, 2, 3] = 1e6
    assert torch.equal(bits(wild), bits(replaced(RULE, TARGET, *args, device="cuda")[0]))


def test_blocks_of_channels_give_the_same_bits(monkeypatch):
    args = LAYERS["groups"].arguments(torch.float32)
    whole = replaced(RULE, TARGET, *args, device="cuda")
    monkeypatch.setattr(deformable, "MOST_SHARES", 1)
    for one, other in zip(whole, replaced(RULE, TARGET, *args, device="cuda"), strict=True):
        assert torch.equal(bits(one), bits(other))


def test_treatment_depends_on_the_device():
    args = LAYERS["plain"].arguments()
    assert verdict_of(RULE, TARGET, *args, device="cuda").treatment is Treatment.SEGMENT
    assert isinstance(verdict_of(RULE, TARGET, *args, device="cpu"), Safe)


def convolution(layer):
    """The layer as a function, and its inputs, all of which need gradients."""
    _, source, weight, offset, mask, bias, *_ = layer.arguments(torch.float32)
    tensors = [source, offset, weight, bias, *([mask] if layer.masked else [])]

    def function(source, offset, weight, bias, mask=None):
        return ops.deform_conv2d(source, offset, weight, bias, layer.stride, layer.pad, layer.dilation, mask)

    return function, [tensor.requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("name", ["modulated", pytest.param("groups, plain", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("threads", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_compiled(name, dynamic, threads):
    function, inputs = convolution(LAYERS[name])
    torch.set_num_threads(threads)
    # float32, sums of up to a hundred products.
    records = compile_and_compare(
        function, *inputs, rtol=1e-4, atol=1e-4, runs=20, dynamic=dynamic, rules=[OnCuda(RULE)]
    )
    assert records["torchvision._deform_conv2d_backward.default"] == ("segment", f"{RULE.name}_on_cuda")


def test_cuda_code_is_deterministic():
    function, inputs = convolution(LAYERS["modulated"])
    code = cuda_code_with(CudaSettings("detpass", compile_kernels=False), function, inputs)
    assert not any((code.float_atomics, code.float_scans, code.nondeterministic_externs))
    assert not any("deform_conv2d_backward" in call.operator for call in code.extern_calls)
    plain = cuda_code_with(CudaSettings("inductor", compile_kernels=False), function, inputs)
    assert plain.nondeterministic_externs


@pytest.mark.parametrize("number", [1, 4], ids=["offset", "mask"])
def test_operands_that_eager_refuses_are_refused(number):
    function, inputs = convolution(LAYERS["modulated"])
    compiled = torch.compile(function, backend="detpass", options={"target": "cuda"})
    inputs[number] = inputs[number][:, :-1].detach().requires_grad_()
    for call in (function, compiled):
        with pytest.raises(RuntimeError, match=f"{['', 'offset', '', '', 'mask'][number]}.* is not valid"):
            call(*inputs).sum().backward()
