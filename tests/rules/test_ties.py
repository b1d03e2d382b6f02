"""Order statistics: eager's values, and among equal values the smallest index."""

from __future__ import annotations

import pytest
import torch

from detpass.rule import Match, Safe
from detpass.rules.ties import SmallestIndexAmongEquals
from tests.rules.direct import replaced, verdict_of

aten = torch.ops.aten
RULE = SmallestIndexAmongEquals()
NAN = float("nan")


def rows(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randint(0, 4, (6, 9)).to(dtype)


def first_place(x, values, dim):
    """The smallest index of each value, by looking."""
    out = torch.empty_like(values, dtype=torch.int64)
    for at in torch.cartesian_prod(*[torch.arange(n) for n in values.shape]).tolist():
        line = list(at)
        line[dim] = slice(None)
        value = values[tuple(at)]
        same = x[tuple(line)].isnan() if value.isnan() else x[tuple(line)] == value
        out[tuple(at)] = same.nonzero()[0, 0]
    return out


SINGLE = [
    (aten.median.dim, (1, True)),
    (aten.median.dim, (0, True)),
    (aten.nanmedian.dim, (1, True)),
    (aten.kthvalue.default, (3, 1, True)),
    (aten.kthvalue.default, (2, 0, True)),
    (aten.mode.default, (1, True)),
    (aten.mode.default, (0, True)),
]


@pytest.mark.parametrize(("target", "args"), SINGLE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_one_value_of_each_row(target, args, dtype):
    x = rows(dtype)
    values, indices = replaced(RULE, target, x, *args, device="cuda")
    assert torch.equal(values, target(x, *args)[0])
    assert torch.equal(indices, first_place(x.double(), values.double(), args[-2]))


@pytest.mark.parametrize("target", [aten.median.dim, aten.nanmedian.dim, aten.kthvalue.default])
def test_nan(target):
    x = rows()
    x[2, 3], x[3], x[4, 0] = NAN, NAN, NAN
    args = (9, 1, True) if target is aten.kthvalue.default else (1, True)
    values, indices = replaced(RULE, target, x, *args, device="cuda")
    torch.testing.assert_close(values, target(x, *args)[0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(indices, first_place(x, values, 1))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_topk(largest, dim):
    x = rows()
    values, indices = replaced(RULE, aten.topk.default, x, 4, dim, largest, device="cuda")
    assert torch.equal(values, x.topk(4, dim, largest).values)
    assert torch.equal(x.gather(dim, indices), values)
    # Equal neighbours stand in increasing order of their indices.
    n = indices.shape[dim]
    equal = values.narrow(dim, 0, n - 1) == values.narrow(dim, 1, n - 1)
    rising = indices.narrow(dim, 0, n - 1) < indices.narrow(dim, 1, n - 1)
    assert bool((~equal | rising).all())
    assert bool(equal.any())


@pytest.mark.parametrize("descending", [True, False])
def test_sort(descending):
    x = rows()
    values, indices = replaced(RULE, aten.sort.default, x, 1, descending, device="cuda")
    expected = torch.sort(x, dim=1, descending=descending, stable=True)
    assert torch.equal(values, expected.values)
    assert torch.equal(indices, expected.indices)


def test_without_keepdim():
    x = rows()
    for target, args in ((aten.median.dim, (1,)), (aten.kthvalue.default, (3, 0)), (aten.mode.default, (0,))):
        got, want = replaced(RULE, target, x, *args, device="cuda"), target(x, *args)
        assert torch.equal(got[0], want[0])
        assert got[1].shape == want[1].shape


def test_what_is_left_alone():
    x = rows()
    assert isinstance(verdict_of(RULE, aten.topk.default, x, 4, device="cpu"), Safe)
    assert isinstance(verdict_of(RULE, aten.sort.stable, x, stable=True, device="cuda"), Safe)
    assert isinstance(verdict_of(RULE, aten.median.dim, torch.tensor(1.0), 0, device="cuda"), Safe)
    unstable = verdict_of(RULE, aten.sort.stable, x, stable=False, device="cuda")
    assert isinstance(unstable, Match)
