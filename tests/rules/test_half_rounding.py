"""Rounding to half precision on the bits: equal to torch's conversion, and kept by the compiler."""

from __future__ import annotations

import torch

from detpass.rules.half_rounding import round_to_half, rounding
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
