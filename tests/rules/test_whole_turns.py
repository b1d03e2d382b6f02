"""Cumulative complex log-sum-exps have the values and angles of eager's loop, where angles wind and sums cancel."""

from __future__ import annotations

import mpmath
import pytest
import torch

from detpass.rewriting.report import Report
from detpass.rules.doubling import BLOCK
from detpass.rules.scan import FixedOrderScan
from detpass.rules.whole_turns import unwound
from tests.conformance.capture import rewritten, values_and_gradients
from tests.rules.direct import replaced

logcumsumexp = torch.ops.aten.logcumsumexp.default
LENGTHS = [2, 7, BLOCK, BLOCK + 1, 700]


def rotating(length):
    """Unit vectors over nine turns: sums that wind, and that cancel once a turn."""
    return torch.complex(torch.zeros(length), torch.linspace(0, 60, length))


def growing(length):
    """Terms that outgrow the sum before them now and then, at angles of many turns."""
    generator = torch.Generator().manual_seed(1)
    angles = 30 * torch.randn(length, generator=generator)
    return torch.complex(torch.linspace(0, length / 30, length) + torch.randn(length, generator=generator), angles)


def spread(length):
    """Terms of very different sizes."""
    generator = torch.Generator().manual_seed(2)
    return torch.view_as_complex(18 * torch.rand(length, 2, generator=generator) - 9)


def small(length):
    """Terms near 1 at every angle."""
    generator = torch.Generator().manual_seed(3)
    return torch.view_as_complex(torch.randn(length, 2, generator=generator) * torch.tensor([0.1, 300]))


KINDS = [rotating, growing, spread, small]


def loop(x):
    """Logarithms of the sums of ``exp(x)``, at 60 digits, each angle near that of the larger of the two added."""
    with mpmath.workdps(60):
        total, real, angle, found = mpmath.mpc(0), -mpmath.inf, mpmath.mpf(0), []
        for term in x.tolist():
            near = term.imag if term.real >= real else angle
            total += mpmath.exp(mpmath.mpc(term))
            real, principal = mpmath.log(abs(total)), mpmath.arg(total)
            angle = principal + 2 * mpmath.pi * mpmath.nint((near - principal) / (2 * mpmath.pi))
            found.append(complex(real, angle))
    return torch.tensor(found, dtype=torch.complex128)


def worst(found, wanted):
    """The largest error of any component."""
    difference = (found.to(torch.complex128) - wanted).resolve_conj()
    return torch.view_as_real(difference).abs().max().item()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_logarithms_are_those_of_a_loop_and_rounded_once(kind, length):
    x = kind(length)
    want = loop(x)
    got = replaced(FixedOrderScan(), logcumsumexp, x, 0, device="cuda")
    # Half a rounding of complex64 for each component, and what float64 loses where a sum nearly cancels.
    error = torch.view_as_real(got.to(torch.complex128) - want).abs()
    assert bool((error <= 2.0**-24 * torch.view_as_real(want).abs() + 1e-10).all())
    assert worst(got, want) <= 1.001 * worst(x.logcumsumexp(0), want)


@pytest.mark.parametrize("kind", KINDS)
def test_double_precision_is_as_exact_as_eager(kind):
    x = kind(700).to(torch.complex128)
    want = loop(x)
    got = replaced(FixedOrderScan(), logcumsumexp, x, 0, device="cuda")
    assert worst(got, want) <= 2 * worst(x.logcumsumexp(0), want) + 1e-15


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [0, 1])
def test_several_rows(kind, dim):
    x = torch.stack([kind(300), kind(300).flip(0), kind(300).roll(7)], 1 - dim)
    got = replaced(FixedOrderScan(), logcumsumexp, x, dim, device="cuda")
    torch.testing.assert_close(got, x.logcumsumexp(dim), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_single_precision_are_as_exact_as_eager(kind):
    """The formula of the backward is autograd's own, with a second scan."""
    x = kind(300).requires_grad_()
    wide = x.detach().to(torch.complex128).requires_grad_()
    wanted = values_and_gradients(lambda z: [z.logcumsumexp(0)], [wide])[1]
    eager = values_and_gradients(lambda z: [z.logcumsumexp(0)], [x])[1]
    report = Report(compile_id=None)
    got = values_and_gradients(rewritten(lambda z: [z.logcumsumexp(0)], "cuda", report), [x])[1]
    assert [str(record.treatment) for record in report] == ["closed_form", "closed_form"]
    assert worst(got, wanted) <= 1.1 * worst(eager, wanted)


def test_turns_are_counted_from_the_last_term_that_is_the_larger():
    turn = 2 * torch.pi
    term = torch.tensor([0.0, 0.0, 9.0, 0.0, 0.0]), torch.tensor([0.1, 0.2, 3 * turn + 0.1, 0.3, 0.4])
    angle = torch.tensor([0.1, 0.15, 0.1, 0.1, 0.1])
    real = torch.tensor([0.0, 0.7, 9.0, 9.1, 9.2])
    off = torch.tensor([0.0, 2.0, -1.0, 5.0, 0.0])
    found = unwound(term, (real, angle + turn * off))
    torch.testing.assert_close(found, torch.tensor([0.1, 0.15, 3 * turn + 0.1, 3 * turn + 0.1, 3 * turn + 0.1]))


def test_infinite_sums_keep_the_angle_of_their_last_infinite_term_and_unknown_angles_stay():
    inf, nan = torch.inf, torch.nan
    term = torch.tensor([-inf, inf, 1.0, inf, 1.0, nan]), torch.tensor([50.0, 60.0, 70.0, 80.0, 90.0, 1.0])
    sums = torch.tensor([-inf, inf, inf, inf, inf, nan]), torch.tensor([0.0, 60.0, 0.5, 0.6, 0.6, nan])
    found = unwound(term, sums)
    torch.testing.assert_close(found, torch.tensor([0.0, 60.0, 60.0, 0.6, 0.6, nan]), equal_nan=True)
