"""Which operators that generated CUDA code calls are nondeterministic there, by the catalogue of ``detpass/rules``.

Generated code is text: it has names and arguments, no nodes. So a row's condition on nodes is asked of the text here,
and an operator is found under any of its names (in place, with ``out=``, of ATen's own or of Inductor's).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from detpass.rule import Treatment
from detpass.rules import catalogue
from detpass.rules.catalogue import CUDA, Entry

_FAMILIES: Mapping[str, str] = {
    "_unsafe_index_put": "index_put",
    "_index_put_impl": "index_put",
    "put": "index_put",
    "embedding_bag_backward": "_embedding_bag_backward",
    "embedding_backward": "embedding_dense_backward",
    "adaptive_avg_pool2d_backward": "_adaptive_avg_pool2d_backward",
    "adaptive_avg_pool3d_backward": "_adaptive_avg_pool3d_backward",
    "cudnn_convolution_transpose": "convolution",
}
"""Names under which generated code may call an operator of the catalogue, with the catalogue's name."""


@dataclass(frozen=True)
class _Call:
    name: str
    arguments: Sequence[str]
    keywords: Mapping[str, str]
    integers: bool

    def given(self, keyword: str, position: int | None = None, default: str = "None") -> str:
        """The text of an argument, by keyword or position."""
        if position is not None and len(self.arguments) > position:
            return self.arguments[position]
        return self.keywords.get(keyword, default)

    @property
    def weighted(self) -> bool:
        return self.given("weights", 1) != "None"


_CONDITIONS: Mapping[Callable[..., bool], Callable[[_Call], bool]] = {
    catalogue.always: lambda call: True,
    catalogue.is_inexact: lambda call: not call.integers,
    catalogue.has_weights: lambda call: call.weighted,
    catalogue.is_transposed: lambda call: (
        call.name == "cudnn_convolution_transpose" or call.given("transposed", 6, "False") == "True"
    ),
    catalogue.is_unstable: lambda call: call.given("stable", 1, "False") != "True",
    catalogue.is_left_to_cudnn: lambda call: call.given("deterministic", 5, "False") != "True",
    catalogue.captures_gradients: lambda call: True,
    catalogue.is_flash: lambda call: True,
    catalogue.has_ordered_atomics: lambda call: True,
    catalogue.is_measured: lambda call: True,
}
"""The catalogue's conditions on a node, as conditions on a call's text."""


@functools.lru_cache(maxsize=1)
def _rows() -> Mapping[str, tuple[Entry, ...]]:
    found: dict[str, list[Entry]] = {}
    for entry in catalogue.entries():
        if CUDA in entry.devices and entry.treatment is not Treatment.SAFE:
            for name in dict.fromkeys(map(operator_name, entry.ops)):
                found.setdefault(name, []).append(entry)
    return {name: tuple(rows) for name, rows in found.items()}


def hazard_of(
    operator: str,
    arguments: Sequence[str] = (),
    keywords: Mapping[str, str] | None = None,
    integers: bool = False,
) -> str | None:
    """Why a call is nondeterministic on CUDA, in the catalogue's words, or None.

    ``operator`` is dotted as in generated code, arguments are text. ``integers`` says that the first argument holds
    integers, whose sums do not depend on order.
    """
    if operator.startswith("torch.ops.detpass."):
        return None
    call = _Call(base_name(operator), arguments, keywords or {}, integers)
    for entry in _candidates(operator):
        if operator_name(operator) == "index_put" and _accumulates(call) == (entry.applies is catalogue.always):
            continue  # one name, two operators: adding and writing
        if _CONDITIONS[entry.applies](call):
            return f"{entry.why}; {entry.note}" if entry.note else entry.why
    return None


def _candidates(operator: str) -> Sequence[Entry]:
    """The rows of an operator; of one of its overloads where the text names one that a row lists."""
    rows = _rows().get(operator_name(operator), ())
    exact = [entry for entry in rows if operator.removeprefix("torch.ops.") in entry.ops]
    return exact or rows


def _accumulates(call: _Call) -> bool:
    return call.given("accumulate", 3, "False") != "False"


def operator_name(operator: str) -> str:
    """The catalogue's name of an operator that text or a node names: ``index_put`` for ``aten._unsafe_index_put``."""
    name = base_name(operator)
    return _FAMILIES.get(name, name)


def base_name(operator: str) -> str:
    """``index_add`` for ``aten.index_add_``, ``torch.ops.aten.index_add.default`` and ``extern_kernels.index_add``."""
    parts = operator.split(".")
    if parts[:2] == ["torch", "ops"]:
        parts = parts[2:]
    name = parts[1] if len(parts) > 1 else parts[0]
    return name.rstrip("_") or name
