"""The catalogue is complete against torch's documentation, agrees with the rules, and answers the engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from detpass import user_kernels
from detpass.rule import Treatment
from detpass.rules import BUILTIN_RULES
from detpass.rules.catalogue import entries, hazard, markdown
from tests.rules.direct import node_of

aten = torch.ops.aten
ROOT = Path(__file__).parents[2]
RULES = {rule.name: rule for rule in BUILTIN_RULES}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def documented_operations() -> set[str]:
    text = torch.use_deterministic_algorithms.__doc__
    lists = text[text.index("will act") : text.index("In addition, several operations fill uninitialized memory")]
    return set(re.findall(r"\* :(?:class|func):`([\w.]+)`", lists))


def test_every_operation_that_torch_documents_has_a_row():
    documented = documented_operations()
    assert len(documented) > 40, "the documentation changed its form: this test no longer reads it"
    known = {name for entry in entries() for name in entry.documented}
    assert documented <= known, f"torch documents operations that the catalogue lacks: {sorted(documented - known)}"


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.what)
def test_a_row_names_a_rule_that_takes_its_operators(entry):
    if entry.rule is None:
        assert entry.treatment in (Treatment.SAFE, Treatment.UNCOVERED)
        assert entry.note, "says why it is safe, or what to do instead"
        return
    assert entry.treatment is not Treatment.UNCOVERED
    targets = {str(target) for target in RULES[entry.rule].targets}
    functional = {op for op in entry.ops if not re.search(r"_\.\w+$", op)}
    existing = {op for op in functional if _exists(op)}
    assert existing <= targets
    other_library = all(not op.startswith("aten.") for op in functional)
    assert existing or other_library, "no operator of this row exists in this torch"


def _exists(op: str) -> bool:
    if "." not in op:  # a higher-order operator
        return op in map(str, user_kernels.LAUNCHES)
    namespace, name, overload = op.split(".")
    return hasattr(getattr(getattr(torch.ops, namespace), name, None), overload)


def test_every_built_in_rule_has_its_targets_in_the_catalogue():
    listed = {(entry.rule, op) for entry in entries() for op in entry.ops}
    missing = {
        (rule.name, str(target))
        for rule in BUILTIN_RULES
        for target in rule.targets
        if (rule.name, str(target)) not in listed
    }
    # A plain value written twice leaves the same bits.
    assert missing <= {("scatter_last_write", "aten.scatter.value")}


def test_a_row_names_a_test_that_exists():
    missing = {entry.test for entry in entries() if entry.test and not (ROOT / entry.test).is_file()}
    assert not missing


def test_names_of_rows_are_unique():
    names = [entry.what for entry in entries()]
    assert len(names) == len(set(names))


HAZARDS = [
    (aten.cumsum.default, (torch.randn(4), 0), {}, {"cuda"}),
    (aten.cumsum.default, (torch.arange(4), 0), {}, set()),
    (aten.index_put.default, (torch.zeros(4), [torch.tensor([0, 0])], torch.ones(2), True), {}, {"cpu", "cuda"}),
    (aten.sort.stable, (torch.randn(4),), {"stable": True}, set()),
    (aten.sort.stable, (torch.randn(4),), {"stable": False}, {"cuda"}),
    (aten.bincount.default, (torch.tensor([1, 1]), torch.ones(2)), {}, {"cuda"}),
    (aten.bincount.default, (torch.tensor([1, 1]),), {}, set()),
    (aten.histogram.bin_ct, (torch.randn(4), 3), {"weight": torch.ones(4)}, {"cpu"}),
    (aten.add.Tensor, (torch.randn(4), 1), {}, set()),
]


@pytest.mark.parametrize(("target", "args", "kwargs", "devices"), HAZARDS, ids=[str(row[0]) for row in HAZARDS])
def test_hazard(target, args, kwargs, devices):
    node, _ = node_of(target, *args, **kwargs)
    assert {device.type for device in (CPU, CUDA) if hazard(node, device)} == devices


def test_an_uncovered_hazard_says_what_to_do_instead():
    node, _ = node_of(aten.bincount.default, torch.tensor([1, 1]), torch.ones(2))
    assert "index_add" in hazard(node, CUDA)


def test_the_page_of_operations_is_current():
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert markdown() in page, "run scripts/fill_operations.py"


def test_an_operation_that_torch_documents_anew_would_be_missed(monkeypatch):
    text = torch.use_deterministic_algorithms.__doc__
    added = text.replace("* :class:`torch.nn.MaxPool3d`", "* :func:`torch.shuffled_sum`\n* :class:`torch.nn.MaxPool3d`")
    assert added != text
    function = lambda: None  # noqa: E731  # something with a docstring of its own
    function.__doc__ = added
    monkeypatch.setattr(torch, "use_deterministic_algorithms", function)
    with pytest.raises(AssertionError, match="shuffled_sum"):
        test_every_operation_that_torch_documents_has_a_row()


def test_the_table_has_a_line_for_each_row():
    lines = markdown().splitlines()
    assert len(lines) == 2 + len(entries())
    assert all(line.count("|") == 7 for line in lines)
