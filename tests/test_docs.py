"""Every Python block in README and docs runs, every link leads somewhere, tables are current."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def python_source(text: str) -> str:
    """The Python blocks of a document as one script in which each line keeps its number."""
    lines = [""] * (text.count("\n") + 1)
    for block in FENCE.finditer(text):
        if block[1] == "python":
            start = text.count("\n", 0, block.start(2))
            for offset, line in enumerate(block[2].splitlines()):
                lines[start + offset] = line
    return "\n".join(lines)


def identifier(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_blocks_keep_their_lines() -> None:
    assert python_source("a\n```python\nx = 1\n```\nb\n```bash\nls\n```\n").splitlines()[2] == "x = 1"
    assert "ls" not in python_source("```bash\nls\n```\n")


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if "```python" in path.read_text(encoding="utf-8")], ids=identifier
)
def test_code_blocks_run(document: Path, tmp_path: Path) -> None:
    # From a file, so that tracebacks, inspect.getsource and the report's locations have lines to point at.
    script = tmp_path / f"{document.stem}.py"
    script.write_text(python_source(document.read_text(encoding="utf-8")), encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("document", DOCUMENTS, ids=identifier)
def test_links_lead_somewhere(document: Path) -> None:
    targets = LINK.findall(document.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert not missing


def test_fences_name_their_language() -> None:
    for document in DOCUMENTS:
        languages = [block[1] for block in FENCE.finditer(document.read_text(encoding="utf-8"))]
        assert set(languages) <= {"python", "text", "bash"}, f"{document}: {languages}"


def test_readme_holds_the_stored_measurements() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "fill_readme.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run scripts/fill_readme.py"
