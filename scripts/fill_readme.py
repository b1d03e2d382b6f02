"""Put the measured tables of benchmarks/results between the markers of README.md: ``fill_readme.py [--check]``.

``<!-- table: NAME -->`` ... ``<!-- end of table -->`` is filled from ``benchmarks/results/NAME.json``. A table that was
never measured is left as it is. With ``--check`` nothing is written and the exit status is 1 when README is stale.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def accumulation(data: dict[str, Any]) -> str:
    """Geometric mean, best and worst cell over all dtypes for each thread count and rival."""
    lines = ["| threads | divided by | geometric mean | best | worst |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['threads']} | {row['rival']} | {row['geometric_mean']:.2f} | {row['best']:.2f} | {row['worst']:.2f} |"
        for row in data["summary"]
        if row["dtype"] == "all"
    ]
    where = data["machine"]
    cells = data["cells"]
    lines += [
        "",
        f"{len(cells)} cells: {len({tuple(cell['shape']) for cell in cells})} shapes, "
        f"{len({cell['distribution'] for cell in cells})} index distributions, "
        f"{len({cell['dtype'] for cell in cells})} dtypes; {where['cpu']}, {where['cores']} cores, torch "
        f"{where['torch']}.",
    ]
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {"cpu_accumulation": accumulation}


def filled(text: str, results: Path) -> str:
    """``text`` with each marked table replaced. Raises KeyError for a marker that names no known table."""

    def replace(match: re.Match[str]) -> str:
        path = results / f"{match[2]}.json"
        render = TABLES[match[2]]
        body = render(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else match[3]
        return match[1] + body + match[4]

    return MARKED.sub(replace, text)


def main() -> int:
    """Fill or check README.md."""
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = filled(before, ROOT / "benchmarks" / "results")
    if "--check" in sys.argv[1:]:
        return int(before != after)
    readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
