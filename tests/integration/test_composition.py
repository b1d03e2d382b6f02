"""Everything that torch.compile composes with: each program repeats its bits and agrees with eager in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from detpass.backend import detpass, last_report, reports

ROWS, WIDTH, N = 64, 8, 20_000
"""Large enough that plain Inductor's atomics differ from run to run on two threads."""


def table(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def ids(n: int = N) -> Tensor:
    return torch.randint(0, ROWS, (n,), generator=torch.Generator().manual_seed(2))


def rows(n: int = N, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)


def gradient(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The gradient of ``function``'s first input for a fixed upstream gradient."""
    w = inputs[0].detach().clone().requires_grad_()
    out = function(w, *inputs[1:])
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.dtype))
    assert w.grad is not None
    return w.grad


def check(run: Callable[[], Tensor], expected: Tensor, rtol: float = 1e-4) -> None:
    """Twenty runs with equal bits, near ``expected`` (float64; tolerance for sums of some hundred float32 terms)."""
    first = run()
    for number in range(1, 20):
        again = run()
        assert torch.equal(first, again), f"run 0 and run {number} differ"
    torch.testing.assert_close(first.double(), expected, rtol=rtol, atol=rtol * expected.abs().max().item())


def rewritten() -> int:
    """Nodes rewritten in all graphs compiled since the test began."""
    return sum(str(r.treatment) == "segment" for report in reports() for r in report)


@pytest.fixture(autouse=True)
def _forget_reports() -> None:
    from detpass import backend

    backend._reports.clear()


def test_training_graph() -> None:
    f = lambda w, i: w[i].sin()  # noqa: E731
    compiled = torch.compile(f, backend=detpass, fullgraph=True)
    check(lambda: gradient(compiled, table(), ids()), gradient(f, table().double(), ids()))
    report = last_report()
    assert report is not None
    (record,) = report
    assert (record.op, record.phase, str(record.treatment)) == ("aten.index_put.default", "backward", "segment")
    assert record.location is not None
    assert record.location.startswith(__file__)


def test_inference_graph() -> None:
    f = lambda d, i, s: d.index_add(0, i, s).cos()  # noqa: E731
    compiled = torch.compile(f, backend=detpass, fullgraph=True)
    with torch.no_grad():
        check(lambda: compiled(table(), ids(), rows()), f(table().double(), ids(), rows().double()))
    assert [r.phase for r in last_report() or ()] == ["inference"]


def test_mutation_of_an_input() -> None:
    def f(d: Tensor, i: Tensor, s: Tensor) -> Tensor:
        d.index_put_((i,), s, accumulate=True)
        return d * 2

    compiled = torch.compile(f, backend=detpass, fullgraph=True)
    expected = table().double()
    f(expected, ids(), rows().double())

    def run() -> Tensor:
        d = table()
        out = compiled(d, ids(), rows())
        assert torch.equal(out, d * 2)
        return d

    with torch.no_grad():
        check(run, expected)


def test_mutation_of_a_view_of_an_input() -> None:
    def f(d: Tensor, i: Tensor, s: Tensor) -> Tensor:
        v = d[2:]
        v.index_put_((i,), s, accumulate=True)
        return v

    compiled = torch.compile(f, backend=detpass, fullgraph=True)
    index = ids() % (ROWS - 2)
    expected = table().double()
    f(expected, index, rows().double())

    def run() -> Tensor:
        d = table()
        view = compiled(d, index, rows())
        assert view.data_ptr() == d[2:].data_ptr()
        return d

    with torch.no_grad():
        check(run, expected)


def test_program_order_around_a_write() -> None:
    """The old value is read before and the new one after the accumulation (a reinplaced write must not leak)."""

    def f(x: Tensor, i: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        before = x * 1
        x.index_add_(0, i, s)
        return before, x + x.flip(0)

    compiled = torch.compile(f, backend=detpass, fullgraph=True)
    with torch.no_grad():
        x = table()
        before, after = compiled(x, ids(), rows())
        y = table().double()
        before64, after64 = f(y, ids(), rows().double())
    torch.testing.assert_close(before.double(), before64)
    torch.testing.assert_close(after.double(), after64, rtol=1e-4, atol=1e-3)


def test_dynamic_shapes_one_graph_for_a_stream_of_sizes() -> None:
    f = lambda w, i: (w * 2)[i].sin()  # noqa: E731
    compiled = torch.compile(f, backend=detpass, dynamic=True, fullgraph=True)
    generator = torch.Generator().manual_seed(5)
    for n, s, d in ((2000, 64, 8), (3001, 50, 9), (2, 7, 3), (5000, 2, 2)):
        w = torch.randn(s, d, generator=generator)
        i = torch.randint(0, s, (n,), generator=generator)
        check(lambda: gradient(compiled, w, i), gradient(f, w.double(), i))  # noqa: B023
    assert len(reports()) == 1, "one dynamic graph serves every size"


def test_automatic_dynamic_shapes() -> None:
    f = lambda w, i: w[i].sin()  # noqa: E731
    compiled = torch.compile(f, backend=detpass, fullgraph=True)
    for n in (2000, 2100, 2200, 2300):
        check(lambda: gradient(compiled, table(), ids(n)), gradient(f, table().double(), ids(n)))  # noqa: B023
    assert len(reports()) == 2


def test_index_from_nonzero() -> None:
    f = lambda w, m: w[m.nonzero().squeeze(1) % ROWS].sin()  # noqa: E731
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(f, backend=detpass, fullgraph=True)
        mask = torch.arange(N) % 3 == 0
        check(lambda: gradient(compiled, table(), mask), gradient(f, table().double(), mask))
    assert rewritten() == 1


def _sum_into_a_selection(w: Tensor, keep: Tensor, index: Tensor, source: Tensor) -> Tensor:
    return torch.zeros_like(w[keep]).index_add(0, index, source) * w[keep]


def _sum_of_a_selection(w: Tensor, keep: Tensor, index: Tensor, source: Tensor) -> Tensor:
    chosen = source[:, 0] > 0
    return w.index_add(0, index[chosen], source[chosen]).sin()


def _last_of_a_selection(w: Tensor, keep: Tensor, index: Tensor, source: Tensor) -> Tensor:
    chosen = source[:, 0] > 0
    return w.scatter(0, index[chosen].unsqueeze(1).expand(-1, WIDTH), source[chosen]).sin()


@pytest.mark.parametrize("function", [_sum_into_a_selection, _sum_of_a_selection, _last_of_a_selection])
def test_sizes_that_are_data(function: Callable[..., Tensor]) -> None:
    """Of the rows that are written, and of those that are added."""
    keep, index, source = torch.arange(ROWS) % 3 > 0, ids() % 40, rows()
    expected = gradient(function, table(torch.float64), keep, index, source.double())
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend=detpass, fullgraph=True)
        check(lambda: gradient(compiled, table(), keep, index, source), expected)
        want, got = function(table(), keep, index, source), compiled(table(), keep, index, source)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    assert rewritten() >= 1


@pytest.mark.parametrize("reentrant", [False])
def test_activation_checkpointing(reentrant: bool) -> None:
    f = lambda w, i: checkpoint(lambda w: w[i].sin().exp(), w, use_reentrant=reentrant)  # noqa: E731
    compiled = torch.compile(f, backend=detpass, fullgraph=True)
    check(lambda: gradient(compiled, table(), ids()), gradient(f, table().double(), ids()))


def test_autocast() -> None:
    def f(w: Tensor, i: Tensor, m: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return w[i] @ m

    compiled = torch.compile(f, backend=detpass, fullgraph=True)
    m = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(6))
    exact = lambda w, i, m: w[i] @ m  # noqa: E731
    # bfloat16 products have 8 bits of mantissa
    check(
        lambda: gradient(compiled, table(), ids(), m), gradient(exact, table().double(), ids(), m.double()), rtol=2e-2
    )


def test_cond_branches() -> None:
    def f(p: Tensor, d: Tensor, i: Tensor, s: Tensor) -> Tensor:
        return torch.cond(p, lambda d, i, s: d.index_add(0, i, s), lambda d, i, s: d.clone(), (d, i, s))

    compiled = torch.compile(f, backend=detpass, fullgraph=True)
    with torch.no_grad():
        check(
            lambda: compiled(torch.tensor(True), table(), ids(), rows()),
            table().double().index_add(0, ids(), rows().double()),
        )
    assert rewritten() == 1


def test_while_loop_body() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def f(d: Tensor, i: Tensor, s: Tensor) -> Tensor:
        def body(k: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
            return k + 1, d.index_put((i,), s, accumulate=True)

        return while_loop(lambda k, d: k < 2, body, (torch.tensor(0), d))[1]

    compiled = torch.compile(f, backend=detpass, fullgraph=True)
    once = torch.zeros(ROWS, WIDTH, dtype=torch.float64).index_add(0, ids(), rows().double())
    with torch.no_grad():
        check(lambda: compiled(table(), ids(), rows()), table().double() + 2 * once)
    assert rewritten() == 1


def test_nested_compile_region() -> None:
    region = torch.compiler.nested_compile_region(lambda w, i: w[i].sin())
    f = lambda w, i: region(w, i) + region(w + 1, i)  # noqa: E731
    compiled = torch.compile(f, backend=detpass, fullgraph=True)
    plain = lambda w, i: w[i].sin() + (w + 1)[i].sin()  # noqa: E731
    check(lambda: gradient(compiled, table(), ids()), gradient(plain, table().double(), ids()))
    assert rewritten() >= 1


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, i: Tensor) -> Tensor:
        ctx.save_for_backward(i)
        ctx.rows = w.shape[0]
        return w[i]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (i,) = ctx.saved_tensors
        return g.new_zeros(ctx.rows, g.shape[1]).index_add_(0, i, g), None


def test_autograd_function() -> None:
    compiled = torch.compile(lambda w, i: _Scatter.apply(w.sin(), i), backend=detpass, fullgraph=True)
    plain = lambda w, i: w.sin()[i]  # noqa: E731
    check(lambda: gradient(compiled, table(), ids()), gradient(plain, table().double(), ids()))
    assert rewritten() == 1


def test_grad_and_vmap_inside_compile() -> None:
    def f(w: Tensor, i: Tensor) -> Tensor:
        return torch.vmap(torch.func.grad(lambda w, i: w[i].sin().sum()), in_dims=(None, 0))(w, i)

    compiled = torch.compile(f, backend=detpass, fullgraph=True)
    batch = ids(N).reshape(4, -1)
    check(lambda: compiled(table(), batch), f(table().double(), batch))
    assert rewritten() == 1


def test_compiled_autograd() -> None:
    f = lambda w, i: w[i].sin()  # noqa: E731

    def run() -> Tensor:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=detpass)):
            return gradient(f, table(), ids())

    check(run, gradient(f, table().double(), ids()))
    assert rewritten() == 1


def test_compiled_optimizer_step() -> None:
    i = ids()

    def train(dtype: torch.dtype, compiled: bool) -> Tensor:
        torch.manual_seed(0)
        layer = torch.nn.Embedding(ROWS, WIDTH, dtype=dtype)
        with torch.no_grad():
            layer.weight.copy_(table())
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, foreach=True)
        model: Any = torch.compile(layer, backend=detpass) if compiled else layer
        step: Any = torch.compile(optimizer.step, backend=detpass) if compiled else optimizer.step
        for _ in range(3):
            optimizer.zero_grad()
            model(i).backward(rows().to(dtype))
            step()
        return layer.weight.detach().clone()

    expected = train(torch.float64, compiled=False)
    first = train(torch.float32, compiled=True)
    assert torch.equal(first, train(torch.float32, compiled=True))
    torch.testing.assert_close(first.double(), expected, rtol=1e-4, atol=1e-5)


def test_attention_is_still_fused() -> None:
    """Inductor's attention pattern applies before the rewrite."""

    def f(w: Tensor, i: Tensor) -> Tensor:
        q = w[i].reshape(2, 4, -1, WIDTH)
        return (q @ q.transpose(-2, -1)).div(WIDTH**0.5).softmax(-1) @ q

    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(f, backend=detpass, fullgraph=True)
    with torch.no_grad():
        _, code = run_and_get_code(compiled, table(), ids(512))
    assert "flash_attention" in code[0]


@pytest.mark.parametrize("layers", [1, 2])
def test_attention_with_a_mask_is_fused_in_training(layers: int) -> None:
    """Its pattern leaves the graph out of order: the fused backward stands before the ``clone`` that it reads."""
    batch, heads = 2, 4
    index = ids(1024).reshape(batch, -1)
    mask = torch.where(torch.arange(index.shape[1]) % 7 == 0, -10000.0, 0.0).expand(batch, 1, 1, -1)

    def attention(h: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (h, h.sin(), h.cos()))
        weights = (q @ k.transpose(-2, -1) / (WIDTH // heads) ** 0.5 + mask.to(h)).softmax(-1)
        return (weights @ v).permute(0, 2, 1, 3).contiguous().flatten(2)

    def model(w: Tensor, index: Tensor) -> Tensor:
        h = w[index]
        for _ in range(layers):
            h = attention(h)
        return h.tanh()

    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(model, backend=detpass, fullgraph=True)
    _, (_, backward) = run_and_get_code(lambda: gradient(compiled, table(), index))
    assert backward.count("flash_attention_for_cpu_backward.default(") == layers
    check(lambda: gradient(compiled, table(), index), gradient(model, table(torch.float64), index))
    assert rewritten() == 1


def test_unique_index_needs_no_sort() -> None:
    def f(w: Tensor, n: int) -> Tensor:
        return w[torch.randperm(n)[: n - 1]].sin() + w[torch.arange(n - 1)].cos()

    compiled = torch.compile(f, backend=detpass, fullgraph=True)
    gradient(lambda w: compiled(w, ROWS), table())
    report = last_report()
    assert report is not None
    assert {str(r.treatment) for r in report} <= {"safe", "closed_form"}
    assert all("unique" in r.reason for r in report)


def test_freezing_of_an_inference_graph() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("base", table())

        def forward(self, i: Tensor, s: Tensor) -> Tensor:
            return self.base.index_add(0, i, s)

    with torch.no_grad():
        compiled = torch.compile(Model().eval(), backend=detpass, options={"freezing": True})
        check(lambda: compiled(ids(), rows()), table().double().index_add(0, ids(), rows().double()))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs", "lite"])
def test_modes(mode: str) -> None:
    f = lambda w, i: w[i].sin()  # noqa: E731
    compiled = torch.compile(f, backend=detpass, mode=mode)
    check(lambda: gradient(compiled, table(), ids()), gradient(f, table().double(), ids()))
    assert rewritten() == 1


def test_one_and_two_threads_give_the_same_bits() -> None:
    f = lambda w, i: w[i].sin()  # noqa: E731
    compiled = torch.compile(f, backend=detpass)
    results = []
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        results.append(gradient(compiled, table(), ids()))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
