"""Faults of torch itself that the graphs we compile are led around.

Each function names the fault and the releases that have it. Those over a graph run as Inductor's
``joint_custom_pre_pass``; the others are installed once (:func:`install`) and act in our compiles alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from detpass import _torch_private
from detpass.errors import Refusal
from detpass.graph_query import is_empty, is_zero, label, tensor_of

aten = torch.ops.aten

INDEXING = (
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten._unsafe_index_put.default,
)

ADAPTIVE = {aten._adaptive_avg_pool2d.default: 2, aten._adaptive_avg_pool3d.default: 3}
"""Operators, and the number of dimensions of the image that they read."""


def lead_around_randperm_pattern(graph: fx.Graph) -> None:
    """``x[torch.randperm(len(x))]`` crashes Inductor's randperm pattern in torch 2.13.

    The pattern expects a slice of the permutation and fails where there is none. What it would have done is done
    here: such an index is within bounds, so the read needs no check.
    """
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not aten.index.Tensor:
            continue
        table, indices = node.args[0], node.args[1]
        value = tensor_of(table)
        index = indices[0] if len(indices) == 1 else None
        if value is None or not isinstance(index, fx.Node) or index.target is not aten.randperm.default:
            continue
        if str(index.args[0]) == str(value.shape[0]):
            node.target = aten._unsafe_index.Tensor


def read_byte_masks_as_bool(graph: fx.Graph) -> None:
    """A ``uint8`` tensor as an index is a mask; Inductor generates code for it that fails (2.11 to 2.14)."""
    bools: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in INDEXING:
            continue
        indices = list(node.args[1])
        for position, index in enumerate(indices):
            value = tensor_of(index)
            if value is None or value.dtype is not torch.uint8:
                continue
            if index not in bools:
                with graph.inserting_before(node):
                    bools[index] = graph.call_function(aten.ne.Scalar, (index, 0))
                    bools[index].meta = {**index.meta, "val": value.to(torch.bool)}
            indices[position] = bools[index]
        node.args = (node.args[0], indices, *node.args[2:])


def count_reflections_exactly(graph: fx.Graph) -> None:
    """``grid_sample`` with reflection reads the cell at the other end of the image on CUDA (2.11 to 2.14).

    The decomposition counts turns as ``floor(distance / span)``, and Inductor multiplies by the reciprocal: for 42
    cells and a point on the last one ``41 * (1 / 41)`` is less than 1. Without the remainder, which is exact and is
    computed beside it, the quotient is a whole number but for rounding.
    """
    for floor in graph.find_nodes(op="call_function", target=aten.floor.default):
        quotient = floor.args[0]
        parity = all(torch.int8 in user.args or torch.int8 in user.kwargs.values() for user in floor.users)
        if not parity or not isinstance(quotient, fx.Node) or quotient.target is not aten.div.Tensor:
            continue
        distance, span = quotient.args
        remainders = (
            node
            for node in (distance.users if isinstance(distance, fx.Node) else ())
            if node.target in (aten.fmod.Scalar, aten.fmod.Tensor) and node.args == (distance, span) and node < floor
        )
        remainder = next(remainders, None)
        if remainder is None:
            continue
        with graph.inserting_before(floor):
            whole = graph.call_function(aten.sub.Tensor, (distance, remainder))
            turns = graph.call_function(aten.div.Tensor, (whole, span))
        whole.meta, turns.meta = {**remainder.meta}, {**quotient.meta}
        floor.target, floor.args = aten.round.default, (turns,)
        if not quotient.users:
            graph.erase_node(quotient)


def refuse_empty_planes(graph: fx.Graph) -> None:
    """Eager refuses adaptive pooling of an image without cells; Inductor's code reads outside of it (2.11 to 2.14).

    The process may end by it. Raises eager's error (as a Refusal).
    """
    for node in graph.nodes:
        axes = ADAPTIVE.get(node.target, 0)
        value = tensor_of(node.args[0]) if axes else None
        if value is None:
            continue
        if any(is_zero(size) for size in value.shape[-axes:]):
            raise Refusal(
                RuntimeError(
                    f"{label(node)}: Expected input to have non-zero size for non-batch dimensions, but input has "
                    f"sizes {list(value.shape)}. Remedy: leave the pooling out where there is no image"
                )
            )


class TorchFaults(_torch_private.custom_graph_pass_class()):  # type: ignore[misc]  # the base is torch's
    """The functions above as a graph pass."""

    def __call__(self, graph: fx.Graph) -> None:
        lead_around_randperm_pattern(graph)
        read_byte_masks_as_bool(graph)
        count_reflections_exactly(graph)
        refuse_empty_planes(graph)

    def uuid(self) -> Any:
        return ("detpass.torch_faults", 4)


def install(compiles_ours: Callable[[], bool]) -> None:
    """Lead around the faults that no graph pass can reach; ``compiles_ours`` says if Inductor works for us just now.

    Inductor's C++ code drops the end of a loop over ``x[i // d]`` for ``d > 8`` that does not divide the length
    (``x + b[torch.arange(n) // 16]`` for ``n = 1000``; 2.11 to 2.14).
    """
    _torch_private.guard_cpu_loop_split(compiles_ours)
    trace_ctc_loss()
    _torch_private.correct_fake_result(aten.bincount.default, _counted)


def _traced_for_us() -> bool:
    """Whether Dynamo traces for a backend that runs the rules."""
    found = _torch_private.compiling_backend()
    return found is not None and bool(getattr(found[0], "runs_rules", False))


def _counted(own: Callable[..., Any], fake_mode: Any, overload: Any, source: Any, *others: Any, **named: Any) -> Any:
    """``bincount`` on fake tensors has the dtype of its input in torch 2.11, whatever the kernel returns.

    Inductor's code then writes 8 bytes into places of 4. Of an empty input the kernel counts in integers, weights or
    not, which torch says since 2.14.
    """
    if not _traced_for_us():
        return own(fake_mode, overload, source, *others, **named)
    given = dict(zip(("weights", "minlength"), others, strict=False)) | named
    weights, minlength = given.get("weights"), given.get("minlength", 0)
    if source.dim() == 1 and is_empty(source):
        return source.new_empty(max(minlength, 0), dtype=torch.int64)
    result: torch.Tensor = own(fake_mode, overload, source, *others, **named)
    if weights is None:
        expected = torch.int64
    else:
        expected = weights.dtype if weights.dtype == torch.float32 else torch.float64
    return result if result.dtype == expected else result.new_empty(result.shape, dtype=expected)


def trace_ctc_loss() -> None:
    """Let backends with a true ``runs_rules`` trace CTC loss, at which Dynamo ends the graph otherwise (2.11 to 2.14).

    The loss has a known shape; the forward variables beside it do not, and get an empty stand-in, since the rule
    ``ctc_loss`` replaces every node that makes or reads them. Whether cuDNN serves a call is decided by data, too:
    here it never does.
    """

    def ours(function: Callable[..., Any]) -> Callable[..., Any]:
        def result(fake_mode: Any, overload: Any, *args: Any, **kwargs: Any) -> Any:
            if not _traced_for_us():
                return NotImplemented
            with fake_mode:
                return function(*args)

        return result

    def loss(log_probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return log_probs.new_empty(log_probs.shape[1]), log_probs.new_empty(0)

    def gradient(grad: torch.Tensor, log_probs: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)

    fakes: dict[str, Callable[..., Any]] = {
        "_ctc_loss": loss,
        "_ctc_loss_backward": gradient,
        "_use_cudnn_ctc_loss": lambda *_: False,
    }
    for name, function in fakes.items():
        for overload in ("default", "Tensor"):
            _torch_private.register_fake_result(getattr(getattr(aten, name), overload), ours(function))
    _torch_private.register_composite(aten.ctc_loss.IntList, _ctc_loss_of_lists)


MEAN, SUM = 1, 2


def _ctc_loss_of_lists(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: list[int],
    target_lengths: list[int],
    blank: int = 0,
    reduction: int = MEAN,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """``ctc_loss`` from ``_ctc_loss``; torch's own fills a fake tensor with the lengths, which fails."""
    batched = log_probs.dim() == 3
    table = log_probs if batched else log_probs.unsqueeze(1)
    words = targets.to(table.device, torch.int64)
    loss: torch.Tensor = aten._ctc_loss.default(table, words, input_lengths, target_lengths, blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == float("inf"), 0, loss)
    if reduction == MEAN:
        counts = torch.tensor([max(1, length) for length in target_lengths], dtype=loss.dtype, device=loss.device)
        return (loss / counts).mean()
    if reduction == SUM:
        return loss.sum()
    return loss if batched else loss.squeeze(0)
