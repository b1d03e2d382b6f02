"""Write docs/operations.md from the catalogue of operators: ``fill_operations.py [--check]``.

With ``--check`` nothing is written and the exit status is 1 when the file is stale.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from detpass.rules.catalogue import markdown  # noqa: E402  # the checkout's, whatever is installed

PAGE = ROOT / "docs" / "operations.md"
HEAD = """# Operations

Every operation that is known to be nondeterministic in torch 2.11 to 2.14, on which device, why, and what becomes of it
under detpass (the treatments are those of the [guide](guide.md)). `detpass rules` prints the same table.

This page is generated: run `scripts/fill_operations.py` after a change of `detpass/rules/catalogue_rows.py` or
`catalogue_notes.py`.

"""


def main(arguments: list[str]) -> int:
    text = HEAD + markdown()
    if arguments == ["--check"]:
        return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
