"""CTC loss: loss and gradient against eager over both target layouts, lengths, reductions and impossible alignments."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from detpass.rule import Safe, Treatment
from detpass.rules.ctc import CtcLoss, CudnnCtcLoss
from detpass.rules.ctc_calls import segmented_gradient
from tests.rules.compiled import compile_and_compare
from tests.rules.direct import bits, node_of, verdict_of

aten = torch.ops.aten
RULE = CtcLoss()
STEPS, BATCH, CLASSES = 20, 5, 6
INPUTS, SYMBOLS = [20, 13, 20, 9, 1], [7, 3, 0, 4, 1]
IMPOSSIBLE = ([20, 3, 20, 9, 0], [7, 3, 0, 12, 1])


def problem(layout="padded", blank=0, dtype=torch.float64, lengths=(INPUTS, SYMBOLS), classes=CLASSES):
    """log_probs, targets and lengths; repeated labels; what pads a row is no class at all."""
    torch.manual_seed(0)
    inputs, symbols = lengths
    log_probs = torch.randn(STEPS, BATCH, classes, dtype=dtype).log_softmax(-1)
    words = torch.randint(0, classes - 1, (BATCH, max(symbols) + 2))
    words = torch.where(words >= blank, words + 1, words)
    words[:, 1] = words[:, 0]
    for row, count in zip(words, symbols, strict=True):
        row[count:] = -7
    targets = words if layout == "padded" else torch.cat([row[:n] for row, n in zip(words, symbols, strict=True)])
    return log_probs, targets, inputs, symbols


def eager(log_probs, targets, inputs, symbols, grad, blank, zero_infinity):
    loss, alpha = aten._ctc_loss(log_probs, targets, inputs, symbols, blank, zero_infinity)
    return loss, aten._ctc_loss_backward(grad, log_probs, targets, inputs, symbols, loss, alpha, blank, zero_infinity)


CASES = list(itertools.product(("padded", "concatenated"), (0, 2, CLASSES - 1), (False, True)))


@pytest.mark.parametrize(("layout", "blank", "zero_infinity"), CASES)
@pytest.mark.parametrize("lengths", [(INPUTS, SYMBOLS), IMPOSSIBLE], ids=["possible", "impossible"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=str)
def test_gradient(layout, blank, zero_infinity, lengths, dtype, tolerance):
    log_probs, targets, inputs, symbols = problem(layout, blank, dtype, lengths)
    grad = torch.linspace(-1.0, 2.0, BATCH, dtype=dtype)
    loss, want = eager(log_probs, targets, inputs, symbols, grad, blank, zero_infinity)
    assert bool(torch.isinf(loss).any()) == (lengths is IMPOSSIBLE)
    got = segmented_gradient(grad, loss, log_probs, targets, inputs, symbols, blank, zero_infinity)
    # Eager sums logarithms, whose rounding grows with the loss (about 40); here their exponentials are summed.
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_long_targets_and_many_steps():
    torch.manual_seed(1)
    log_probs = torch.randn(700, 2, 12, dtype=torch.float64).log_softmax(-1)
    targets, inputs, symbols = torch.randint(1, 12, (2, 300)), [700, 650], [300, 280]
    grad = torch.tensor([1.0, -0.5], dtype=torch.float64)
    loss, want = eager(log_probs, targets, inputs, symbols, grad, 0, False)
    got = segmented_gradient(grad, loss, log_probs, targets, inputs, symbols, 0, False)
    # The loss is about 2000, so logarithms carry an absolute error of 1e-13 times some hundred steps.
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_only_empty_targets_and_no_batch():
    log_probs = torch.randn(4, 2, 3, dtype=torch.float64).log_softmax(-1)
    empty, grad = torch.zeros(2, 0, dtype=torch.int64), torch.ones(2, dtype=torch.float64)
    for targets in (empty, empty.reshape(-1)):
        loss, want = eager(log_probs, targets, [4, 3], [0, 0], grad, 0, False)
        got = segmented_gradient(grad, loss, log_probs, targets, [4, 3], [0, 0], 0, False)
        torch.testing.assert_close(got, want)


def test_a_label_of_no_probability_has_no_gradient():
    log_probs, targets, inputs, symbols = problem()
    log_probs[3, 0, 5] = -float("inf")
    loss, _ = eager(log_probs, targets, inputs, symbols, torch.ones(BATCH, dtype=torch.float64), 0, False)
    got = segmented_gradient(torch.ones_like(loss), loss, log_probs, targets, inputs, symbols, 0, False)
    assert got[3, 0, 5] == 0
    assert got.isfinite().all()


def test_the_gradient_of_a_sample_does_not_depend_on_its_neighbours():
    log_probs, targets, inputs, symbols = problem(dtype=torch.float32)
    grad = torch.ones(BATCH)
    loss = aten._ctc_loss(log_probs, targets, inputs, symbols)[0]
    whole = segmented_gradient(grad, loss, log_probs, targets, inputs, symbols, 0, False)
    for n in range(BATCH):
        one = slice(n, n + 1)
        alone = segmented_gradient(
            grad[one], loss[one], log_probs[:, one].contiguous(), targets[one], inputs[one], symbols[one], 0, False
        )
        assert torch.equal(bits(alone[:, 0]), bits(whole[:, n]))


COMPILED = [(None, False, "mean"), (None, True, "sum"), ("cuda", False, "none"), ("cuda", True, "mean")]


@pytest.mark.parametrize(("target", "listed", "reduction"), COMPILED, ids=str)
def test_compiled_in_one_graph(target, listed, reduction):
    log_probs, targets, inputs, symbols = problem()
    lengths = (inputs, symbols) if listed else (torch.tensor(inputs), torch.tensor(symbols))

    def loss(logits, targets):
        return F.ctc_loss(logits.log_softmax(-1), targets, *lengths, reduction=reduction)

    records = compile_and_compare(loss, log_probs.requires_grad_(), targets, rtol=1e-11, atol=1e-12, target=target)
    overload = "default" if listed else "Tensor"
    treatment = "segment" if target == "cuda" else "native"
    assert records[f"aten._ctc_loss.{overload}"] == (treatment, "ctc_loss")
    assert records[f"aten._ctc_loss_backward.{overload}"] == (treatment, "ctc_loss")


@pytest.mark.slow
def test_compiled_with_dynamic_sizes_zero_infinity_concatenated_and_unbatched():
    log_probs, targets, inputs, symbols = problem("concatenated", lengths=IMPOSSIBLE)
    lengths = torch.tensor(inputs), torch.tensor(symbols)
    compile_and_compare(
        lambda x, t: F.ctc_loss(x.log_softmax(-1), t, *lengths, zero_infinity=True),
        log_probs.requires_grad_(), targets, rtol=1e-11, atol=1e-12, target="cuda", dynamic=True,
    )  # fmt: skip
    one = torch.tensor(20), torch.tensor(7)
    compile_and_compare(
        lambda x, t: F.ctc_loss(x.log_softmax(-1), t, *one),
        log_probs.detach()[:, 0].requires_grad_(), targets[:7], rtol=1e-11, atol=1e-12, target="cuda",
    )  # fmt: skip


def test_other_backends_still_end_the_graph_at_it():
    log_probs, targets, inputs, symbols = problem()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: F.ctc_loss(x, targets, torch.tensor(inputs), torch.tensor(symbols)), backend="eager", fullgraph=True
    )
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(log_probs)


def test_arguments_that_eager_refuses_are_refused_with_its_message():
    log_probs, targets, inputs, symbols = problem()
    torch._dynamo.reset()
    too_long = torch.tensor([STEPS + 1, *inputs[1:]])

    def loss(x):
        return F.ctc_loss(x, targets, too_long, torch.tensor(symbols))

    with pytest.raises(RuntimeError) as plain:
        loss(log_probs)
    with pytest.raises(RuntimeError) as ours:
        torch.compile(loss, backend="detpass")(log_probs)
    assert str(plain.value).splitlines()[0] in str(ours.value)


def test_verdicts():
    log_probs, targets, inputs, symbols = problem()
    call = (aten._ctc_loss.default, log_probs, targets, inputs, symbols)
    assert verdict_of(RULE, *call, device="cuda").treatment is Treatment.SEGMENT
    assert verdict_of(RULE, *call, device="cpu").treatment is Treatment.NATIVE


def test_forward_variables_used_by_something_else_are_refused():
    from operator import getitem

    from detpass.rule import Inapplicable, NoMatch, RuleContext

    node, _ = node_of(aten._ctc_loss.default, *problem())
    alpha = node.graph.call_function(getitem, (node, 1))
    node.graph.call_function(aten.sin.default, (alpha,))
    verdict = RULE.match(node, RuleContext(device=torch.device("cuda")))
    assert isinstance(verdict, NoMatch)
    assert verdict.why is Inapplicable.ARGUMENT


def test_cudnn_is_asked_for_its_deterministic_algorithm():
    from torch import fx

    from detpass.rule import RuleContext

    graph = fx.Graph()
    tensors = [graph.placeholder(name) for name in ("log_probs", "targets")]
    context = RuleContext(device=torch.device("cuda"))
    target = aten._cudnn_ctc_loss.default
    rule, seen = CudnnCtcLoss(), []
    left = graph.call_function(target, (*tensors, [4], [2], 0, False, True))
    verdict = rule.match(left, context)
    assert verdict.treatment is Treatment.NATIVE
    rule.replacement("x", "t", [4], [2], **{**verdict.parameters, "target": lambda *args: seen.append(args)})
    assert seen == [("x", "t", [4], [2], 0, True, True)]
    asked = graph.call_function(target, (*tensors, [4], [2], 0, True, True))
    assert isinstance(rule.match(asked, context), Safe)
