"""associative_scan by doubling steps: functions, lengths, dtypes, captured tensors, what is left alone, and compiled.

The form is compared with ``combine_mode="generic"``, which torch makes of slices, in float64. Tensors on a CPU stand
for a GPU's: before torch 2.14 the front end refuses them, and no Inductor generates a scan for them.
"""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._higher_order_ops.associative_scan import associative_scan
from torch.fx.experimental.proxy_tensor import make_fx

from detpass import inspect
from detpass._torch_private_cuda import associative_scan_as_on_cuda as as_on_cuda
from detpass.backend import detpass, reports
from detpass.inspection.cuda_code import CudaSettings, cuda_code_with
from detpass.rule import Inapplicable, Match, NoMatch, RuleContext, Safe, Treatment
from detpass.rules.associative_scan import SCAN, AssociativeScan
from detpass.rules.doubling import BLOCK
from tests.rules.direct import bits

RULE = AssociativeScan()
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def near_one(*shape, dtype=torch.float64):
    return (1 + random(*shape) / 100).to(dtype)


def verdict_of(function, parts, captured=(), device=CUDA):
    """What the rule says of a scan of ``parts: [n, *features]`` by ``function(left..., right..., captured...)``."""
    slices = [part[0].clone() for part in (*parts, *parts)]
    body = make_fx(lambda *args: list(function(*args)), tracing_mode="fake")(*slices, *captured)
    graph = fx.Graph()

    def placeholders(tensors, name):
        nodes = [graph.placeholder(f"{name}{number}") for number in range(len(tensors))]
        for node, tensor in zip(nodes, tensors, strict=True):
            node.meta["val"] = tensor
        return nodes

    sources, others = placeholders(parts, "part"), placeholders(captured, "captured")
    return RULE.match(graph.call_function(SCAN, (body, sources, tuple(others))), RuleContext(device))


def replaced(function, parts, captured=()):
    verdict = verdict_of(function, parts, captured)
    assert isinstance(verdict, Match), verdict
    assert verdict.treatment is Treatment.CLOSED_FORM
    return RULE.replacement(tuple(parts), tuple(captured), **verdict.parameters)


def one_by_one(function, parts, captured=()):
    """The scan's definition: a loop over the elements, from the left."""
    found = [[part[0] for part in parts]]
    for place in range(1, len(parts[0])):
        found.append(list(function(*found[-1], *(part[place] for part in parts), *captured)))
    return [torch.stack(items) for items in zip(*found, strict=True)]


def add(a, b):
    return (a + b,)


def multiply(a, b):
    return (a * b,)


def shifted_sum(a, b):
    """Associative, with constants of several kinds, one of them a tensor of the slice's shape."""
    return (torch.where(a == torch.inf, b, a + b - torch.full(b.shape, 3, dtype=b.dtype) + torch.zeros(b.shape)),)


def log_add_exp(a, b):
    larger = torch.maximum(a, b)
    return (larger + torch.log(torch.exp(a - larger) + torch.exp(b - larger)),)


def by_feature(a, b):
    """Associative, with views: every feature is added to itself through another shape."""
    return ((a.flatten() + b.reshape(-1)).view(a.shape).transpose(0, -1).transpose(0, -1),)


def weighted_sum(a, b, weight):
    return (a + b + weight,)


def recurrence(a0, b0, a1, b1, *captured):
    """``h = a * h + b``, as in state-space models."""
    return a0 * a1, b0 * a1 + b1


def scaled_recurrence(a0, b0, a1, b1, weight):
    """Needs a captured tensor: Inductor refuses those, a tuple's too."""
    return a0 * a1 + 0 * weight, b0 * a1 + b1


ONE_TENSOR = {
    "sum": (add, random),
    "product": (multiply, near_one),
    "constants": (shifted_sum, random),
    "log-sum-exp": (log_add_exp, random),
    "views": (by_feature, random),
}


@pytest.mark.parametrize("name", ONE_TENSOR)
@pytest.mark.parametrize("length", [2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 1000])
def test_one_tensor(name, length):
    function, data = ONE_TENSOR[name]
    x = data(length, 2, 3)
    (got,) = replaced(function, [x])
    torch.testing.assert_close(got, one_by_one(function, [x])[0], rtol=1e-10, atol=1e-10)
    assert got.is_contiguous()


def test_three_levels_of_blocks():
    x = random(BLOCK**2 + 1, 1)
    (got,) = replaced(add, [x])
    torch.testing.assert_close(got, x.cumsum(0), rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("shape", [(700,), (700, 0), (700, 1, 5)])
def test_features_of_any_shape(shape):
    x = random(*shape)
    torch.testing.assert_close(replaced(add, [x])[0], x.cumsum(0), rtol=1e-10, atol=1e-10)


def test_data_that_are_not_contiguous():
    x = random(3, 700).t()
    torch.testing.assert_close(replaced(add, [x])[0], x.cumsum(0), rtol=1e-10, atol=1e-10)


def test_the_order_of_the_operands():
    """``first`` is associative and does not commute: everything is the first element."""
    x = random(1000, 2)
    assert torch.equal(replaced(lambda a, b: (a + 0 * b,), [x])[0], x[:1].expand_as(x))
    assert torch.equal(replaced(lambda a, b: (b + 0 * a,), [x])[0], x)


@pytest.mark.parametrize("weight", [torch.tensor(0.5), torch.tensor([1.0, 2.0, 3.0]), torch.ones(2, 1)], ids=str)
def test_captured_tensors(weight):
    x, weight = random(600, 2, 3), weight.double()
    (got,) = replaced(weighted_sum, [x], [weight])
    torch.testing.assert_close(got, one_by_one(weighted_sum, [x], [weight])[0], rtol=1e-10, atol=1e-10)


def test_tuples_with_captured_tensors():
    parts, weight = [near_one(600, 3), random(600, 3)], random(3, seed=1)
    got, want = replaced(scaled_recurrence, parts, [weight]), one_by_one(scaled_recurrence, parts, [weight])
    for ours, expected in zip(got, want, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_combined_in_float32(dtype):
    x = near_one(700, 3, dtype=dtype)
    (got,), (wide,) = replaced(multiply, [x]), replaced(multiply, [x.float()])
    assert got.dtype is dtype
    assert torch.equal(bits(got), bits(wide.to(dtype)))


def test_roundings_to_half_precision_within_the_function_are_dropped():
    """Type promotion leaves conversions in the graph, as here by a wider captured tensor."""

    def function(a, b, weight):
        return ((a * b * weight).to(a.dtype),)

    x, weight = near_one(700, 3, dtype=torch.bfloat16), torch.ones(3)
    assert torch.equal(replaced(function, [x], [weight])[0], replaced(multiply, [x])[0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float32, torch.float64,
                                   torch.complex64, torch.complex128], ids=str)  # fmt: skip
def test_other_dtypes(dtype):
    x = (10 * random(600, 3)).to(torch.int64).to(dtype)

    def function(a, b):
        return (torch.where(a == b, a, a * b),)  # idempotent on what is equal: integers of absolute value at most 1

    x = x if dtype.is_floating_point or dtype.is_complex else (x > 0).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        function, x = multiply, near_one(600, 3, dtype=dtype)
    (got,), (want,) = replaced(function, [x]), one_by_one(function, [x])
    assert got.dtype is dtype
    tolerance = 1e-5 if dtype in (torch.float32, torch.complex64) else 1e-12
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_infinity_and_nan_stay_where_they_are():
    x = random(700)
    x[300], x[650] = torch.inf, torch.nan
    got, want = replaced(add, [x])[0], x.cumsum(0)
    assert torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got.isnan(), want.isnan())


def test_the_form_repeats():
    x = random(1000, 2, dtype=torch.float32)
    first = replaced(log_add_exp, [x])[0]
    for _ in range(20):
        assert torch.equal(bits(replaced(log_add_exp, [x])[0]), bits(first))


INTEGERS = torch.arange(1000).reshape(500, 2)

SAFE = {
    "one element": (add, [random(1, 3)]),
    "integer sum": (add, [INTEGERS]),
    "integer maximum": (lambda a, b: (torch.maximum(b, a),), [INTEGERS]),
    "or of booleans": (lambda a, b: (a | b,), [INTEGERS > 3]),
    "tuple": (recurrence, [near_one(500, 2), random(500, 2)]),
}


@pytest.mark.parametrize("name", SAFE)
def test_what_is_safe(name):
    assert isinstance(verdict_of(*SAFE[name]), Safe)


@pytest.mark.parametrize(
    "function",
    [lambda a, b: (a + 2 * b,), lambda a, b: (torch.add(a, b, alpha=2),), lambda a, b: (a + a,),
     lambda a, b: (a - b,), lambda a, b: ((a.double() * b).long(),)],
)  # fmt: skip
def test_integers_are_safe_only_where_the_function_is_known_to_be_exact(function):
    assert isinstance(verdict_of(function, [INTEGERS]), Match)


def test_maxima_of_floats_are_rewritten():
    """Which zero, and which NaN, a maximum returns depends on the order of its operands."""
    assert isinstance(verdict_of(lambda a, b: (torch.maximum(a, b),), [random(500)]), Match)


def test_what_is_refused():
    x = random(500, 3)
    for verdict, why in (
        (verdict_of(add, [x], device=CPU), Inapplicable.DEVICE),
        (verdict_of(lambda a, b: (a + b.cumsum(0),), [x]), Inapplicable.ARGUMENT),
        (verdict_of(lambda a, b: ((a.view(torch.int64) + b.view(torch.int64)).double(),), [x]), Inapplicable.ARGUMENT),
        (verdict_of(scaled_recurrence, [x, x[:, :1]], [x[0, :1]]), Inapplicable.SHAPE),
    ):
        assert isinstance(verdict, NoMatch), verdict
        assert verdict.why is why


def test_inputs_that_the_graph_does_not_read():
    """With dynamic sizes torch hands the sizes to the graph, read or not; Inductor refuses a tensor in either case."""
    parts = [near_one(500, 2), random(500, 2)]
    assert isinstance(verdict_of(recurrence, parts, [2]), Safe)
    torch.testing.assert_close(replaced(recurrence, parts, [torch.ones(2)]), tuple(one_by_one(recurrence, parts)))


# Through torch.compile: on a CPU, as if for CUDA.


@pytest.fixture
def front_end():
    with as_on_cuda():
        yield


def function_of(combine, dim, reverse=False):
    return lambda *xs: associative_scan(combine, xs[0] if len(xs) == 1 else xs, dim, reverse, "pointwise")


def written_out(combine, dim, reverse=False):
    return lambda *xs: associative_scan(combine, xs[0] if len(xs) == 1 else xs, dim, reverse, "generic")


def compiled(function, dynamic=False):
    torch._dynamo.reset()
    return torch.compile(function, backend=detpass, dynamic=dynamic, fullgraph=True, options={"target": "cuda"})


def treatments(since):
    return {record.op: (str(record.treatment), record.rule) for r in reports()[since:] for record in r.records}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.slow
@pytest.mark.parametrize(("dim", "reverse"), [(0, False), (-1, True)])
def test_compiled(front_end, dim, reverse, dynamic):
    def combine(a, b):
        return a * b

    before = len(reports())
    run = compiled(function_of(combine, dim, reverse), dynamic)
    for length in (300, 517) if dynamic else (300,):
        shape = [2, 3]
        shape[dim] = length
        x = near_one(*shape)
        with torch._inductor.config.patch(force_disable_caches=True):
            got = run(x)
        torch.testing.assert_close(got, written_out(combine, dim, reverse)(x), rtol=1e-10, atol=1e-10)
        assert torch.equal(bits(got), bits(run(x)))
    assert treatments(before) == {"associative_scan": ("closed_form", "associative_scan")}


def test_compiled_with_gradients(front_end):
    """torch's own backward: a cumulative product over a square of the length."""
    before = len(reports())
    run = compiled(function_of(lambda a, b: a * b, 1, True))
    x, y = (near_one(2, 40).requires_grad_() for _ in range(2))
    with torch._inductor.config.patch(force_disable_caches=True):
        got = run(x)
        got.sin().sum().backward()
    want = y.flip(1).cumprod(1).flip(1)
    want.sin().sum().backward()
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-10)
    assert treatments(before) == {
        "associative_scan": ("closed_form", "associative_scan"),
        "aten.cumprod.default": ("closed_form", "fixed_order_scan"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_captured_tensors(front_end, dynamic):
    def by(mode):
        def scan(x, y, weight):
            def combine(left, right):
                return left[0] * right[0] + 0 * weight, left[1] * right[0] + right[1]

            return associative_scan(combine, (x, y), 1, combine_mode=mode)[1]

        return scan

    inputs = near_one(2, 300, 3), random(2, 300, 3), random(3, seed=1)
    got = compiled(by("pointwise"), dynamic)(*inputs)
    torch.testing.assert_close(got, by("generic")(*inputs), rtol=1e-10, atol=1e-10)


SPLIT = 70_000
"""A length at which Inductor splits a scan."""


def code_for(backend, function, inputs, dynamic=None):
    pytest.importorskip("triton", reason="triton is not installed")
    return cuda_code_with(CudaSettings(backend, dynamic=dynamic, compile_kernels=False), function, inputs, {})


def look_backs(code):
    return "".join(code.sources.values()).count("exclusive_scan_decoupled_lookback")


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_the_code_for_cuda_has_no_look_back(dynamic, dtype):
    function, inputs = function_of(lambda a, b: a * b + 0, 0), [near_one(SPLIT, dtype=dtype)]
    plain, ours = (code_for(backend, function, inputs, dynamic) for backend in ("inductor", "detpass"))
    assert look_backs(plain)
    assert not plain.deterministic
    assert not look_backs(ours)
    assert ours.deterministic
    assert "tl.associative_scan" not in "".join(ours.sources.values())


@pytest.mark.slow
def test_the_code_of_forward_and_backward_has_no_look_back():
    function, inputs = function_of(lambda a, b: a * b, 0), [near_one(SPLIT).requires_grad_()]
    assert look_backs(code_for("inductor", function, inputs))
    ours = code_for("detpass", function, inputs)
    assert set(ours.sources) == {"forward0", "backward0"}
    assert ours.deterministic
    assert not look_backs(ours)


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_tuples_are_never_split(dynamic):
    """What their verdict rests on; one of the tensors alone is split at this length."""

    def combine(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    a, b = near_one(SPLIT, dtype=torch.float32), random(SPLIT, dtype=torch.float32)
    code = code_for("detpass", function_of(combine, 0), [a, b], dynamic)
    assert [(str(record.treatment), record.rule) for record in code.report.records] == [("safe", "associative_scan")]
    assert "tl.associative_scan" in "".join(code.sources.values())
    assert not look_backs(code)
    assert look_backs(code_for("inductor", function_of(lambda x, y: x * y + 0, 0), [a], dynamic))


@pytest.mark.slow
def test_what_inductor_refuses_is_generated():
    inputs = [near_one(3, 1000, dtype=torch.float32), torch.ones(3)]

    def scan(x, weight):
        return associative_scan(lambda a, b: a * b + 0 * weight, x, 1)

    with pytest.raises(Exception, match="lifted arguments"):
        code_for("inductor", scan, inputs)
    assert code_for("detpass", scan, inputs).deterministic


def test_generic_mode_is_made_of_slices():
    nodes: list[fx.Node] = []

    def collect(graph_module, _):
        nodes.extend(graph_module.graph.nodes)
        return graph_module

    torch._dynamo.reset()
    torch.compile(written_out(lambda a, b: a * b, 0), backend=collect, fullgraph=True)(near_one(50))
    assert nodes
    assert not [node for node in nodes if node.target is SCAN]


def test_inspection_names_the_rule():
    found = inspect(function_of(lambda a, b: a * b + 0, 1), near_one(3, 1000), target="cuda")
    assert [(str(record.treatment), record.rule) for record in found.records] == [("closed_form", "associative_scan")]


def test_the_front_end_is_as_before():
    frontend = associative_scan
    code = frontend.__code__
    with as_on_cuda():
        pass
    assert frontend.__code__ is code
