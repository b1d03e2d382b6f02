"""The last check: Inductor's lowered nodes, before they are fused, must hold nothing nondeterministic.

Runs as Inductor's ``_pre_fusion_custom_pass``. Its ``uuid`` takes part in the cache keys and a refusal keeps the
artifact out of the caches, so a cached artifact is a checked one. What the rewrite proved safe is known here by the
``meta`` of the FX nodes that a lowered node stems from.

Blind to the inside of templates (flex attention's backward): the catalogue lists those by operator.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from detpass import _torch_private
from detpass.config import Options, target_device
from detpass.errors import NondeterministicArtifactError
from detpass.graph_query import source_location
from detpass.rewriting.graph_pass import DECIDED, Hazard

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """A lowered node that may give different bits from run to run."""

    what: str
    """Such as ``float atomic_add into buf1``."""
    origins: tuple[fx.Node, ...]
    """The FX nodes that it stems from."""

    def __str__(self) -> str:
        names = ", ".join(sorted({str(node.target) for node in self.origins})) or "unknown"
        places = sorted({place for node in self.origins if (place := source_location(node))})
        return f"{self.what}, from {names}{f' at {places[0]}' if places else ''}"


def findings(nodes: list[Any], hazard: Hazard, options: Options) -> Iterator[Finding]:
    """What is left that is nondeterministic in Inductor's scheduler ``nodes`` (fused nodes are looked into)."""
    for scheduled in nodes:
        if children := getattr(scheduled, "snodes", None):
            yield from findings(children, hazard, options)
            continue
        lowered = getattr(scheduled, "node", None)
        if lowered is None:
            continue
        origins = tuple(sorted((n for n in lowered.get_origins() if n.op == "call_function"), key=lambda n: n.name))
        what = _describe(scheduled, lowered, origins, hazard, options)
        if what is not None and not any(DECIDED in node.meta for node in origins):
            yield Finding(what, origins)


def _describe(
    scheduled: Any, lowered: Any, origins: tuple[fx.Node, ...], hazard: Hazard, options: Options
) -> str | None:
    kind = _torch_private.lowered_kind(scheduled, lowered)
    if kind is None:
        return None
    if kind.startswith("extern:"):
        for node in origins:
            device = _torch_private.lowered_device(lowered)
            why = hazard(node, target_device(options, device)) if device is not None else None
            if why is not None and str(node.target) in kind:
                return f"{node.target}: {why}"
        return None
    return kind


class LoweringAudit(_torch_private.custom_scheduler_pass_class()):  # type: ignore[misc]  # the base is torch's
    """The scheduler pass that refuses an artifact with something nondeterministic left in it."""

    def __init__(self, hazard: Hazard, options: Options, uuid: str, then: Any = None) -> None:
        self._hazard = hazard
        self._options = options
        self._uuid = uuid
        self._then = then

    def __call__(self, nodes: list[Any]) -> list[Any]:
        if self._options.on_uncovered == "error":
            left = list(findings(nodes, self._hazard, self._options))
            if left:
                raise NondeterministicArtifactError(
                    "the lowered code still holds a nondeterministic operation: "
                    + "; ".join(map(str, left))
                    + '. Please report this; options={"on_uncovered": "warn"} compiles it anyway.'
                )
        return self._then(nodes) if self._then is not None else nodes

    def uuid(self) -> Any:
        then = self._then.uuid() if self._then is not None and hasattr(self._then, "uuid") else None
        return ("detpass.lowering_audit", self._uuid, then)
