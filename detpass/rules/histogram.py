"""Histograms: counts in integers, weights as segment sums.

``histc`` on CUDA adds 1.0 to float counters atomically; here the bin of each value feeds an exact integer count.
Before: ``aten.histc(x, bins, low, high)``. After: ``segment_count(bin_of(x))`` in the dtype of ``x``.

``histogram`` with weights exists on a CPU only, where threads add their partial histograms in the order in which they
finish. Before: ``aten.histogram.bin_ct(x, bins, range, weight, density)``. After: a segment sum of the weights by bin.

``bincount`` with weights on CUDA. Before: ``aten.bincount(x, w, minlength)``. After: ``segment_sum(w, x, n)`` with the
length ``n`` of the exact count ``aten.bincount(x, None, minlength)``; the graph's name of the old size goes over to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from detpass import segment
from detpass.errors import Refusal
from detpass.graph_query import arguments, is_empty, is_zero, known_to_differ, label, tensor_of
from detpass.rule import Inapplicable, Match, NoMatch, Rule, RuleContext, Safe, Treatment, Verdict
from detpass.rules.kernel_rounding import quotient
from detpass.rules.plane_scatter import accumulation_dtype

aten = torch.ops.aten


class Histc(Rule):
    """``histc`` as an exact count of bins."""

    name = "histc"
    targets = (aten.histc.default,)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        if context.device.type != "cuda":
            return Safe("ATen's CPU histogram counts ones, which float counters hold exactly in any order below 2**24")
        given = arguments(node)
        source = tensor_of(given["self"])
        if source is None or not all(isinstance(given[name], (int, float)) for name in ("bins", "min", "max")):
            return NoMatch(Inapplicable.UNKNOWN_SIZE, node, "the bins and the range must be numbers")
        parameters = {"bins": given["bins"], "low": given["min"], "high": given["max"]}
        return Match((given["self"],), "counts are exact in integers", parameters, Treatment.SEGMENT)

    def replacement(self, source: torch.Tensor, *, bins: int, low: float, high: float) -> torch.Tensor:
        flat = source.reshape(-1)
        exact = not flat.dtype.is_floating_point
        wide = flat.to(torch.int64) if exact else flat.to(accumulation_dtype(flat.dtype))
        bottom: Any = torch.full((), low, dtype=wide.dtype, device=wide.device)
        top: Any = torch.full((), high, dtype=wide.dtype, device=wide.device)
        if low == high:
            # The data's own range, as eager takes it; widened by one on each side when that is a single value.
            if not is_zero(flat.shape[0]):
                bottom, top = wide.amin(), wide.amax()
            single = bottom == top
            bottom, top = torch.where(single, bottom - 1, bottom), torch.where(single, top + 1, top)
        inside = (wide >= bottom) & (wide <= top)
        scaled = (wide - bottom) * bins
        # Integers in integers, as ATen's kernel divides; a quotient a last bit too small would be in the bin before.
        place = scaled // (top - bottom) if exact else quotient(scaled, top - bottom).to(torch.int64)
        place = torch.clamp(place, 0, bins - 1)
        index = torch.where(inside, place, segment.skipped_value(torch.int64))
        return segment.segment_count(index, bins, False, "histc").to(source.dtype)


class WeightedHistogram(Rule):
    """``histogram`` with weights as a segment sum by bin."""

    name = "weighted_histogram"
    targets = (aten.histogram.bin_ct, aten.histogram.bins_tensor)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        given = arguments(node)
        if given["weight"] is None:
            return Safe("counts of ones are exact in any order below 2**24")
        density = bool(given["density"])
        if node.target is aten.histogram.bins_tensor:
            operands = (given["self"], given["weight"], given["bins"])
            return Match(operands, "weights are summed by bin", {"density": density}, Treatment.SEGMENT)
        if not isinstance(given["bins"], int):
            return NoMatch(Inapplicable.UNKNOWN_SIZE, node, "the number of bins must be known")
        bounds = None if given["range"] is None else tuple(given["range"])
        parameters = {"density": density, "bins": given["bins"], "bounds": bounds}
        return Match((given["self"], given["weight"]), "weights are summed by bin", parameters, Treatment.SEGMENT)

    def replacement(
        self,
        source: torch.Tensor,
        weight: torch.Tensor,
        edges: torch.Tensor | None = None,
        *,
        density: bool,
        bins: int = 0,
        bounds: Sequence[float] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flat = source.reshape(-1)
        if edges is None:
            # ATen computes the edges from the data or the range; without weights that is deterministic.
            _, edges = aten.histogram.bin_ct(source, bins, range=None if bounds is None else list(bounds))
        count = edges.shape[0] - 1
        place = torch.searchsorted(edges, flat, right=True) - 1
        # The last bin is closed on both sides.
        place = torch.where(flat == edges[-1], count - 1, place)
        inside = (flat >= edges[0]) & (flat <= edges[-1])
        index = torch.where(inside, place, segment.skipped_value(torch.int64))
        total = segment.segment_reduce(weight.reshape(1, -1, 1), index, count, "sum", False, "histogram").reshape(-1)
        if density:
            total = total / (total.sum() * (edges[1:] - edges[:-1]))
        return total, edges.clone()


class WeightedBincount(Rule):
    """``bincount`` with weights as a segment sum as long as the count without them."""

    name = "weighted_bincount"
    targets = (aten.bincount.default,)

    def match(self, node: fx.Node, context: RuleContext) -> Verdict:
        given = arguments(node)
        source, weights = tensor_of(given["self"]), tensor_of(given["weights"])
        if given["weights"] is None:
            return Safe("counts are exact in integers")
        if context.device.type != "cuda":
            return Safe("the CPU kernel adds in the order of the values, in one thread")
        if source is None or weights is None:
            return NoMatch(Inapplicable.ARGUMENT, node, "no known value")
        if source.dim() != 1 or weights.dim() != 1 or known_to_differ(source.shape[0], weights.shape[0]):
            raise Refusal(
                RuntimeError(
                    f"{label(node)}: the input has the shape {list(source.shape)} and the weights "
                    f"{list(weights.shape)}; bincount expects two vectors of one length"
                )
            )
        if is_empty(source):
            return Safe("nothing is added")
        parameters = {"dtype": node.meta["val"].dtype, "op": label(node)}
        operands = (given["self"], given["weights"], given["minlength"])
        return Match(operands, "weights are summed by value", parameters, Treatment.SEGMENT)

    def replacement(
        self, source: torch.Tensor, weights: torch.Tensor, minlength: Any, *, dtype: torch.dtype, op: str
    ) -> torch.Tensor:
        # Eager's check of the input's sign is part of the count.
        length = aten.bincount.default(source, None, minlength).shape[0]
        rows = weights.to(dtype).reshape(1, -1, 1)
        return segment.segment_reduce(rows, source.to(torch.int64), length, "sum", False, op).reshape(-1)
