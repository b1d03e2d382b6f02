"""The report as text, JSON and an exception."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import detpass
from detpass.errors import InspectionError, NondeterminismError
from detpass.inspection import GraphBreak, InspectionReport, TritonKernel, UnknownOp, Verdict
from detpass.inspection.render_html import as_html
from detpass.inspection.render_text import as_text, grouped
from detpass.rule import Treatment
from tests.inspection import models


@pytest.fixture(scope="module")
def report() -> InspectionReport:
    return detpass.inspect(models.Tower(depth=3), *models.tower_inputs())


@pytest.fixture(scope="module")
def clean() -> InspectionReport:
    model, arguments = models.clean()
    return detpass.inspect(model, *arguments)


@pytest.mark.parametrize("width", [60, 80, 100, 160, 240])
def test_text_fits_the_terminal_and_names_every_place(report: InspectionReport, width: int) -> None:
    text = as_text(report, width)
    assert max(map(len, text.splitlines())) <= width
    for record in report:
        pieces = record.op.removesuffix(".default").removeprefix("aten.").split("_")
        assert all(piece in text for piece in pieces)
        assert record.treatment.value in text
    for word in ("repeats", "differ", f":{models.line_of('index_add').rpartition(':')[2]}"):
        assert word in text


def test_str_is_that_text(report: InspectionReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    assert str(report) == as_text(report, 90)


def test_repeated_layers_share_a_row(report: InspectionReport) -> None:
    gathers = [group for group in grouped(report.records) if group[0].location == models.line_of("gather")]
    assert [len(group) for group in gathers] == [3]
    assert sum(map(len, grouped(report.records))) == len(report)


def test_json_has_every_record_and_reads_back(report: InspectionReport) -> None:
    body = json.loads(report.to_json())
    assert body["format"] == 1
    assert body["clean"] is False
    assert body["clean_after_rewrite"] is True
    assert (body["verdict"], body["verdict_after_rewrite"], body["unread"]) == ("nondeterministic", "clean", [])
    assert body["counts"] == report.counts()
    assert [item["node"] for item in body["records"]] == [record.node for record in report]
    assert {item["treatment"] for item in body["records"]} == {"segment"}
    assert body["graphs"][0]["kind"] == "joint"
    assert {finding["name"] for finding in body["environment"]} >= {
        "torch",
        "CUBLAS_WORKSPACE_CONFIG",
        "cuDNN benchmark",
    }


def test_iteration_and_filtering(report: InspectionReport) -> None:
    assert len(list(report)) == len(report) == sum(report.counts().values())
    assert report.nondeterministic == tuple(record for record in report if record.treatment is not Treatment.SAFE)
    assert report.remaining == ()


def test_raise_if_nondeterministic(report: InspectionReport, clean: InspectionReport) -> None:
    with pytest.raises(NondeterminismError, match=r"index_add.*segment") as caught:
        report.raise_if_nondeterministic()
    assert models.line_of("index_add") in str(caught.value)
    report.raise_if_nondeterministic(after_rewrite=True)
    clean.raise_if_nondeterministic()


def test_what_remains_raises_after_the_rewrite_too() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * 2

    report = detpass.inspect(broken, torch.randn(3))
    for after_rewrite in (False, True):
        with pytest.raises(NondeterminismError, match=r"nothing nondeterministic found\n1 not read.*\n.*graph break"):
            report.raise_if_nondeterministic(after_rewrite)


@pytest.fixture(scope="module")
def unread() -> InspectionReport:
    """A model with nothing nondeterministic in its graphs, whose lowered code could not be read."""
    model, arguments = models.clean()
    return replace(detpass.inspect(model, *arguments), lowered_note="not read: no triton")


def test_lowered_code_that_was_not_read_is_never_clean(unread: InspectionReport) -> None:
    assert unread.verdict() is unread.verdict("remaining") is Verdict.UNKNOWN
    assert unread.problems() == unread.problems("remaining") == ["lowered code not read: no triton"]
    for after_rewrite in (False, True):
        with pytest.raises(NondeterminismError, match=r"nothing nondeterministic found\n1 not read.*\n.*no triton"):
            unread.raise_if_nondeterministic(after_rewrite)
    assert "Unknown: nothing was found" in str(unread)
    assert "Not read: the lowered code." in str(unread)
    assert "Nothing here differs" not in str(unread)
    body = json.loads(unread.to_json())
    assert (body["verdict"], body["verdict_after_rewrite"]) == ("unknown", "unknown")
    assert (body["clean"], body["clean_after_rewrite"]) == (False, False)
    assert body["unread"] == ["lowered code not read: no triton"]
    page = as_html(unread)
    assert '<p class="verdict unknown"' in page
    assert "lowered code" in page


def test_what_was_found_counts_before_what_was_not_read(report: InspectionReport) -> None:
    both = replace(report, lowered_note="not read, as asked")
    assert both.verdict() is Verdict.NONDETERMINISTIC
    assert both.verdict("remaining") is Verdict.UNKNOWN
    assert "Not read: the lowered code." in " ".join(str(both).split())
    with pytest.raises(NondeterminismError, match=r"(?s)index_add.*not read.*Remedy"):
        both.raise_if_nondeterministic()


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("unknown_ops", (UnknownOp("shop.tally.default", 1, None),), "unknown operators"),
        ("triton_kernels", (TritonKernel("k", (), None, "its TTIR could not be made"),), "Triton kernels"),
        ("breaks", (GraphBreak("a call", "model.py:3", None),), "code outside the graphs"),
        ("incomplete", "needs data", "a part of the model"),
    ],
)
def test_whatever_was_not_read_is_named(clean: InspectionReport, field: str, value: Any, kind: str) -> None:
    partly = replace(clean, **{field: value})
    assert partly.verdict() is partly.verdict("remaining") is Verdict.UNKNOWN
    assert f"Not read: {kind}." in " ".join(str(partly).split())
    assert partly.problems("never") == []
    assert partly.verdict("never") is Verdict.CLEAN


def test_problems_know_their_words(report: InspectionReport) -> None:
    assert report.problems("never") == []
    with pytest.raises(InspectionError, match="expected one of"):
        report.problems("sometimes")


def test_a_clean_model_is_clean(clean: InspectionReport) -> None:
    assert list(clean) == []
    assert clean.problems() == clean.problems("remaining") == []
    assert "Nothing here differs" in str(clean)
    assert json.loads(clean.to_json())["clean"] is True


def test_integers_repeat_as_they_stand() -> None:
    def count(index: torch.Tensor) -> torch.Tensor:
        return torch.zeros(4, dtype=torch.int64).index_add(0, index, torch.ones_like(index))

    report = detpass.inspect(count, torch.tensor([0, 0, 1]))
    assert len(report) == 1
    assert report.nondeterministic == ()
    assert report.problems() == []


def test_modules_are_named_by_their_path() -> None:
    model = nn.Sequential(nn.ModuleDict({"inner": nn.Embedding(5, 3)})["inner"])
    (record,) = detpass.inspect(model, torch.tensor([1, 1, 2]))
    assert record.module == "0"
