"""The catalogue of nondeterministic operators for people: found by any part of a name, explained with the rule's words.

The rows themselves stand in ``detpass/rules/catalogue.py``.
"""

from __future__ import annotations

from detpass.errors import ConfigurationError
from detpass.rules import BUILTIN_RULES
from detpass.rules.catalogue import CPU, CUDA, Entry, entries


def find(op: str | None = None, device: str | None = None) -> list[Entry]:
    """The rows whose operator has ``op`` in one of its names and that matter on ``device``; all by default.

    Raises ConfigurationError for another device, and for an operator that no row names.
    """
    if device not in (None, CPU, CUDA):
        raise ConfigurationError(f"device {device!r}: expected {CPU!r} or {CUDA!r}")
    found = [entry for entry in entries() if device is None or device in entry.devices]
    if op is None:
        return found
    part = op.lower().removeprefix("torch.ops.").removesuffix(".default")
    named = [e for e in found if any(part in name.lower() for name in (e.what, *e.ops, *e.documented))]
    if not named:
        where = f" on {device}" if device else ""
        raise ConfigurationError(
            f"the catalogue lists no operator {op!r}{where}: as far as is known it repeats. `detpass rules` shows all "
            "that it lists"
        )
    return named


def explained(entry: Entry) -> dict[str, str]:
    """A row in words, by heading; headings with nothing to say are left out."""
    lines = {
        "on": ", ".join(entry.devices),
        "why": entry.why,
        "treatment": str(entry.treatment),
        "rule": _rule(entry.rule),
        "note": entry.note,
        "in graphs": ", ".join(name.removesuffix(".default") for name in entry.ops),
        "documented": ", ".join(entry.documented),
        "shown by": entry.test or "",
    }
    return {heading: text for heading, text in lines.items() if text}


def as_data(entry: Entry) -> dict[str, object]:
    """A row as plain data for JSON."""
    return {
        "what": entry.what,
        "ops": list(entry.ops),
        "devices": list(entry.devices),
        "why": entry.why,
        "treatment": str(entry.treatment),
        "rule": entry.rule,
        "note": entry.note,
        "documented": list(entry.documented),
        "test": entry.test,
    }


def _rule(name: str | None) -> str:
    """The rule's name with the first paragraph of its documentation."""
    for rule in BUILTIN_RULES:
        if rule.name == name:
            first = (type(rule).__doc__ or "").strip().split("\n\n")[0].removesuffix("::")
            return f"{name}: {' '.join(first.split())}" if first else rule.name
    return name or ""
