"""Operators ``detpass::ctc_loss`` and ``detpass::ctc_loss_backward``: CTC without a result whose size is data.

``aten._ctc_loss`` returns the forward variables, whose size depends on the longest target. Here they stay inside: the
backward computes them again. With ``segmented`` (code for CUDA) the backward is formed from ATen's forward kernel,
which walks each alignment in a fixed order on every device, and a segment sum::

    alpha = forward variables of (log_probs, targets)
    beta  = forward variables of both reversed in time, read backwards
    share[n, s, t] = exp(alpha + beta - log_probs[t, n, label[n, s]] + loss[n])
    grad[t, n, c]  = (exp(log_probs[t, n, c]) - sum over s with label[n, s] == c of share[n, s, t]) * grad_loss[n]

The labels of a target are its symbols with a blank before, between and after them; the sum over them is the
accumulation that ATen's CUDA kernel makes with atomics. Without ``segmented`` ATen's own backward is called, which on
a CPU walks each sample on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from detpass import segment

aten = torch.ops.aten

_ARGUMENTS = (
    "Tensor log_probs, Tensor targets, Tensor? input_lengths, Tensor? target_lengths, "
    "int[]? input_sizes, int[]? target_sizes, int blank, bool zero_infinity"
)
_library = torch.library.Library("detpass", "FRAGMENT")
_tags = tuple(
    getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, name)
)
_library.define(f"ctc_loss({_ARGUMENTS}) -> Tensor", tags=_tags)
_library.define(f"ctc_loss_backward(Tensor grad, Tensor loss, bool segmented, {_ARGUMENTS}) -> Tensor", tags=_tags)


def _loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | None,
    target_lengths: torch.Tensor | None,
    input_sizes: Sequence[int] | None,
    target_sizes: Sequence[int] | None,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """The loss of each sample, ``[n]``. Lengths are tensors or lists. Raises what ``aten._ctc_loss`` raises."""
    inputs, symbols = _sizes(input_lengths, input_sizes), _sizes(target_lengths, target_sizes)
    loss: torch.Tensor = aten._ctc_loss.default(log_probs, targets, inputs, symbols, blank, zero_infinity)[0]
    return loss


def _backward(
    grad: torch.Tensor,
    loss: torch.Tensor,
    segmented: bool,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | None,
    target_lengths: torch.Tensor | None,
    input_sizes: Sequence[int] | None,
    target_sizes: Sequence[int] | None,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """The gradient of ``log_probs: [t, n, c]`` for the gradients ``grad: [n]`` of the losses ``loss: [n]``."""
    inputs, symbols = _sizes(input_lengths, input_sizes), _sizes(target_lengths, target_sizes)
    if segmented:
        return segmented_gradient(grad, loss, log_probs, targets, inputs, symbols, blank, zero_infinity)
    alpha = aten._ctc_loss.default(log_probs, targets, inputs, symbols, blank, zero_infinity)[1]
    result: torch.Tensor = aten._ctc_loss_backward.default(
        grad, log_probs, targets, inputs, symbols, loss, alpha, blank, zero_infinity
    )
    return result.contiguous()


def segmented_gradient(
    grad: torch.Tensor,
    loss: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    inputs: list[int],
    symbols: list[int],
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """The gradient as a segment sum over labels; see the module's docstring."""
    steps, batch, classes = log_probs.shape
    if log_probs.numel() == 0:
        return torch.zeros_like(log_probs, memory_format=torch.contiguous_format)
    device = log_probs.device
    time, frames = torch.arange(steps, device=device), torch.tensor(inputs, device=device)
    length = torch.tensor(symbols, device=device)
    padded, labels = _padded(targets, symbols, length, blank)
    places = torch.arange(labels.shape[1], device=device)
    used = places < 2 * length.unsqueeze(1) + 1  # [n, s]
    running = time.unsqueeze(1) < frames  # [t, n]

    def variables(table: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = aten._ctc_loss.default(table, words, inputs, symbols, blank, zero_infinity)[1]
        return result.transpose(1, 2)[:, : labels.shape[1]]  # [n, s, t]

    mirrored = torch.where(running, frames - 1 - time.unsqueeze(1), time.unsqueeze(1))  # [t, n], its own inverse
    reverse = mirrored.unsqueeze(-1).expand(-1, -1, classes)
    word = torch.arange(padded.shape[1], device=device)
    backwards = padded.gather(1, torch.where(word < length.unsqueeze(1), length.unsqueeze(1) - 1 - word, word))
    alpha = variables(log_probs, padded)
    beta = variables(log_probs.gather(0, reverse), backwards)
    place = torch.where(used, 2 * length.unsqueeze(1) - places, places)
    beta = beta.gather(1, place.unsqueeze(-1).expand(-1, -1, steps))
    beta = beta.gather(2, mirrored.t().unsqueeze(1).expand(-1, labels.shape[1], -1))

    emitted = log_probs.permute(1, 2, 0).gather(1, labels.unsqueeze(-1).expand(-1, -1, steps))  # [n, s, t]
    joint = alpha + beta
    share = (joint - emitted + loss.reshape(-1, 1, 1)).exp()
    # A path of no probability has no share; the arithmetic above would make NaN of it.
    live = used.unsqueeze(-1) & running.t().unsqueeze(1) & (joint != -float("inf"))
    share = torch.where(live, share, 0)
    sample = torch.arange(batch, device=device).unsqueeze(1) * classes
    index = torch.where(used, labels + sample, segment.skipped_value(torch.int64)).reshape(-1)
    taken = segment.segment_reduce(
        share.reshape(1, -1, steps).contiguous(), index, batch * classes, "sum", False, "ctc_loss_backward"
    )
    total = (log_probs.exp() - taken.reshape(batch, classes, steps).permute(2, 0, 1)) * grad.reshape(1, -1, 1)
    # An impossible alignment (infinite loss) has no gradient: NaN as in eager, or zero on request.
    total = torch.where((loss == float("inf")).reshape(1, -1, 1), 0.0 if zero_infinity else float("nan"), total)
    return torch.where(running.unsqueeze(-1), total, 0).contiguous()


def _padded(
    targets: torch.Tensor, symbols: Sequence[int], length: torch.Tensor, blank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets as ``int64[n, longest]`` and with blanks around them as ``int64[n, 2 * longest + 1]``."""
    longest = max(symbols, default=0)
    word = torch.arange(longest, device=targets.device)
    if targets.dim() == 1:
        start = length.cumsum(0) - length
        place = torch.where(word < length.unsqueeze(1), start.unsqueeze(1) + word, 0)
        rows = targets[place] if targets.numel() else targets.new_zeros(len(symbols), longest)
    else:
        rows = targets[:, :longest]
    # What pads a row is no label and may be anything: a negative number, or one beyond the classes.
    padded = torch.where(word < length.unsqueeze(1), rows, blank).to(torch.int64)
    labels = padded.new_full((len(symbols), 2 * longest + 1), blank)
    labels[:, 1::2] = padded
    return padded, labels


def _sizes(lengths: torch.Tensor | None, sizes: Sequence[int] | None) -> list[int]:
    if lengths is not None:
        return [int(value) for value in lengths.reshape(-1).tolist()]
    return list(sizes or ())


def _fake_loss(log_probs: torch.Tensor, *_: object) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _fake_backward(
    grad: torch.Tensor, loss: torch.Tensor, segmented: bool, log_probs: torch.Tensor, *_: object
) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


_library.impl("ctc_loss", _loss, "CompositeExplicitAutograd")
_library.impl("ctc_loss_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("detpass::ctc_loss", _fake_loss, lib=_library)
torch.library.register_fake("detpass::ctc_loss_backward", _fake_backward, lib=_library)
