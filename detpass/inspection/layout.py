"""Places the boxes of a small directed graph in layers, values above their readers, with few crossings.

The usual four steps (Sugiyama): layers by longest path, a dummy for each layer that an edge passes, sweeps that order
each layer by the mean position of its neighbours, and coordinates that pull boxes towards their neighbours without
overlap. Deterministic, and meant for a few dozen boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from detpass.inspection.pictures import Picture

CHARACTER = 7.3
"""Width of a character of the labels' font, in pixels."""
PADDING, HEIGHT, GAP_X, GAP_Y, MARGIN = 12.0, 40.0, 18.0, 38.0, 8.0
DUMMY_WIDTH = 6.0
MAX_LABEL = 30
SWEEPS, PULLS = 12, 24


@dataclass(frozen=True)
class Box:
    """A placed node: its top left corner and size in pixels, and its position in the picture's nodes."""

    x: float
    y: float
    width: float
    height: float
    node: int


@dataclass(frozen=True)
class Drawing:
    """A placed picture."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    """In the order of the picture's nodes."""
    paths: tuple[tuple[tuple[float, float], ...], ...]
    """For each edge the points it passes, from the bottom of a box to the top of another."""


def shortened(text: str, limit: int = MAX_LABEL) -> str:
    """``text`` cut in its middle to at most ``limit`` characters."""
    if len(text) <= limit:
        return text
    kept = limit - 1
    return f"{text[: (kept + 1) // 2]}\N{HORIZONTAL ELLIPSIS}{text[len(text) - kept // 2 :]}"


def place(picture: Picture) -> Drawing:
    """Lay out a picture; edges must go from an earlier node to a later one."""
    layer = _layers(len(picture.nodes), picture.edges)
    chains, total = _with_dummies(picture.edges, layer)
    links = [(a, b) for chain in chains for a, b in pairwise(chain)]
    rows: list[list[int]] = [[] for _ in range(max(layer, default=0) + 1)]
    for vertex, row in enumerate(layer):
        rows[row].append(vertex)
    rows = _ordered(rows, links, total)
    widths = [_width(picture, vertex) if vertex < len(picture.nodes) else DUMMY_WIDTH for vertex in range(total)]
    centre = _centres(rows, links, widths)
    left = min((centre[v] - widths[v] / 2 for v in range(total)), default=0.0)
    centre = [x - left + MARGIN for x in centre]
    top = [MARGIN + row * (HEIGHT + GAP_Y) for row in layer]
    boxes = tuple(Box(centre[v] - widths[v] / 2, top[v], widths[v], HEIGHT, v) for v in range(len(picture.nodes)))
    paths = tuple(_path(chain, centre, top) for chain in chains)
    width = max((centre[v] + widths[v] / 2 for v in range(total)), default=0.0) + MARGIN
    return Drawing(width, len(rows) * (HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN, boxes, paths)


def crossings(rows: Sequence[Sequence[int]], links: Sequence[tuple[int, int]]) -> int:
    """The number of pairs of links between neighbouring rows that cross."""
    position = {vertex: i for row in rows for i, vertex in enumerate(row)}
    row_of = {vertex: i for i, row in enumerate(rows) for vertex in row}
    count = 0
    for i, (a, b) in enumerate(links):
        for c, d in links[i + 1 :]:
            if row_of[a] == row_of[c]:
                count += (position[a] - position[c]) * (position[b] - position[d]) < 0
    return count


def _layers(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    layer = [0] * count
    for source, reader in sorted(edges, key=lambda edge: edge[1]):
        layer[reader] = max(layer[reader], layer[source] + 1)
    has_input = {reader for _, reader in edges}
    for vertex in range(count):  # a value that is read late stands right above its first reader
        readers = [layer[reader] for source, reader in edges if source == vertex]
        if readers and vertex not in has_input:
            layer[vertex] = min(readers) - 1
    return layer


def _with_dummies(edges: Sequence[tuple[int, int]], layer: list[int]) -> tuple[list[list[int]], int]:
    """The vertices that each edge passes; ``layer`` gets the layer of each dummy appended."""
    chains = []
    for source, reader in edges:
        chain = [source]
        for row in range(layer[source] + 1, layer[reader]):
            layer.append(row)
            chain.append(len(layer) - 1)
        chains.append([*chain, reader])
    return chains, len(layer)


def _ordered(rows: list[list[int]], links: list[tuple[int, int]], total: int) -> list[list[int]]:
    above: list[list[int]] = [[] for _ in range(total)]
    below: list[list[int]] = [[] for _ in range(total)]
    for a, b in links:
        below[a].append(b)
        above[b].append(a)
    best, best_count = rows, crossings(rows, links)
    current = [list(row) for row in rows]
    for sweep in range(SWEEPS):
        neighbours = above if sweep % 2 == 0 else below
        for row in current if sweep % 2 == 0 else reversed(current):
            position = {vertex: i for r in current for i, vertex in enumerate(r)}
            own = {vertex: i for i, vertex in enumerate(row)}
            row.sort(key=lambda v: (_mean([position[n] for n in neighbours[v]], own[v]), own[v]))
        count = crossings(current, links)
        if count < best_count:
            best, best_count = [list(row) for row in current], count
    return best


def _centres(rows: list[list[int]], links: list[tuple[int, int]], widths: list[float]) -> list[float]:
    neighbours: list[list[int]] = [[] for _ in widths]
    for a, b in links:
        neighbours[a].append(b)
        neighbours[b].append(a)
    centre = [0.0] * len(widths)
    for row in rows:
        x = 0.0
        for vertex in row:
            centre[vertex] = x + widths[vertex] / 2
            x += widths[vertex] + GAP_X
        for vertex in row:
            centre[vertex] -= x / 2
    for _ in range(PULLS):
        for row in rows:
            wanted = [_mean([centre[n] for n in neighbours[v]], centre[v]) for v in row]
            for vertex, x in zip(row, _apart(wanted, [widths[v] for v in row]), strict=True):
                centre[vertex] = x
    return centre


def _apart(wanted: list[float], widths: list[float]) -> list[float]:
    """The wanted centres moved as little as needed so that boxes of ``widths`` do not overlap: two passes averaged."""
    right, left = list(wanted), list(wanted)
    for i in range(1, len(wanted)):
        right[i] = max(right[i], right[i - 1] + (widths[i - 1] + widths[i]) / 2 + GAP_X)
    for i in range(len(wanted) - 2, -1, -1):
        left[i] = min(left[i], left[i + 1] - (widths[i] + widths[i + 1]) / 2 - GAP_X)
    return [(a + b) / 2 for a, b in zip(left, right, strict=True)]


def _path(chain: list[int], centre: list[float], top: list[float]) -> tuple[tuple[float, float], ...]:
    first, *middle, last = chain
    points = [(centre[first], top[first] + HEIGHT)]
    for vertex in middle:
        points += [(centre[vertex], top[vertex]), (centre[vertex], top[vertex] + HEIGHT)]
    return (*points, (centre[last], top[last]))


def _width(picture: Picture, vertex: int) -> float:
    node = picture.nodes[vertex]
    longest = max(len(shortened(node.label)), len(shortened(node.detail)))
    return max(56.0, longest * CHARACTER + 2 * PADDING)


def _mean(values: list[float] | list[int], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
