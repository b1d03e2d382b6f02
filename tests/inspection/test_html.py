"""The HTML report: complete, self-contained, and working in a browser (skipped, with the reason, where none is)."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import detpass
from detpass.inspection import InspectionReport
from detpass.inspection.render_html import as_html
from detpass.inspection.render_text import grouped
from tests.inspection import models

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def report() -> InspectionReport:
    model = models.Tower(depth=3)

    def step(ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        loss = model(ids, places)
        print("<script>alert('loss')</script>")
        counts = torch.zeros(4, dtype=torch.int64).index_put((places % 4,), torch.ones_like(places), accumulate=True)
        return loss + counts.sum()

    return detpass.inspect(step, *models.tower_inputs())


class References(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action", "poster") and value:
                self.found.append(value)
            if name == "id" and value:
                self.ids.append(value)


def test_the_page_fetches_nothing(report: InspectionReport) -> None:
    page = as_html(report)
    references = References()
    references.feed(page)
    assert all(value.startswith(("#", "data:")) for value in references.found), references.found
    assert "url(" not in page
    assert "@import" not in page
    assert len(references.ids) == len(set(references.ids))


def test_every_record_is_there_and_texts_are_escaped(report: InspectionReport) -> None:
    page = as_html(report)
    for record in report:
        assert html.escape(record.op.removesuffix(".default")) in page
        assert html.escape(record.reason, quote=True).replace("&#x27;", "&#39;") in page
    assert page.count("<tbody data-where") == len(grouped(report.records))
    assert "<script>alert(" not in page
    assert "&lt;script&gt;alert(" in page
    assert page.count("<svg") == page.count("</svg>") >= 2 * len(grouped(report.records)) - 1


PROBE = """
<script>
addEventListener("load", () => {
  const result = {};
  const run = (name, body) => { try { result[name] = body(); } catch (error) { result[name] = "error: " + error; } };
  const rows = () => [...document.querySelectorAll("#table tbody")];
  const shown = () => rows().filter((row) => !row.hidden).length;
  run("rows", () => rows().length);
  run("closed", () => rows().every((row) => row.querySelector("tr.detail").hidden));
  run("opened", () => {
    const button = rows()[0].querySelector("button.open");
    button.focus();
    button.click();
    const detail = rows()[0].querySelector("tr.detail");
    return document.activeElement === button && !detail.hidden && button.getAttribute("aria-expanded") === "true"
      && detail.id === button.getAttribute("aria-controls");
  });
  run("search", () => {
    const search = document.getElementById("search");
    search.value = "embedding tokens";
    search.dispatchEvent(new Event("input", { bubbles: true }));
    const found = shown();
    search.value = "";
    search.dispatchEvent(new Event("input", { bubbles: true }));
    return [found, shown(), document.getElementById("shown").textContent];
  });
  run("filter", () => {
    const box = document.querySelector('input[name="treatment"][value="segment"]');
    box.click();
    const without = shown();
    box.click();
    return [without, shown()];
  });
  run("sort", () => {
    const head = document.querySelector('th[data-key="bytes"]');
    const order = () => rows().map((row) => Number(row.dataset.bytes));
    head.querySelector("button").click();
    const down = [head.getAttribute("aria-sort"), order()];
    head.querySelector("button").click();
    return [down, [head.getAttribute("aria-sort"), order()]];
  });
  run("zoom", () => {
    document.getElementById("expand").click();
    const canvas = document.querySelector(".canvas");
    const box = () => canvas.querySelector("svg").getAttribute("viewBox").split(" ").map(Number);
    const start = box();
    const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    press("+");
    const closer = box();
    press("ArrowRight");
    const moved = box();
    canvas.closest("figure").querySelector('[data-zoom="fit"]').click();
    return [closer[2] < start[2], moved[0] > closer[0], JSON.stringify(box()) === JSON.stringify(start)];
  });
  run("pictures", () => [...document.querySelectorAll(".canvas svg")].map((svg) => {
    const boxes = [...svg.querySelectorAll(".box")].map((group) => {
      const outer = group.querySelector("rect").getBoundingClientRect();
      return [...group.querySelectorAll("text")].every((text) => {
        const inner = text.getBoundingClientRect();
        return inner.left >= outer.left - 1 && inner.right <= outer.right + 1 && inner.bottom <= outer.bottom + 1;
      });
    });
    return boxes.every(Boolean);
  }));
  const channel = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const canvas2d = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas2d.clearRect(0, 0, 1, 1);
    canvas2d.fillStyle = color;
    canvas2d.fillRect(0, 0, 1, 1);
    return [...canvas2d.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => 0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255);
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = rgba(getComputedStyle(at).backgroundColor);
      if (color[3] > 250) return color;
    }
    return [255, 255, 255];
  };
  const contrast = () => {
    let worst = [99, ""];
    for (const element of document.querySelectorAll("main *, header *")) {
      const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
      if (!own || !element.getClientRects().length || element.closest("svg")) continue;
      const value = ratio(rgba(getComputedStyle(element).color), behind(element));
      if (value < worst[0]) worst = [value, `${element.tagName} ${element.textContent.slice(0, 40)}`];
    }
    for (const text of document.querySelectorAll("svg .box text")) {
      const back = rgba(getComputedStyle(text.parentElement.querySelector("rect")).fill);
      const value = back[3] ? ratio(rgba(getComputedStyle(text).fill), back) : 99;
      if (value < worst[0]) worst = [value, "svg " + text.textContent];
    }
    return worst;
  };
  const theme = document.getElementById("theme");
  run("themes", () => {
    const found = {};
    for (const _ of [0, 1]) {
      found[theme.textContent] = [...contrast(), getComputedStyle(document.body).backgroundColor];
      theme.click();
    }
    return found;
  });
  run("named", () => [...document.querySelectorAll("button, input, [tabindex='0']")].filter((element) =>
    !(element.textContent.trim() || element.getAttribute("aria-label") || element.closest("label"))).length);
  run("overflow", () => document.documentElement.scrollWidth <= document.documentElement.clientWidth);
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(result);
  document.body.append(out);
});
</script>
</body>
"""


def probe(page: str, folder: Path, width: int = 1280) -> dict[str, Any]:
    """Open the page in a browser, use it, and return what was seen."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", PROBE), encoding="utf-8")
    done = subprocess.run(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900",
         "--virtual-time-budget=10000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    match = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(match[1]))
    assert not [value for value in found.values() if isinstance(value, str) and value.startswith("error")], found
    return found


@needs_browser
def test_the_page_works_in_a_browser(report: InspectionReport, tmp_path: Path) -> None:
    rows = grouped(report.records)
    found = probe(as_html(report), tmp_path)
    assert found["rows"] == len(rows)
    assert found["closed"] is True
    assert found["opened"] is True
    assert found["search"] == [1, len(rows), f"{len(rows)} of {len(rows)} rows"]
    others = sum(group[0].treatment is not detpass.Treatment.SEGMENT for group in rows)
    assert found["filter"] == [others, len(rows)]
    assert others > 0
    sizes = sorted(sum(record.bytes for record in group) for group in rows)
    assert found["sort"] == [["descending", sizes[::-1]], ["ascending", sizes]]
    assert found["zoom"] == [True, True, True]
    assert all(found["pictures"])
    assert len(found["pictures"]) >= len(rows)
    assert found["named"] == 0
    assert found["overflow"] is True


@needs_browser
def test_both_themes_are_readable(report: InspectionReport, tmp_path: Path) -> None:
    themes = probe(as_html(report), tmp_path)["themes"]
    assert set(themes) == {"Dark", "Light"}
    for worst, where, _ in themes.values():
        assert worst >= 4.5, where
    assert themes["Dark"][2] != themes["Light"][2]


@needs_browser
def test_a_narrow_window_does_not_scroll_sideways(report: InspectionReport, tmp_path: Path) -> None:
    assert probe(as_html(report), tmp_path, width=520)["overflow"] is True


@needs_browser
def test_a_clean_report_opens_too(tmp_path: Path) -> None:
    model, arguments = models.clean()
    page = as_html(detpass.inspect(model, *arguments))
    path = tmp_path / "page.html"
    path.write_text(page)
    assert "No nondeterministic operation was found" in page
    shot = tmp_path / "shot.png"
    subprocess.run(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}", path.as_uri()],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    assert shot.stat().st_size > 10_000
