"""CTC loss: forward and backward variables in a fixed order, then a segment sum over labels.

Before::

    loss, alpha = aten._ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    grad_input  = aten._ctc_loss_backward(grad, log_probs, targets, ..., loss, alpha, ...)     # atomic on CUDA

After::

    loss       = detpass.ctc_loss(log_probs, targets, ...)
    grad_input = detpass.ctc_loss_backward(grad, loss, segmented, log_probs, targets, ...)

``alpha`` has a size that depends on data, at which Dynamo ends a graph; under detpass the trace gives it an empty
stand-in (``torch_faults.py``), so both nodes must be replaced, on a CPU as well, where ATen's kernels are kept.

cuDNN computes the gradient in its forward; it has a deterministic algorithm, which an argument asks for.

Neighbours: ``ctc_calls.py`` (the arithmetic).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from detpass.graph_query import arguments, result_number
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment, Verdict
from detpass.rules import ctc_calls as ctc_calls  # registers the operators

aten = torch.ops.aten

FORWARD = (aten._ctc_loss.default, aten._ctc_loss.Tensor)
BACKWARD = (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)


class CtcLoss(Rule):
    """``_ctc_loss`` and its backward, lengths as lists or tensors, padded or concatenated targets."""

    name = "ctc_loss"
    targets = (*FORWARD, *BACKWARD)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        given = arguments(node)
        if node.target in FORWARD and not _alpha_feeds_the_backward(node):
            return NoMatch(Inapplicable.ARGUMENT, node, "the forward variables are used by something else")
        segmented = context.device.type == "cuda"
        parameters = {"segmented": segmented, "blank": given["blank"], "zero_infinity": given["zero_infinity"]}
        gradients = () if node.target in FORWARD else (given["grad"], given["neg_log_likelihood"])
        shared = tuple(given[name] for name in ("log_probs", "targets", "input_lengths", "target_lengths"))
        if segmented:
            reason = "each alignment is walked in order; shares are summed by label"
            return Match((gradients, *shared), reason, parameters, Treatment.SEGMENT)
        reason = "ATen's CPU kernel walks each sample on one thread, in order"
        return Match((gradients, *shared), reason, parameters, Treatment.NATIVE)

    def replacement(
        self,
        gradients: tuple[torch.Tensor, ...],
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: Any,
        target_lengths: Any,
        *,
        segmented: bool,
        blank: int,
        zero_infinity: bool,
    ) -> Any:
        listed = not isinstance(input_lengths, torch.Tensor)
        lengths = (None, None, list(input_lengths), list(target_lengths)) if listed else (
            input_lengths, target_lengths, None, None
        )  # fmt: skip
        rest = (log_probs, targets, *lengths, blank, zero_infinity)
        if gradients:
            return torch.ops.detpass.ctc_loss_backward.default(*gradients, segmented, *rest)
        return torch.ops.detpass.ctc_loss.default(*rest), log_probs.new_empty(0)


class CudnnCtcLoss(Rule):
    """``_cudnn_ctc_loss`` with the deterministic one of cuDNN's algorithms."""

    name = "cudnn_ctc_loss"
    targets = (aten._cudnn_ctc_loss.default, aten._cudnn_ctc_loss.Tensor)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        given = arguments(node)
        if given["deterministic"]:
            return Safe("cuDNN's deterministic algorithm was asked for")
        operands = tuple(given[name] for name in ("log_probs", "targets", "input_lengths", "target_lengths"))
        parameters = {"target": node.target, "blank": given["blank"], "zero_infinity": given["zero_infinity"]}
        return Match(operands, "cuDNN has a deterministic algorithm", parameters, Treatment.NATIVE)

    def replacement(self, *operands: Any, target: Any, blank: int, zero_infinity: bool) -> Any:
        return target(*operands, blank, True, zero_infinity)


def _alpha_feeds_the_backward(node: fx.Node) -> bool:
    """Whether nothing but the loss's backward reads the forward variables (its position, ``log_alpha``)."""
    return all(
        result_number(user) == 0 or all(reader.target in BACKWARD for reader in user.users) for user in node.users
    )
