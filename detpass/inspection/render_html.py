"""An inspection's report as one HTML file: no network, no server, readable without JavaScript, dark and light.

The text comes from ``report.html.j2`` (everything escaped), the looks from ``report.css``, sorting, filtering and zoom
from ``report.js``; pictures are laid out by ``layout.py`` and drawn here as SVG.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from detpass.environment import Level
from detpass.inspection.layout import Drawing, place, shortened
from detpass.inspection.pictures import Picture, PictureNode
from detpass.inspection.records import InspectionRecord
from detpass.inspection.render_text import explained, grouped, headline, short_path, size, verdict
from detpass.inspection.report import InspectionReport
from detpass.rule import Treatment

MEANINGS: Mapping[Treatment, str] = {
    Treatment.SEGMENT: "stable sort and segment sum: repeats under detpass",
    Treatment.CLOSED_FORM: "index map known at compile time: repeats under detpass",
    Treatment.NATIVE: "torch's deterministic kernel, or yours in one configuration: repeats under detpass",
    Treatment.SAFE: "proved: repeats as it stands",
    Treatment.UNCOVERED: "no rule covers it: may differ from run to run",
}
KINDS: Mapping[str, str] = {
    "subject": "this node",
    "inserted": "in its place",
    "context": "around it",
    "input": "input",
    "elided": "not shown",
}
"""The kinds of boxes, with the words of the legend and of screen readers."""


@dataclass(frozen=True)
class Row:
    """One row of the table: records that agree in place, operator, phase and treatment."""

    first: InspectionRecord
    count: int
    where: str
    operator: str
    modules: tuple[str, ...]
    bytes: int
    size: str
    share: float
    before: Markup | None
    after: Markup | None


def as_html(report: InspectionReport) -> str:
    """The text of the HTML file."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    template = environment.from_string(_resource("report.html.j2"))
    counts = report.counts()
    return template.render(
        report=report,
        headline=headline(report),
        verdict=verdict(report),
        state=_state(report),
        totals=[(t.value, counts.get(t.value, 0), MEANINGS[t]) for t in Treatment],
        meanings={t.value: text for t, text in MEANINGS.items()},
        phases=sorted({record.phase for record in report.records}),
        rows=[_row(group) for group in grouped(report.records)],
        findings=[f for f in report.environment if f.level is not Level.OK],
        environment=report.environment,
        short_path=short_path,
        explained=explained,
        size=size,
        kinds=KINDS,
        style=Markup(_resource("report.css")),
        script=Markup(_resource("report.js")),
    )


def _state(report: InspectionReport) -> str:
    """The colour of the verdict: ``good`` only where all was read and nothing was found."""
    if report.found("remaining"):
        return "bad"
    if report.unread():
        return "unknown"
    return "fixed" if report.found() else "good"


def _row(group: list[InspectionRecord]) -> Row:
    first = group[0]
    moved = sum(record.bytes for record in group)
    return Row(
        first=first,
        count=len(group),
        where=short_path(first.location),
        operator=first.op.removesuffix(".default"),
        modules=tuple(dict.fromkeys(record.module for record in group if record.module)),
        bytes=moved,
        size=size(moved),
        share=sum(record.time_share for record in group),
        before=_svg(first.before, f"The graph around {first.op} before the rewrite"),
        after=_svg(first.after, f"The graph in the place of {first.op} after the rewrite"),
    )


def _svg(picture: Picture | None, title: str) -> Markup | None:
    if picture is None or not picture.nodes:
        return None
    drawing = place(picture)
    parts = [
        f'<svg class="graph" role="img" width="{drawing.width:.0f}" height="{drawing.height:.0f}" '
        f'viewBox="0 0 {drawing.width:.0f} {drawing.height:.0f}"><title>{escape(_told(picture, title))}</title>'
    ]
    parts += [f'<path class="edge" d="{_curve(points)}"/>' for points in drawing.paths]
    parts += [_heads(drawing)]
    parts += [_box(picture.nodes[box.node], box.x, box.y, box.width, box.height) for box in drawing.boxes]
    return Markup("".join([*parts, "</svg>"]))


def _told(picture: Picture, title: str) -> str:
    """The picture in words, for those who do not see it."""
    edges = "; ".join(f"{picture.nodes[a].label} to {picture.nodes[b].label}" for a, b in picture.edges)
    return f"{title}: {edges}" if edges else title


def _curve(points: tuple[tuple[float, float], ...]) -> str:
    (x, y), *rest = points
    text = f"M{x:.1f},{y:.1f}"
    for next_x, next_y in rest:
        if next_x == x:
            text += f"V{next_y:.1f}"
        else:
            middle = (y + next_y) / 2
            text += f"C{x:.1f},{middle:.1f} {next_x:.1f},{middle:.1f} {next_x:.1f},{next_y:.1f}"
        x, y = next_x, next_y
    return text


def _heads(drawing: Drawing) -> str:
    ends = dict.fromkeys(points[-1] for points in drawing.paths)
    return "".join(
        f'<path class="head" d="M{x - 4:.1f},{y - 7:.1f}L{x:.1f},{y:.1f}L{x + 4:.1f},{y - 7:.1f}Z"/>' for x, y in ends
    )


def _box(node: PictureNode, x: float, y: float, width: float, height: float) -> str:
    middle = x + width / 2
    lines = [(shortened(node.label), "label", y + (17 if node.detail else 25))]
    if node.detail:
        lines.append((shortened(node.detail), "detail", y + 32))
    texts = "".join(
        f'<text class="{kind}" x="{middle:.1f}" y="{at:.1f}">{escape(text)}</text>' for text, kind, at in lines
    )
    full = escape(f"{node.label} {node.detail} ({KINDS[node.kind]})")
    return (
        f'<g class="box {escape(node.kind)}"><title>{full}</title><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="6"/>{texts}</g>'
    )


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
