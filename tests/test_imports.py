"""Who may import whom: the table of docs/architecture.md, held against every import statement of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "detpass"

LOW = {"errors", "config", "constant_tables", "ttir", "ttir_configurations"}
PRIVATE = {
    "_torch_private",
    "_torch_private_breaks",
    "_torch_private_capture",
    "_torch_private_cuda",
    "_torch_private_guard",
    "_torch_private_triton",
}
NODES = {"rule", "graph_query"}
ENGINE = {"rewriting", "rules", "segment", "proofs", "escapes", "torch_faults", "user_kernels", *LOW, *PRIVATE, *NODES}
TOP = {"backend", "packaging", "inspection", "reproducibility", "environment", "escapes"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "constant_tables": {"errors", "_torch_private"},
    "_torch_private": {"errors"},
    "_torch_private_breaks": {"errors", "_torch_private"},
    "_torch_private_capture": {"errors", "_torch_private"},
    "_torch_private_cuda": {"errors", "_torch_private", "_torch_private_capture", "_torch_private_guard"},
    "_torch_private_guard": {"errors"},
    "_torch_private_triton": {"errors", "_torch_private"},
    "ttir": set(),
    "ttir_configurations": {"ttir"},
    "user_kernels": {"errors", "ttir", "ttir_configurations", *PRIVATE},
    "segment": {"errors", "_torch_private"},
    "rule": {"errors"},
    "graph_query": {"errors"},
    "proofs": {"errors", *NODES},
    "rules": {"errors", "constant_tables", "segment", "proofs", "user_kernels", *NODES},
    "rewriting": {"errors", "config", *PRIVATE, *NODES},
    "escapes": {"errors", "config", *PRIVATE},
    "torch_faults": {"errors", "graph_query", *PRIVATE},
    "backend": ENGINE,
    "packaging": ENGINE | {"backend"},
    "environment": {"errors", "config", *PRIVATE},
    "inspection": ENGINE | {"backend", "environment"},
    "reproducibility": ENGINE | {"backend"},
    "cli": ENGINE | TOP,
    "__main__": {"cli"},
    "__init__": ENGINE | TOP,
}
"""Unit (a module or folder of the package): the other units it may import."""


def unit_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def imports(source: str) -> Iterator[tuple[int, str]]:
    """The modules named by import statements, those inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            assert node.module is not None
            # "from detpass import rules" names the units; "from torch import fx" may name a submodule.
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def unit_imported(module: str, units: set[str]) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "detpass" and len(parts) > 1 and parts[1] in units else None


FILES = sorted(PACKAGE.rglob("*.py"))
UNITS = {unit_of(path) for path in FILES}


def test_the_table_knows_every_unit() -> None:
    assert ALLOWED.keys() == UNITS


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_import_directions(path: Path) -> None:
    own = unit_of(path)
    wrong = [
        f"line {line}: {own} imports {unit}"
        for line, module in imports(path.read_text(encoding="utf-8"))
        if (unit := unit_imported(module, UNITS)) is not None and unit != own and unit not in ALLOWED[own]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_torch_imports_stand_in_one_place(path: Path) -> None:
    if unit_of(path) in PRIVATE:
        return
    found = {
        f"line {line}: {module}"
        for line, module in imports(path.read_text(encoding="utf-8"))
        if module.startswith("torch.")
        and any(part.startswith("_") for part in module.split("."))
        # Functions that torch documents although their module has an underscore.
        and not module.startswith(("torch.utils._pytree", "torch.__version__"))
    }
    assert not found, "private names of torch belong into _torch_private.py:\n" + "\n".join(sorted(found))


def test_the_check_sees_imports_of_every_form() -> None:
    source = "import detpass.rules\ndef f():\n    from detpass import backend\n    from detpass.segment.ops import x\n"
    units = {unit_imported(module, UNITS) for _, module in imports(source)}
    assert {"rules", "backend", "segment"} <= units
