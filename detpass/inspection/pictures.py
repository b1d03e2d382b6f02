"""The graph around one node, small enough to be drawn: what it read and who read it, before and after the rewrite.

A :class:`Snapshot` keeps the structure of a graph while the graph itself is being changed. ``layout.py`` places a
picture's nodes; ``render_html.py`` draws them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from detpass import user_kernels
from detpass.inspection import cost
from detpass.inspection.locations import describe
from detpass.rewriting.graph_pass import REPLACES

MAX_NODES = 22
"""Nodes in one picture; what does not fit is shown as one node that says how many."""
MAX_CORE = 12
"""Inserted nodes in one picture, so that their neighbours have room too."""
REACH = 2
"""How many steps a picture goes up; it goes one step down."""


@dataclass(frozen=True)
class PictureNode:
    """A box in a picture."""

    label: str
    """The operator's short name."""
    detail: str
    """Dtype and shape."""
    kind: str
    """``subject`` (the record's node), ``inserted`` (in its place), ``context``, ``input`` or ``elided``."""


@dataclass(frozen=True)
class Picture:
    """A small directed graph."""

    nodes: tuple[PictureNode, ...]
    """The boxes, in graph order."""
    edges: tuple[tuple[int, int], ...]
    """Pairs of positions in ``nodes``: from a value to its reader."""


@dataclass(frozen=True)
class SnapshotNode:
    """What a snapshot keeps of a node."""

    name: str
    label: str
    detail: str
    is_input: bool
    inputs: tuple[str, ...]
    replaces: str | None
    meta: Mapping[str, Any]
    moved: int
    seconds: float


@dataclass
class Snapshot:
    """The structure of a graph at one moment."""

    nodes: dict[str, SnapshotNode] = field(default_factory=dict)
    """By name, in graph order."""
    users: dict[str, list[str]] = field(default_factory=dict)
    """The readers of each node."""
    rank: dict[str, int] = field(default_factory=dict)
    """The position of each node in graph order."""

    @classmethod
    def of(cls, graph: fx.Graph, device_type: str) -> Snapshot:
        """The structure of ``graph`` now, with each node's estimated cost on a device."""
        found = cls()
        for node in graph.nodes:
            inputs = tuple(n.name for n in node.all_input_nodes)
            for name in inputs:
                found.users.setdefault(name, []).append(node.name)
            if node.op == "output":
                continue
            found.rank[node.name] = len(found.rank)
            moved = cost.node_bytes(node)
            found.nodes[node.name] = SnapshotNode(
                name=node.name,
                label=short_name(node),
                detail=describe(node.meta.get("val")) if "val" in node.meta else "",
                is_input=node.op in ("placeholder", "get_attr"),
                inputs=inputs,
                replaces=node.meta.get(REPLACES),
                meta=node.meta,
                moved=moved,
                seconds=cost.node_seconds(node, moved, device_type) if node.op == "call_function" else 0.0,
            )
        return found

    def operators(self) -> int:
        """The number of operator nodes."""
        return sum(not node.is_input for node in self.nodes.values())

    def around(self, names: Iterable[str], kind: str) -> Picture:
        """The nodes ``names``, shown as ``kind``, with their neighbourhood."""
        core = dict.fromkeys(name for name in names if name in self.nodes)
        shown = dict.fromkeys(list(core)[-MAX_CORE:])  # those nearest to the result say most
        frontier = list(shown)
        for _ in range(REACH):
            above = [i for name in frontier for i in self.nodes[name].inputs if i not in shown]
            shown.update(dict.fromkeys(above[: max(0, MAX_NODES - len(shown))]))
            frontier = [name for name in above if name in shown]
        below = [
            user
            for name in core
            if name in shown
            for user in self.users.get(name, ())
            if user not in shown and user not in core and user in self.nodes
        ]
        shown.update(dict.fromkeys(below[: max(2, MAX_NODES - len(shown))]))
        order = sorted(shown, key=self.rank.__getitem__)
        position = {name: i for i, name in enumerate(order)}
        boxes = [self._box(name, kind if name in core else "context") for name in order]
        edges = [(position[i], position[name]) for name in order for i in self.nodes[name].inputs if i in position]
        left_out = {name for name in core if name not in shown}
        if left_out:
            boxes = [PictureNode(f"{len(left_out)} more", "", "elided"), *boxes]
            readers = [(0, position[name] + 1) for name in order if left_out.intersection(self.nodes[name].inputs)]
            edges = [*readers, *((a + 1, b + 1) for a, b in edges)]
        return Picture(tuple(boxes), tuple(dict.fromkeys(edges)))

    def _box(self, name: str, kind: str) -> PictureNode:
        node = self.nodes[name]
        return PictureNode(node.label, node.detail, "input" if node.is_input and kind == "context" else kind)


def replacements(after: Snapshot) -> dict[str, list[str]]:
    """The nodes inserted in the place of each replaced node, by that node's name; unread ones are left out."""
    found: dict[str, list[str]] = {}
    for name, node in after.nodes.items():
        if node.replaces is not None and name in after.users:
            found.setdefault(node.replaces, []).append(name)
    return found


def short_name(node: fx.Node) -> str:
    """What a picture calls a node: ``index_put``, ``detpass::segment_sum``, ``primals`` ..."""
    if node.op == "placeholder":
        return str(node.target)
    kernel = user_kernels.function_of(node)
    if kernel is not None:
        return f"kernel {kernel.__name__}"
    text = str(getattr(node.target, "__name__", node.target) if not hasattr(node.target, "_schema") else node.target)
    text = text.removesuffix(".default")
    for prefix in ("aten.", "prims."):
        text = text.removeprefix(prefix)
    return text
