"""Each accumulation and plain write in each float dtype: right values, the same bits in every run, its treatment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from detpass.backend import detpass, last_report
from detpass.segment import reference
from tests.rules.direct import bits

from .accumulations import CASES, FLOATS, Case, N, ints

aten = torch.ops.aten

RELATIVE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Error allowed, as a share of the largest expected value: some hundred roundings of the dtype's own operations."""

Inputs = tuple[dict[str, Tensor], dict[str, Tensor]]


def evaluate(run: Callable[[list[Inputs]], list[Tensor]], inputs: list[Inputs]) -> list[list[Tensor]]:
    """For each input set, the result and the gradients of its differentiable inputs for a fixed upstream gradient."""
    for x, _ in inputs:
        for tensor in x.values():
            tensor.grad = None
    outputs = run(inputs)
    generator = torch.Generator().manual_seed(7)
    ready = [(o, torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype)) for o in outputs]
    if any(o.requires_grad for o, _ in ready):
        torch.autograd.backward([o for o, _ in ready], [g for _, g in ready])
    found = []
    for out, (x, _) in zip(outputs, inputs, strict=True):
        gradients = [t.grad for t in x.values() if t.requires_grad]
        found.append([out.detach(), *(g for g in gradients if g is not None)])
    return found


USUAL = (torch.float32, torch.bfloat16)


def cases() -> list[Any]:
    """Of each reduction that may leave the destination out, that form is a slow test."""
    slow = [pytest.mark.slow]
    return [pytest.param(c, id=c.name, marks=slow if "include_self=False" in c.name else []) for c in CASES]


@pytest.mark.parametrize("usual", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["usual", "other dtypes"])
@pytest.mark.parametrize("case", cases())
def test_values_bits_and_treatment(case: Case, usual: bool) -> None:
    dtypes = [dtype for dtype in case.dtypes if (dtype in USUAL) is usual]
    inputs = [case.inputs(dtype) for dtype in dtypes]
    run = lambda given: [case.run(x, i) for x, i in given]  # noqa: E731
    right = case.expected or case.run
    wide = []
    for x, i in inputs:
        wide.append(({k: t.detach().double().requires_grad_(t.requires_grad) for k, t in x.items()}, i))
    expected = evaluate(lambda given: [right(x, i) for x, i in given], wide)

    compiled = torch.compile(run, backend=detpass, fullgraph=True)
    first = evaluate(compiled, inputs)
    for number in range(1, 20):
        again = evaluate(compiled, inputs)
        for a, b in zip(first, again, strict=True):
            same = [torch.equal(bits(p), bits(q)) for p, q in zip(a, b, strict=True)]
            assert all(same), f"run 0 and run {number} differ"
    for dtype, found, want in zip(dtypes, first, expected, strict=True):
        for name, p, q in zip(("result", *case.differentiable), found, want, strict=False):
            limit = RELATIVE[dtype] * max(q.abs().max().item(), 1e-30)
            assert (p.double() - q).abs().max().item() <= limit, f"{name} in {dtype}"
    report = last_report()
    assert report is not None
    treatments = {str(record.treatment) for record in report}
    assert treatments & case.treatments, f"treatments {treatments}, expected one of {set(case.treatments)}"
    assert "uncovered" not in treatments


def _canonical_cases() -> list[tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]]:
    return [
        ("index_put", lambda d, i, s: d.index_put((i,), s, accumulate=True)),
        ("index_add", lambda d, i, s: d.index_add(0, i, s)),
        ("scatter_add", lambda d, i, s: d.scatter_add(0, i[:, None].expand_as(s), s)),
        ("scatter_reduce", lambda d, i, s: d.scatter_reduce(0, i[:, None].expand_as(s), s, "sum")),
        ("masked", lambda d, i, s: aten._unsafe_masked_index_put_accumulate(d, (i >= 0)[:, None], [i], s)),
    ]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_bits_are_those_of_the_canonical_order(dtype: torch.dtype) -> None:
    """Every operator gives exactly the bits of the plain reference, with and without a destination."""
    generator = torch.Generator().manual_seed(0)
    index = ints(generator, 5, N)
    index[: N // 2] = 2
    source = torch.randn(N, 3, generator=generator).to(dtype)
    dest = torch.randn(6, 3, generator=generator).to(dtype)
    names, functions = zip(*_canonical_cases(), strict=True)

    def run(d: Tensor, i: Tensor, s: Tensor) -> list[Tensor]:
        return [g for f in functions for g in (f(d, i, s), f(torch.zeros_like(d), i, s))]

    found = torch.compile(run, backend=detpass, fullgraph=True)(dest, index, source)
    filled = reference.segment_accumulate(dest[None], index, source[None], 6)[0]
    empty = reference.segment_accumulate(None, index, source[None], 6)[0]
    for name, with_dest, from_zero in zip(names, found[::2], found[1::2], strict=True):
        assert torch.equal(with_dest, filled), name
        assert torch.equal(from_zero, empty), name


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 1000), (torch.float16, 5000)], ids=str)
def test_sixteen_bit_sums_round_once(dtype: torch.dtype, count: int) -> None:
    """A thousand ones in one row make a thousand (torch's own bfloat16 accumulation stops at 256)."""
    ones, index = torch.ones(count, 1, dtype=dtype), torch.zeros(count, dtype=torch.int64)

    def run(d: Tensor, i: Tensor, s: Tensor) -> list[Tensor]:
        return [f(d, i, s) for _, f in _canonical_cases()]

    for out in torch.compile(run, backend=detpass, fullgraph=True)(torch.zeros(2, 1, dtype=dtype), index, ones):
        assert out.tolist() == [[float(count)], [0.0]]


def _mask(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize(
    "form",
    [
        lambda m, i: (m(8, 5),),
        lambda m, i: (None, m(5, 4)),
        lambda m, i: (m(8), m(5)),
        lambda m, i: (m(8), None, m(4)),
        lambda m, i: (m(8, 5), i(4)),
        lambda m, i: (i(8), m(5, 4)),
    ],
    ids=["plane", "last plane", "two", "two apart", "plane and one place", "one place and plane"],
)
def test_masks_as_indices(form: Callable[..., tuple[Tensor | None, ...]], kind: torch.dtype, accumulate: bool) -> None:
    """Masks alone, several of them and beside one place: as eager, which has no choice of order there."""
    places = torch.zeros(8, dtype=torch.bool)
    places[[1, 3, 4, 6]] = True
    full = {(8,): places, (5,): places[:5] | ~places[3:], (4,): torch.ones(4, dtype=torch.bool)}
    mask = lambda *shape: full.get(shape, _mask(*shape)).to(kind)  # noqa: E731
    indices = form(mask, lambda size: torch.tensor([size - 2]))
    dest = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(1))
    value = torch.tensor(0.25)
    run = lambda d, v, *i: aten.index_put(d, i, v, accumulate)  # noqa: E731
    found = torch.compile(run, backend=detpass, fullgraph=True)(dest, value, *indices)
    # Eager itself refuses one uint8 mask with one value.
    expected = run(dest, value, *(i.bool() if i is not None and i.dtype is torch.uint8 else i for i in indices))
    assert torch.equal(found, expected)
    report = last_report()
    assert report is not None
    assert not [record for record in report if record.treatment == "uncovered"]


@pytest.mark.parametrize("index", [torch.tensor(2), torch.tensor([[2, 2], [0, 5]])], ids=["0-d", "2-d"])
def test_take_and_put_of_any_rank(index: Tensor) -> None:
    """The gradients of ``take`` and ``put``, in one graph also for a 0-d index."""

    def run(table: Tensor, source: Tensor, i: Tensor) -> Tensor:
        return torch.put(table, i, source, accumulate=True).sin() + torch.take(table, i).sum()

    inputs = [torch.randn(2, 3), torch.randn(index.shape)]
    found, expected = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    out = torch.compile(run, backend=detpass, fullgraph=True)(*found, index)
    out.sum().backward()
    right = run(*expected, index)
    right.sum().backward()
    torch.testing.assert_close(out, right)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_sums(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    index = ints(generator, 5, 400)
    source = torch.randn(400, 3, generator=generator, dtype=torch.complex128).to(dtype)
    dest = torch.randn(6, 3, generator=generator, dtype=torch.complex128).to(dtype)
    run = lambda d, i, s: (d.index_put((i,), s, accumulate=True), d.index_add(0, i, s))  # noqa: E731
    compiled = torch.compile(run, backend=detpass, fullgraph=True)
    expected = reference.segment_accumulate(dest[None], index, source[None], 6)[0]
    for _ in range(20):
        for out in compiled(dest, index, source):
            assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_integers_are_exact_and_left_alone(dtype: torch.dtype) -> None:
    index = torch.tensor([0, 1, 1, 2, 2, 2, 0])
    source = torch.tensor([1, 2, 3, 250, 5, 6, 1]).to(dtype)
    dest = torch.ones(4).to(dtype)
    run = lambda d, i, s: d.index_put((i,), s, accumulate=True)  # noqa: E731
    out = torch.compile(run, backend=detpass, fullgraph=True)(dest, index, source)
    assert torch.equal(out, run(dest, index, source))
    report = last_report()
    assert report is not None
    assert [str(r.treatment) for r in report] == ["safe"]


EMPTY: list[tuple[str, Callable[[], tuple[Tensor, Tensor, Tensor]]]] = [
    ("no rows", lambda: (torch.randn(4, 3), torch.empty(0, dtype=torch.int64), torch.empty(0, 3))),
    ("no columns", lambda: (torch.randn(4, 0), torch.tensor([1, 1]), torch.empty(2, 0))),
    ("one segment", lambda: (torch.randn(1, 3), torch.zeros(40, dtype=torch.int64), torch.randn(40, 3))),
    ("one element", lambda: (torch.randn(1, 1), torch.zeros(40, dtype=torch.int64), torch.randn(40, 1))),
    ("empty table", lambda: (torch.randn(0, 3), torch.empty(0, dtype=torch.int64), torch.empty(0, 3))),
]


@pytest.mark.parametrize(("name", "make"), EMPTY, ids=[name for name, _ in EMPTY])
def test_degenerate_sizes(name: str, make: Callable[[], tuple[Tensor, Tensor, Tensor]]) -> None:
    dest, index, source = make()
    run = lambda d, i, s: (d.index_put((i,), s, accumulate=True), d.index_add(0, i, s))  # noqa: E731
    for out in torch.compile(run, backend=detpass, fullgraph=True)(dest, index, source):
        torch.testing.assert_close(
            out.double(), dest.double().index_add(0, index, source.double()), rtol=1e-5, atol=1e-5
        )


def test_special_values_travel() -> None:
    """NaN, infinities and the sign of zero behave as in IEEE additions; an untouched row keeps its bits."""
    nan, inf = float("nan"), float("inf")
    dest = torch.tensor([[-0.0], [1.0], [nan], [2.0], [-0.0]])
    index = torch.tensor([1, 1, 3, 3, 4, 1])
    source = torch.tensor([[inf], [-inf], [nan], [1.0], [-0.0], [0.0]])
    out = torch.compile(lambda d, i, s: d.index_add(0, i, s), backend=detpass)(dest, index, source)
    assert torch.signbit(out[0]).all(), "an untouched -0.0 stays"
    assert out[0] == 0
    assert out[2].view(torch.int32).equal(dest[2].view(torch.int32)), "an untouched NaN keeps its payload"
    assert out[1].isnan().all()
    assert out[3].isnan().all()
    assert out[4] == 0
    assert not torch.signbit(out[4]).any(), "-0.0 plus a sum that starts from +0.0 is +0.0"
