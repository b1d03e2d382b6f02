"""An inspection's report for a terminal: totals, one row for each place and operator, then what stands beside.

Nodes that agree in place, operator, phase and treatment share a row with a count. :func:`renderables` serves the
command line with colours; :func:`as_text` is plain text of the terminal's width.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterator

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from detpass.environment import Level
from detpass.inspection.records import InspectionRecord
from detpass.inspection.report import InspectionReport
from detpass.rule import Treatment

STYLES = {
    Treatment.SEGMENT: "green",
    Treatment.CLOSED_FORM: "green",
    Treatment.NATIVE: "green",
    Treatment.SAFE: "cyan",
    Treatment.UNCOVERED: "bold red",
}
MIN_WIDTH = 60
TABLE_WIDTH = 100


def as_text(report: InspectionReport, width: int | None = None) -> str:
    """The report as plain text, at most ``width`` (the terminal's) columns wide."""
    columns = max(MIN_WIDTH, width if width is not None else shutil.get_terminal_size((120, 24)).columns)
    stream = io.StringIO()
    console = Console(file=stream, width=columns, no_color=True, highlight=False, color_system=None)
    for part in renderables(report, columns):
        console.print(part)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def renderables(report: InspectionReport, width: int) -> Iterator[RenderableType]:
    """The parts of the report, in order, for a console ``width`` columns wide."""
    yield Text(headline(report), style="bold")
    if report.records:
        yield _records(report, width)
    yield from _section("Outside the graphs", [str(item) for item in report.breaks], "yellow")
    if report.incomplete:
        yield from _section("Not seen", [report.incomplete], "bold red")
    yield from _section("Unknown operators", [str(item) for item in report.unknown_ops], "yellow")
    yield from _section("Triton kernels", [str(item) for item in report.triton_kernels], "")
    yield from _section("Left in the lowered code", [str(item) for item in report.lowered], "bold red")
    yield from _section("Lowered code", [report.lowered_note] if report.lowered_note else [], "yellow")
    yield from _section("Notes", list(report.notes), "")
    warnings = [f"{f.name}: {f.value}. {f.advice}" for f in report.environment if f.level is not Level.OK]
    yield from _section("Environment", warnings, "yellow")
    yield Text(verdict(report), style="bold")


def headline(report: InspectionReport) -> str:
    """Subject, target and totals in one line."""
    nodes = sum(graph.nodes for graph in report.graphs)
    counts = report.counts()
    found = ", ".join(f"{counts[str(t)]} {t}" for t in Treatment if str(t) in counts)
    totals = found or "no nondeterministic operation"
    graphs = f"{len(report.graphs)} graph{'s' if len(report.graphs) != 1 else ''}"
    return f"{report.subject} on {report.target}: {graphs}, {nodes} operators; {totals} ({report.seconds:.1f} s)"


def verdict(report: InspectionReport) -> str:
    """What to conclude, in one or two sentences."""
    found, left, unread = report.found("nondeterministic"), report.found("remaining"), report.unread()
    if left:
        said = f"detpass does not make all of it repeat: {len(left)} left (uncovered or in the lowered code)."
    elif found:
        what = "what was found repeats" if unread else "repeats"
        said = f'May differ from run to run as it stands; {what} with torch.compile(model, backend="detpass").'
    elif unread:
        said = "Unknown: nothing was found that differs from run to run, but not everything was read."
    else:
        said = "Nothing here differs from run to run."
    return f"{said} Not read: {', '.join(_unread_kinds(report))}." if unread else said


def _unread_kinds(report: InspectionReport) -> list[str]:
    kinds = {
        "the lowered code": report.lowered_note is not None,
        "a part of the model": report.incomplete is not None,
        "code outside the graphs": bool(report.breaks),
        "unknown operators": bool(report.unknown_ops),
        "Triton kernels": any(kernel.unread for kernel in report.triton_kernels),
    }
    return [kind for kind, unread in kinds.items() if unread]


def explained(record: InspectionRecord) -> str:
    """A record's reason; said beside it, when the node repeats on this device without its rewrite."""
    rewritten = record.repeats and record.treatment is not Treatment.SAFE
    return f"{record.reason} (repeats on {record.device} as it stands)" if rewritten else record.reason


def grouped(records: tuple[InspectionRecord, ...]) -> list[list[InspectionRecord]]:
    """Records that agree in place, operator, phase, treatment and rule, in order of first appearance."""
    groups: dict[tuple[object, ...], list[InspectionRecord]] = {}
    for record in records:
        key = (record.location, record.op, record.phase, record.treatment, record.rule, record.reason)
        groups.setdefault(key, []).append(record)
    return list(groups.values())


def short_path(location: str | None) -> str:
    """``file:line`` relative to the working directory where that is shorter."""
    if location is None:
        return "-"
    relative = os.path.relpath(location)
    return relative if len(relative) < len(location) else location


def size(count: int) -> str:
    """Bytes in a readable unit."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _records(report: InspectionReport, width: int) -> Table:
    """A table, or below ``TABLE_WIDTH`` columns a list of the same cells."""
    if width < TABLE_WIDTH:
        return _list(report, width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, width=width)
    inner = width - 45  # the columns of fixed width and the gaps
    names = inner * 3 // 10
    table.add_column("where", width=names, overflow="fold")
    table.add_column("operator", width=names, overflow="fold")
    table.add_column("treatment", width=11, no_wrap=True)
    table.add_column("why", ratio=1, overflow="fold")
    table.add_column("bytes", justify="right", width=8, no_wrap=True)
    table.add_column("time", justify="right", width=6, no_wrap=True)
    for group in grouped(report.records):
        first = group[0]
        why = Text(explained(first))
        if first.rule:
            why.append(f"\n{first.rule}", style="dim")
        table.add_row(
            Text(foldable(short_path(first.location), names)).append(_modules(group), style="dim"),
            Text(foldable(first.op.removesuffix(".default"), names)).append(f"\n{_what(group)}", style="dim"),
            Text(str(first.treatment), style=STYLES[first.treatment]),
            why,
            Text(size(sum(record.bytes for record in group))),
            Text(f"{100 * sum(record.time_share for record in group):.1f}%"),
        )
    return table


def _list(report: InspectionReport, width: int) -> Table:
    table = Table.grid(padding=(0, 0))
    table.add_column(width=width, overflow="fold")
    for group in grouped(report.records):
        first = group[0]
        table.add_row(Text(foldable(short_path(first.location), width)).append(_modules(group), style="dim"))
        table.add_row(Text(foldable(f"  {first.op.removesuffix('.default')}", width)))
        table.add_row(Text(f"  {_what(group)}", style="dim"))
        rule = f" by {first.rule}" if first.rule else ""
        table.add_row(Text(f"  {first.treatment}{rule}: ", style=STYLES[first.treatment]).append(explained(first)))
        table.add_row("")
    return table


def _modules(group: list[InspectionRecord]) -> str:
    paths = [record.module for record in group if record.module]
    return f"\n{paths[0]}{f' +{len(group) - 1}' if len(group) > 1 else ''}" if paths else ""


def _what(group: list[InspectionRecord]) -> str:
    return f"{group[0].phase}{f' x{len(group)}' if len(group) > 1 else ''}, {group[0].result}"


def foldable(name: str, width: int) -> str:
    """A name with line breaks after ``_`` or ``/`` so that no line is longer than ``width`` where possible."""
    lines, current = [], ""
    for piece in re.findall(r"[^_/]*[_/]?", name):
        if current and len(current) + len(piece) > width:
            lines.append(current)
            current = ""
        current += piece
    return "\n".join([*lines, current])


def _section(title: str, lines: list[str], style: str) -> Iterator[RenderableType]:
    if not lines:
        return
    yield Text(title, style="bold")
    for line in lines:
        yield Padding(Text(line, style=style), (0, 0, 0, 2))
