"""Rounding to half precision and quotients: equal to torch's, and kept by the compiler."""

from __future__ import annotations

import torch

from detpass.inspection.cuda_code import CudaSettings, cuda_code_with
from detpass.rules.kernel_rounding import quotient, round_to_half, rounding, size_as_tensor
from tests.rules.direct import bits


def halves() -> torch.Tensor:
    """Every value of float16, as float32."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()


def between() -> torch.Tensor:
    """All midpoints of neighbours, the numbers just beside them, random bits, and what overflows."""
    exact = halves()
    finite = exact[exact.isfinite()].unique()
    middle = ((finite[1:].double() + finite[:-1].double()) / 2).float()
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    random = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0))
    edges = torch.tensor([65504.0, 65519.996, 65520.0, -65520.0, 3e38, torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    return torch.cat(
        (middle, middle.nextafter(up), middle.nextafter(down), random.to(torch.int32).view(torch.float32), edges)
    )


def test_it_is_the_conversion_there_and_back():
    values = torch.cat((halves(), between()))
    got, want = round_to_half(values), values.half().float()
    numbers = ~want.isnan()
    assert torch.equal(bits(got[numbers]), bits(want[numbers]))
    assert got[~numbers].isnan().all()


def test_compiled_code_rounds_after_each_operation():
    """Where Inductor drops a plain conversion there and back, which the second assertion shows."""
    x = torch.rand(4096, generator=torch.Generator().manual_seed(1)) * 100

    def steps(rounded):
        return lambda x: rounded(rounded(x * 0.3) - 0.5) * 7.0

    want = steps(lambda x: x.half().float())(x)
    torch._dynamo.reset()
    assert torch.equal(bits(torch.compile(steps(round_to_half))(x)), bits(want))
    assert not torch.equal(steps(rounding(torch.float32))(x), want)


def test_only_half_precision_is_rounded():
    x = torch.rand(8, dtype=torch.float64)
    assert rounding(torch.float64)(x) is x
    assert rounding(torch.float16) is round_to_half


def test_quotients_are_rounded_correctly():
    whole = torch.arange(1.0, 4000.0)
    values = torch.cat((whole, whole.nextafter(torch.tensor(torch.inf)), torch.rand(4000) * 300))
    reciprocals_differ = False
    for divisor in range(1, 40):
        want = values / torch.tensor(float(divisor))
        assert torch.equal(quotient(values, size_as_tensor(divisor, values.device)), want)
        # An error in the last place of float64, such as a product with the reciprocal makes, is rounded away ...
        assert torch.equal((values.double() * (1.0 / divisor)).float(), want)
        # ... and one of float32 is not.
        reciprocals_differ |= not torch.equal(values * torch.tensor(1.0 / divisor), want)
    assert reciprocals_differ


def test_cuda_code_divides_by_a_size():
    """Where it multiplies by the reciprocal of a constant."""
    settings, inputs = CudaSettings("detpass", compile_kernels=False), [torch.rand(64, dtype=torch.float64)]
    plain = cuda_code_with(settings, lambda x: (x / 7).ceil(), inputs)
    assert "0.142857" in "".join(plain.sources.values())
    exact = cuda_code_with(settings, lambda x: quotient(x, size_as_tensor(7, x.device)).ceil(), inputs)
    assert "0.142857" not in "".join(exact.sources.values())
    assert " / " in "".join(exact.sources.values())
