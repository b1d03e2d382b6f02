"""Scans in fixed blocks: values, lengths around the block sizes, refusals, and compiled, sizes known or not."""

from __future__ import annotations

import pytest
import torch

from detpass.backend import detpass, reports
from detpass.inspection.cuda_code import CudaSettings, cuda_code_with
from detpass.rule import Safe
from detpass.rules.doubling import BLOCK
from detpass.rules.scan import SCANS, FixedOrderScan
from tests.rules.compiled import compile_and_compare
from tests.rules.direct import bits, replaced, verdict_of

aten = torch.ops.aten
RULE = FixedOrderScan()


def data(target, shape, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype)
    return 1 + x / 100 if target is aten.cumprod.default else x


@pytest.mark.parametrize("target", list(SCANS), ids=str)
@pytest.mark.parametrize("length", [BLOCK + 1, 2 * BLOCK, 1000, BLOCK**2, BLOCK**2 + 1])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_values(target, length, dim):
    shape = [2, 3]
    shape[dim] = length
    x = data(target, shape)
    torch.testing.assert_close(replaced(RULE, target, x, dim, device="cuda"), target(x, dim), rtol=1e-10, atol=1e-10)


def test_a_block_is_scanned_left_to_right_and_the_totals_before_it_are_added_last():
    x = data(aten.cumsum.default, (2 * BLOCK + 5,), torch.float32)
    blocks = [x[:BLOCK], x[BLOCK : 2 * BLOCK], x[2 * BLOCK :]]
    inner = [block.cumsum(0) for block in blocks]
    expected = torch.cat([inner[0], inner[1] + inner[0][-1], inner[2] + (inner[0][-1] + inner[1][-1])])
    assert torch.equal(bits(replaced(RULE, aten.cumsum.default, x, 0, device="cuda")), bits(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scans_in_float32(dtype):
    x = data(aten.cumsum.default, (3, 700), torch.float32).to(dtype)
    wide = replaced(RULE, aten.cumsum.default, x.float(), 1, device="cuda")
    assert torch.equal(bits(replaced(RULE, aten.cumsum.default, x, 1, device="cuda")), bits(wide.to(dtype)))


def test_the_dtype_argument_is_applied_first():
    x = torch.arange(600, dtype=torch.int64)
    got = replaced(RULE, aten.cumsum.default, x, 0, dtype=torch.float32, device="cuda")
    assert got.dtype is torch.float32
    assert torch.equal(got, torch.cumsum(x, 0, dtype=torch.float32))


def test_infinity_and_nan_follow_eager():
    x = data(aten.cumsum.default, (700,), torch.float32)
    x[300], x[650] = float("inf"), float("nan")
    got, want = replaced(RULE, aten.cumsum.default, x, 0, device="cuda"), x.cumsum(0)
    assert torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got.isnan(), want.isnan())


def test_what_is_left_alone():
    cuda = {"device": "cuda"}
    assert isinstance(verdict_of(RULE, aten.cumsum.default, torch.randn(1000), 0, device="cpu"), Safe)
    assert isinstance(verdict_of(RULE, aten.cumsum.default, torch.arange(1000), 0, **cuda), Safe)
    assert isinstance(verdict_of(RULE, aten.cumsum.default, torch.tensor(1.0), 0, **cuda), Safe)


def complex_data(target, shape, dtype):
    """Factors of cumulative products have a modulus near 1, so that the products neither vanish nor grow."""
    torch.manual_seed(0)
    real = dtype.to_real()
    if target is aten.cumprod.default:
        return torch.polar(1 + torch.randn(shape, dtype=real) / 100, 10 * torch.randn(shape, dtype=real))
    return torch.randn(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("target", list(SCANS), ids=str)
@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, 1000, pytest.param(BLOCK**2 + 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dim", [0, -1])
def test_complex_values(target, length, dim, dtype):
    shape = [2, 3]
    shape[dim] = length
    x = complex_data(target, shape, dtype)
    got, want = replaced(RULE, target, x, dim, device="cuda"), target(x.to(torch.complex128), dim)
    assert got.dtype is dtype
    # The error of a sum or product in float32 grows with the logarithm of the length, over the largest partial result;
    # logarithms are computed in float64.
    in_single = 1e-7 if target is aten.logcumsumexp.default else 1e-5
    tolerance = in_single if dtype is torch.complex64 else 1e-13
    torch.testing.assert_close(got.to(torch.complex128), want, rtol=tolerance, atol=tolerance * want.abs().max().item())


@pytest.mark.parametrize("target", list(SCANS), ids=str)
def test_complex_scans_of_nothing_one_element_and_conjugates(target):
    x = complex_data(target, (3, 300), torch.complex128)
    for given in (x[:, :0], x[:0], x[:, :1], x.conj()):
        got, want = replaced(RULE, target, given, 1, device="cuda"), target(given, 1)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


INF, NAN = float("inf"), float("nan")
SPECIAL = [
    [complex(INF, 1), 0j, complex(INF, 2)],
    [complex(INF, 1), complex(INF, 1)],
    [complex(-INF, 1), complex(-INF, 2), 1 + 1j],
    [complex(0, NAN), 1 + 1j],
    [1 + 1j, complex(NAN, 0), 2j],
    [complex(-INF, NAN), 1 + 1j],
    [5 + 0j, complex(5, torch.pi)],
    [3j, 3j, 3j],
    [3j, -3j],
    [complex(0, INF)],
    [complex(INF, INF)],
    [complex(-INF, INF), 1j, 2 - 7j],
    [1j, complex(0, INF)],
    [1j, complex(INF, 7), 5 - 5j, complex(INF, -4), 2],
    [complex(INF, 1), complex(INF, 4), 1j, complex(INF, 4)],
    [1j, complex(INF, 7), complex(0, NAN), 1j],
    [complex(INF, 0), 5 + 5j, complex(INF, 2)],
    [50j, 1 + 0j, 60j, -3 - 900j],
]


@pytest.mark.parametrize("values", SPECIAL, ids=str)
def test_special_logarithms_follow_eager(values):
    x = torch.tensor(values, dtype=torch.complex128)
    got, want = replaced(RULE, aten.logcumsumexp.default, x, 0, device="cuda"), x.logcumsumexp(0)
    # log(1 + exp(pi i)) is the logarithm of a rounding error; eager's sine of pi is the same one.
    torch.testing.assert_close(torch.view_as_real(got), torch.view_as_real(want), rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("target", list(SCANS), ids=str)
def test_complex_scans_repeat(target):
    x = complex_data(target, (2, 600), torch.complex64)
    first = torch.view_as_real(replaced(RULE, target, x, 1, device="cuda"))
    for _ in range(20):
        assert torch.equal(bits(torch.view_as_real(replaced(RULE, target, x, 1, device="cuda"))), bits(first))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp"])
def test_complex_scans_compiled(name):
    torch.manual_seed(0)
    z = torch.randn(2, 11, dtype=torch.complex128, requires_grad=True)
    records = compile_and_compare(
        lambda z: torch.view_as_real(getattr(z, name)(1)), z, rtol=1e-9, atol=1e-9, runs=20, target="cuda"
    )
    assert records[f"aten.{name}.default"] == ("closed_form", "fixed_order_scan")


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp"])
def test_the_code_for_complex_scans_has_no_look_back(name, dynamic):
    pytest.importorskip("triton", reason="triton is not installed")
    z = torch.randn(2, 11 if name == "cumprod" else 300, dtype=torch.complex64, requires_grad=True)
    settings = CudaSettings(dynamic=dynamic, compile_kernels=False)
    code = cuda_code_with(settings, lambda z: torch.view_as_real(getattr(z, name)(1)).square().sum(), [z])
    assert code.deterministic
    assert set(code.sources) == {"forward0", "backward0"}


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    torch._dynamo.reset()
    before = len(reports())
    compiled = torch.compile(
        lambda x: x.cumsum(-1) * x.logcumsumexp(-1), backend=detpass, options={"target": "cuda"}, dynamic=dynamic
    )
    for length in (1000, 777):
        x = data(aten.cumsum.default, (3, length))
        with torch._inductor.config.patch(force_disable_caches=True):
            got = compiled(x)
        torch.testing.assert_close(got, x.cumsum(-1) * x.logcumsumexp(-1), rtol=1e-10, atol=1e-10)
    rules = {record.rule for report in reports()[before:] for record in report.records}
    assert rules == {"fixed_order_scan"}


def test_the_code_for_cuda_has_no_look_back():
    def scans(tall, wide, short):
        return tall.cumsum(0), wide.cumsum(1), wide.t().logcumsumexp(0), short.cumsum(0)

    settings = CudaSettings(compile_kernels=False)
    inputs = [torch.randn(shape) for shape in ((3000, 2), (2, 70000), (200, 3))]
    assert not cuda_code_with(settings, scans, inputs, {}).float_scans
