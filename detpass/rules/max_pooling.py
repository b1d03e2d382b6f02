"""Backward of max pooling: each cell gathers from the windows that can point to it.

Before::

    grad_input = aten.max_pool2d_with_indices_backward(grad_output, input, kernel, ..., indices)   # scatter, atomic

After, for small windows (``windows.py``)::

    grad_input[cell] = sum over the windows o over the cell of where(indices[o] == cell, grad_output[o], 0)

where the forward kept a window's own element number instead of the cell (Inductor's low-memory pooling), that number
is compared with a constant: a byte for each window, and no index arithmetic.

Two windows that share a cell are added in the order of the windows; disjoint windows need no sum at all. For large
overlapping windows, where most of those comparisons would be false, the recorded indices feed a segment sum.
The ops are kept whole while the graph is traced: Inductor's decomposition would leave a ``scatter_add``.

On a CPU ATen's own kernel for 2-d pooling adds on one thread a plane, or a sample in channels-last layout, in the same
order and takes 0.4 to 1.0 of the gather's time: in float32 and float64 it is called (``native_calls.py``). Lower
precision would be rounded after each addition there.

Neighbours: ``adaptive_pooling.py`` (windows of varying size), ``pooling.py`` (averages).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from detpass.graph_query import arguments, tensor_of
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Treatment, Verdict
from detpass.rules.native_calls import native
from detpass.rules.plane_scatter import accumulation_dtype, add_into_planes
from detpass.rules.windows import (
    Reach,
    Shifter,
    Window,
    are_sliced,
    blocked,
    blocked_adjoint,
    overlap,
    sliced_adjoint,
)

aten = torch.ops.aten

MOST_COMPARISONS = 64
"""Windows with more elements than this, overlapping, go to the segment form: their gathers would mostly miss."""


NATIVE = native(aten.max_pool2d_with_indices_backward.default)
"""Defined before any graph is compiled: an artifact from the cache calls it without the rule having matched."""


class MaxPoolBackward(Rule):
    """``max_pool2d/3d_with_indices_backward`` as a gather over the windows of each cell, or a segment sum."""

    name = "max_pool_backward"
    targets = (
        aten.max_pool2d_with_indices_backward.default,
        aten.max_pool3d_with_indices_backward.default,
    )
    kept_whole = targets

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        given = arguments(node)
        grad, source = tensor_of(given["grad_output"]), tensor_of(given["self"])
        if grad is None or source is None:
            return NoMatch(Inapplicable.ARGUMENT, node, "operands without a known value")
        axes = 2 if node.target is self.targets[0] else 3
        windows = pool_windows(axes, given["kernel_size"], given["stride"], given["padding"], given["dilation"])
        if axes == 2 and context.device.type == "cpu" and grad.dtype in (torch.float32, torch.float64):
            shape = {name: given[name] for name in ("kernel_size", "stride", "padding", "dilation", "ceil_mode")}
            elements = None if windows is None else _element_numbers(given["indices"], windows)
            recorded = given["indices"] if elements is None else elements
            parameters = {"whole": shape, "windows": windows or (), "by_element": elements is not None}
            operands = (given["grad_output"], recorded, given["self"])
            return Match(operands, "ATen's CPU kernel adds in a fixed order", parameters, Treatment.NATIVE)
        if windows is None:
            return NoMatch(Inapplicable.UNKNOWN_SIZE, node, "the kernel, stride, padding and dilation must be numbers")
        if not is_gathered(windows):
            reason = "windows overlap; the recorded indices are data"
            operands = (given["grad_output"], given["indices"], given["self"])
            return Match(operands, reason, {"windows": windows, "gathered": False}, Treatment.SEGMENT)
        reason = "a cell meets few windows, known from the shapes" if overlap(windows) else "windows are disjoint"
        elements = _element_numbers(given["indices"], windows)
        recorded = given["indices"] if elements is None else elements
        parameters = {"windows": windows, "by_element": elements is not None}
        return Match((given["grad_output"], recorded, given["self"]), reason, parameters, Treatment.CLOSED_FORM)

    def replacement(
        self,
        grad: torch.Tensor,
        recorded: torch.Tensor,
        source: torch.Tensor,
        *,
        windows: tuple[Window, ...] = (),
        gathered: bool = True,
        by_element: bool = False,
        whole: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        if whole is not None:
            # The kernel reads the sizes and the layout of its input alone: the input itself need not be kept.
            like = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=source.device)
            indices = cell_numbers(recorded, windows, source.shape[-1]) if by_element else recorded
            result: torch.Tensor = NATIVE(grad, like, **whole, indices=indices)
            return result
        cells = source.shape[source.dim() - len(windows) :]
        if not gathered:
            return scatter_by_indices(grad, recorded, cells, "max_pool_backward")
        gather = gather_by_element if by_element else gather_by_cell
        return gather(grad.to(accumulation_dtype(grad.dtype)), recorded, windows, cells).to(grad.dtype)


def is_gathered(windows: Sequence[Window]) -> bool:
    """Whether the gather form is used: it costs one comparison for each window over a cell."""
    comparisons = 1
    for window in windows:
        comparisons *= window.kernel
    return comparisons <= MOST_COMPARISONS or not overlap(windows)


def pool_windows(axes: int, kernel: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Window, ...] | None:
    """The windows of a pooling op's arguments; None when one of them is symbolic."""

    def spread(value: Any) -> list[Any]:
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        return items * axes if len(items) == 1 else items

    kernels = spread(kernel)
    strides = spread(stride) if stride else kernels
    columns = (kernels, strides, spread(padding), spread(dilation))
    if not all(isinstance(item, int) for column in columns for item in column):
        return None
    return tuple(Window(*row) for row in zip(*columns, strict=True))


def _element_numbers(indices: Any, windows: Sequence[Window]) -> fx.Node | None:
    """The node of the window element numbers from which ``indices`` were computed, when the windows are the same."""
    converts = getattr(torch.ops.prims, "_low_memory_max_pool_offsets_to_indices", None)
    if converts is None or not isinstance(indices, fx.Node) or indices.target is not converts.default:
        return None
    elements, kernel, _, stride, padding, dilation = indices.args
    same = pool_windows(len(windows), kernel, stride, padding, dilation) == tuple(windows)
    return elements if same and isinstance(elements, fx.Node) else None


def cell_numbers(elements: torch.Tensor, windows: tuple[Window, ...], width: Any) -> torch.Tensor:
    """The flat cells ``int64[..., H, W]`` of 2-d window element numbers, in the few instructions that this takes."""
    down, across = windows
    columns = across.kernel
    number = elements.to(torch.int32)
    row = torch.zeros_like(number)
    for r in range(1, down.kernel):
        row = row + (number >= r * columns).to(torch.int32)

    def first(window: Window, axis: int) -> torch.Tensor:
        return torch.arange(elements.shape[axis], device=elements.device) * window.stride - window.padding

    # Element e of row r is r * dilation rows down and (e - r * columns) * dilation cells across.
    inside = number * across.dilation - row * (columns * across.dilation)
    start = (first(down, -2).unsqueeze(-1) + row * down.dilation) * width
    cells: torch.Tensor = start + first(across, -1) + inside
    return cells


def gather_by_element(
    grad: torch.Tensor, elements: torch.Tensor, windows: tuple[Window, ...], cells: Sequence[Any]
) -> torch.Tensor:
    """``grad, elements: [..., *positions]`` to ``[..., *cells]``; ``elements`` are flat numbers inside the window."""
    grads = Shifter(grad, windows, cells, 0.0)
    # Inductor's masked loads of bytes are slow on a CPU: three times the whole kernel's time.
    recorded = Shifter(elements.to(torch.int32), windows, cells, -1)

    def number(chosen: Sequence[int]) -> int:
        flat = 0
        for window, element in zip(windows, chosen, strict=True):
            flat = flat * window.kernel + element
        return flat

    if are_sliced(windows):

        def term(phases: tuple[int, ...], reaches: tuple[Reach, ...]) -> torch.Tensor:
            backs = [reach.back for reach in reaches]
            return torch.where(recorded(backs) == number([reach.element for reach in reaches]), grads(backs), 0)

        return sliced_adjoint(windows, cells, term)

    count = len(windows)

    def blocked_term(backs: tuple[int, ...]) -> torch.Tensor:
        hit = blocked(recorded(backs), count)
        expected = torch.zeros((), dtype=torch.int64, device=grad.device)
        reached = torch.ones((), dtype=torch.bool, device=grad.device)
        for axis, (window, back) in enumerate(zip(windows, backs, strict=True)):
            inner = [1] * (2 * (count - 1 - axis))
            of_phase = window.element_by_phase(back, grad.device).reshape(-1, *inner)
            expected = expected * window.kernel + of_phase
            reached = reached & (of_phase >= 0)
        return torch.where((hit == expected) & reached, blocked(grads(backs), count), 0)

    return blocked_adjoint(windows, cells, blocked_term)


def gather_by_cell(
    grad: torch.Tensor, indices: torch.Tensor, windows: tuple[Window, ...], cells: Sequence[Any]
) -> torch.Tensor:
    """``grad, indices: [..., *positions]`` to ``[..., *cells]``; ``indices`` are flat cell numbers."""
    grads = Shifter(grad, windows, cells, 0.0)
    recorded = Shifter(indices, windows, cells, -1)
    strides: list[Any] = [1]
    for size in reversed(cells[1:]):
        strides.insert(0, strides[0] * size)

    def places(axis: int, phase: torch.Tensor | int, inner: int) -> torch.Tensor:
        """``stride * q + phase - padding`` along ``axis`` times its step, with ``inner`` dimensions after it.

        Numbers of cells in the padding mean nothing: the adjoint cuts those cells off.
        """
        window, size = windows[axis], cells[axis]
        q = torch.arange(window.blocks(size), device=grad.device) * window.stride - window.padding
        place = (q if isinstance(phase, int) else q.unsqueeze(1)) + phase
        numbers: torch.Tensor = place * strides[axis]
        return numbers.reshape(*place.shape, *[1] * inner)

    count = len(windows)
    if are_sliced(windows):

        def term(phases: tuple[int, ...], reaches: tuple[Reach, ...]) -> torch.Tensor:
            backs = [reach.back for reach in reaches]
            number: Any = sum(places(axis, phase, count - 1 - axis) for axis, phase in enumerate(phases))
            return torch.where(recorded(backs) == number, grads(backs), 0)

        return sliced_adjoint(windows, cells, term)

    def blocked_term(backs: tuple[int, ...]) -> torch.Tensor:
        difference = blocked(recorded(backs), count)
        met: Any = True
        for axis, (window, back) in enumerate(zip(windows, backs, strict=True)):
            inner = 2 * (count - 1 - axis)
            difference = difference - places(axis, torch.arange(window.stride, device=grad.device), inner)
            of_phase = window.element_by_phase(back, grad.device)
            met = met & (of_phase >= 0).reshape(-1, *[1] * inner)
        return torch.where((difference == 0) & met, blocked(grads(backs), count), 0)

    return blocked_adjoint(windows, cells, blocked_term)


def scatter_by_indices(grad: torch.Tensor, indices: torch.Tensor, cells: Sequence[Any], op: str) -> torch.Tensor:
    """Segment form for ``grad, indices: [..., *positions]`` with flat cell numbers; returns ``[..., *cells]``."""
    lead = grad.dim() - len(cells)
    return add_into_planes(grad.flatten(lead), indices.flatten(lead), cells, op)
