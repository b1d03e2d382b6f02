"""flex_attention: gradients of captured tensors, against attention written out in float64, and bits over runs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from detpass.errors import UncoveredError
from detpass.inspection.cuda_code import CudaSettings, cuda_code_with
from detpass.rules import flex_scores
from detpass.rules.flex_bodies import evaluate, inputs_of, results_of
from tests.rules.direct import bits
from tests.rules.flex import Attended, as_on_cuda, by_flex, gradients, rewritten, written_out

BATCH, HEADS, SIZE, DEPTH = 2, 4, 24, 8
RELATIVE = (HEADS, 2 * SIZE + 1)


def tensors(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def attended(score, *shapes, dtype=torch.float32, captured_dtype=None, key_heads=HEADS, key_batch=BATCH, **options):
    query, key = (BATCH, HEADS, SIZE, DEPTH), (key_batch, key_heads, SIZE, DEPTH)
    captured = tensors(*shapes, dtype=captured_dtype or dtype, seed=1)
    return Attended(tensors(query, key, key, dtype=dtype), score, captured, **options)


def mask_of(function, batch=None):
    block_mask = create_block_mask(function, batch, None, SIZE, SIZE, device="cpu", BLOCK_SIZE=8)
    places = torch.meshgrid(*(torch.arange(n) for n in (BATCH, HEADS, SIZE, SIZE)), indexing="ij")
    return block_mask, ~function(*places)


def causal(b, h, i, j):
    return i >= j


def few(b, h, i, j):
    """Whole rows see nothing, and blocks are full, partial and absent."""
    return (i - j >= 0) & (i > 9) & (j < 17)


SCORES = {
    "relative position": (lambda s, b, h, i, j, bias: s + bias[h, i - j + SIZE], RELATIVE),
    "scale of a head": (lambda s, b, h, i, j, scale: s * scale[h], (HEADS,)),
    "sample and key": (lambda s, b, h, i, j, bias: s + bias[b, j], (BATCH, SIZE)),
    "every position": (lambda s, b, h, i, j, bias: s + bias[b, h, i, j], (BATCH, HEADS, SIZE, SIZE)),
    "several places": (
        lambda s, b, h, i, j, bias: s * bias[h, i] + torch.tanh(bias[h, j] * bias[0, i - j]),
        RELATIVE,
    ),
    "fixed place": (lambda s, b, h, i, j, bias: s * bias[1, 2] + bias[h, 0], RELATIVE),
    "scalar": (lambda s, b, h, i, j, one: torch.tanh(s * one) + one, ()),
    "scalar and others": (
        lambda s, b, h, i, j, one, bias, scale: s * one * scale[h] + bias[b, j % 5],
        (),
        (BATCH, 5),
        (HEADS,),
    ),
    "changed before it is read": (lambda s, b, h, i, j, bias: s + (bias.sigmoid() * 3).view(-1)[h * 2 + j], RELATIVE),
    "a sum of it": (lambda s, b, h, i, j, bias: s * bias.sum() * 0.1 + bias[h], (HEADS,)),
    "buckets": (lambda s, b, h, i, j, bias: s + bias[torch.clamp((i - j).abs() // 3, max=4), h], (5, HEADS)),
    "softcap of biased": (lambda s, b, h, i, j, bias: 5 * torch.tanh((s + bias[h, (i * j) % 7]) / 5), (HEADS, 7)),
}


@pytest.fixture(autouse=True)
def differentiable():
    with as_on_cuda():
        yield


def check(case, dead=None, rtol=2e-5, **options):
    loss, report = rewritten(by_flex(case), **options)
    found, expected = gradients(loss, case), gradients(written_out(case, dead), case)
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=rtol, atol=rtol * float(want.abs().max()))
    treated = {record.op: (str(record.treatment), record.rule) for record in report.records}
    assert treated["flex_attention_backward"] == ("segment", "flex_attention_backward")
    return found


@pytest.mark.parametrize("name", SCORES)
def test_gradients(name):
    score, *shapes = SCORES[name]
    check(attended(score, *shapes))


@pytest.mark.parametrize("name", ["relative position", "several places", "scalar and others"])
@pytest.mark.parametrize(
    ("function", "batch"), [(causal, None), (few, BATCH), (lambda b, h, i, j: (i // 8 + b) % 2 == j // 8 % 2, BATCH)]
)
def test_masks_and_the_log_sum_exp(name, function, batch):
    score, *shapes = SCORES[name]
    block_mask, dead = mask_of(function, batch)
    # Sums of products up to 10 that cancel.
    check(attended(score, *shapes, block_mask=block_mask, logsumexp=True), dead, rtol=5e-5)


def test_float64():
    score, *shapes = SCORES["several places"]
    check(attended(score, *shapes, dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize("captured_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, captured_dtype):
    score, *shapes = SCORES["relative position"]
    # The output is rounded to half precision before the backward reads it.
    rtol = 4 * torch.finfo(dtype).eps
    check(attended(score, *shapes, dtype=dtype, captured_dtype=captured_dtype), rtol=rtol)


def test_scores_are_not_rounded_to_half_precision():
    """tanh of a bfloat16 score is rounded in the graph; neither CUDA's kernel nor the replacement does."""
    case = attended(lambda s, b, h, i, j, one: 30 * torch.tanh(s * one), (), dtype=torch.bfloat16)
    graphs = []
    loss, _ = rewritten(by_flex(case), graphs=graphs)
    gradients(loss, case)
    halves = [n for n in graphs[-1].nodes if n.kwargs.get("dtype") is torch.bfloat16 or torch.bfloat16 in n.args]
    assert len(halves) <= 1 + 1  # the result, and the gradient of the loss


def test_shared_heads():
    score, *shapes = SCORES["several places"]
    check(attended(score, *shapes, key_heads=2, scale=0.3))


def test_one_key_for_all_samples():
    score, *shapes = SCORES["sample and key"]
    block_mask, dead = mask_of(causal, BATCH)
    check(attended(score, *shapes, key_batch=1, block_mask=block_mask), dead)


def test_mask_function_with_a_captured_tensor():
    documents = torch.tensor([[0] * 5 + [1] * (SIZE - 5), [0] * 20 + [1] * (SIZE - 20)])

    def same_document(b, h, i, j):
        return documents[b, i] == documents[b, j]

    block_mask, dead = mask_of(same_document, BATCH)
    score, *shapes = SCORES["relative position"]
    check(attended(score, *shapes, block_mask=block_mask), dead)


def graph_of(function, *captured):
    """The graph of one position of a function of the four numbers and captured tensors."""
    return make_fx(function)(*(torch.zeros((), dtype=torch.int32) for _ in range(4)), *captured)


def numbers(*sizes):
    return [torch.arange(n).reshape([-1 if d == k else 1 for d in range(4)]) for k, n in enumerate(sizes)]


def test_blocks_that_the_mask_does_not_list_do_not_count():
    partial, full = torch.tensor([[0, 1], [1, 0], [1, 0]]), torch.tensor([[1, 0], [1, 0], [0, 1]])
    counts, full_counts = torch.tensor([1, 2, 0]), torch.tensor([0, 0, 1])
    lists = [x.to(torch.int32)[None, None] for x in (counts, partial, full_counts, full)]
    mask = flex_scores.Mask(graph_of(causal), (), *lists, 8, 16)
    alive = flex_scores._alive(mask, numbers(1, 1, 24, 32))
    row, column = torch.arange(24).unsqueeze(1), torch.arange(32)
    asked = torch.tensor([[True, False], [True, True], [False, False]])[row // 8, column // 16] & (row >= column)
    expected = asked | torch.tensor([[False, False], [False, False], [True, False]])[row // 8, column // 16]
    assert torch.equal(alive[0, 0], expected)


def test_reads_outside_of_a_captured_tensor_do_no_harm():
    """Blocks that the mask does not list are evaluated here, as they never are by a kernel."""
    table = torch.arange(1.0, 6.0)
    read = graph_of(lambda b, h, i, j, x: torch.ops.aten.index.Tensor(x, [i - j]), table)
    given = dict(zip(inputs_of(read), (*numbers(1, 1, 9, 9), table), strict=True))
    (found,) = evaluate(read, results_of(read), given, 4)
    difference = torch.arange(9).unsqueeze(1) - torch.arange(9)
    inside = (difference >= -5) & (difference < 5)
    assert torch.equal(found[0, 0], table[torch.where(inside, difference, 0)])


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_of_queries(monkeypatch, dynamic):
    monkeypatch.setattr(flex_scores, "MOST_AT_ONCE", BATCH * HEADS * SIZE * 5)
    graphs = []
    block_mask, dead = mask_of(few)
    for name in ("several places", "scalar and others"):
        score, *shapes = SCORES[name]
        check(attended(score, *shapes, block_mask=block_mask), dead, dynamic=dynamic, graphs=graphs)
        products = [node for node in graphs[-1].nodes if node.target is torch.ops.aten.bmm.default]
        assert len(products) == 2 * 5


def test_one_graph_for_many_sizes():
    graphs = []
    loss, _ = rewritten(
        lambda q, k, v, bias: flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, i - j + 64]).square().sum(),
        dynamic=True,
        graphs=graphs,
    )
    for length in (24, 17, 40):
        given = [x.requires_grad_() for x in tensors(*[(2, 4, length, 8)] * 3, (4, 128))]
        found = torch.autograd.grad(loss(*given), given)
        query, key, value, bias = (x.detach().double().requires_grad_() for x in given)
        places = torch.arange(length)
        scores = query @ key.transpose(-1, -2) * 8**-0.5 + bias[:, places.unsqueeze(1) - places + 64]
        expected = torch.autograd.grad((scores.softmax(-1) @ value).square().sum(), (query, key, value, bias))
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5 * float(want.abs().max()))
    assert len(graphs) == 1


def test_the_number_of_captured_sizes_does_not_matter():
    """A size that the score function reads is captured as a number, and its tensor without a gradient."""
    loss, report = rewritten(
        lambda q, k, v, bias: flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, i - j + q.shape[2]]).sum(),
        dynamic=True,
    )
    given = [x.requires_grad_() for x in tensors(*[(BATCH, HEADS, SIZE, DEPTH)] * 3, RELATIVE)]
    *_, of_bias = torch.autograd.grad(loss(*given), given)
    assert of_bias.shape == RELATIVE
    assert of_bias.abs().sum() > 0
    # What is added to every score of a row changes nothing.
    assert float(of_bias.double().sum().abs()) < 1e-4
    assert [record.rule for record in report.records].count("flex_attention_backward") == 1


@pytest.mark.parametrize("name", ["relative position", "several places", "scalar and others"])
def test_twenty_runs_on_one_and_two_threads_are_equal_on_the_bits(name, monkeypatch):
    monkeypatch.setattr(flex_scores, "MOST_AT_ONCE", BATCH * HEADS * SIZE * 9)
    score, *shapes = SCORES[name]
    case = attended(score, *shapes, block_mask=mask_of(few)[0])
    loss, _ = rewritten(by_flex(case))
    threads = torch.get_num_threads()
    try:
        runs = []
        for count in (1, 2):
            torch.set_num_threads(count)
            runs.extend(gradients(loss, case)[3:] for _ in range(20))
    finally:
        torch.set_num_threads(threads)
    for number, run in enumerate(runs[1:], start=1):
        for first, again in zip(runs[0], run, strict=True):
            assert torch.equal(bits(first), bits(again)), f"run {number} differs from run 0"


def test_the_dense_form_of_torch_gives_the_same():
    score, *shapes = SCORES["relative position"]
    case = attended(score, *shapes)
    for got, want in zip(check(case), gradients(by_flex(case), case), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5 * float(want.abs().max()))


def sources(backend, name, **options):
    score, *shapes = SCORES[name]
    case = attended(score, *shapes, block_mask=create_block_mask(causal, None, None, 256, 256, device="cpu"))
    big = [torch.randn(BATCH, HEADS, 256, 16, requires_grad=True) for _ in range(3)]
    captured = [x.requires_grad_() for x in case.captured]
    return cuda_code_with(CudaSettings(backend, compile_kernels=False, **options), by_flex(case), [*big, *captured])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dynamic"), list(itertools.product(["buckets", "softcap of biased"], [None, True])))
def test_no_atomic_is_left_in_cuda_code(name, dynamic):
    code = sources("detpass", name, dynamic=dynamic)
    assert code.float_atomics == code.float_scans == code.nondeterministic_externs == code.locks == ()
    assert code.deterministic
    assert "flex_attention_backward" in code.sources["backward0"] or "tem_fused" in code.sources["backward0"]
    assert sources("inductor", name, dynamic=dynamic).float_atomics


@pytest.mark.parametrize("name", [pytest.param("several places", marks=pytest.mark.slow), "scalar and others"])
def test_cuda_code_of_what_torch_cannot_compile(name):
    code = sources("detpass", name)
    assert code.float_atomics == ()
    assert code.deterministic


@pytest.mark.parametrize(
    ("score", "shape", "why"),
    [
        (lambda s, b, h, i, j, x: s + (x * h)[i], (SIZE,), "applied to a captured tensor before it is indexed"),
        (lambda s, b, h, i, j, x: s + x[h][i], (HEADS, SIZE), "x\\[a\\]\\[b\\]"),
        (lambda s, b, h, i, j, x: s + x[h].sum(), (HEADS, 3), "some of its dimensions"),
    ],
)
def test_what_is_no_sum_over_places_is_refused(score, shape, why):
    case = attended(score, shape)
    loss, _ = rewritten(by_flex(case))
    with pytest.raises(BackendCompilerFailed, match=why) as caught:
        gradients(loss, case)
    assert isinstance(caught.value.inner_exception, UncoveredError)


def test_flash_attention_is_refused():
    def loss(q, k, v):
        return flex_attention(q, k, v, kernel_options={"BACKEND": "FLASH"}).sum()

    compiled, _ = rewritten(loss)
    with pytest.raises(BackendCompilerFailed, match="adds up the gradient of query atomically") as caught:
        compiled(*(x.requires_grad_() for x in tensors(*[(BATCH, HEADS, SIZE, DEPTH)] * 3)))
    assert isinstance(caught.value.inner_exception, UncoveredError)
    assert "'BACKEND': 'TRITON'" in str(caught.value)


def test_without_captured_gradients_nothing_is_replaced():
    loss, report = rewritten(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s - i * j).sum())
    loss(*(x.requires_grad_() for x in tensors(*[(BATCH, HEADS, SIZE, DEPTH)] * 3))).backward()
    treated = {record.op: str(record.treatment) for record in report.records}
    assert treated["flex_attention_backward"] == "safe"
