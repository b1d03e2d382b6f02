"""Ledgers: the first step and tensor at which two trainings part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from detpass.errors import BitsDifferError, ConfigurationError
from detpass.reproducibility import Ledger
from detpass.reproducibility.ledger import read


def train(ledger: Ledger, steps: range, disturb_at: int | None = None) -> None:
    """A small training; from ``disturb_at`` on, one parameter is one ulp off."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps.stop):
        optimizer.zero_grad()
        loss = model(torch.full((3, 4), float(step))).square().mean()
        loss.backward()
        optimizer.step()
        if step == disturb_at:
            with torch.no_grad():
                bias = model[2].bias
                bias.copy_(torch.nextafter(bias, bias + 1))
        if step in steps:
            ledger.record(step, loss=loss, model=model, optimizer=optimizer)


def test_equal_trainings_have_equal_ledgers(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(Ledger(tmp_path / name), range(4))
    assert Ledger.compare(tmp_path / "a", tmp_path / "b") is None
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_first_step_and_tensor_are_found(tmp_path: Path) -> None:
    train(Ledger(tmp_path / "a"), range(6))
    train(Ledger(tmp_path / "b"), range(6), disturb_at=2)
    difference = Ledger.compare(tmp_path / "a", tmp_path / "b")
    assert difference is not None
    assert (difference.step, difference.names) == (2, ("model.2.bias",))
    assert str(difference) == "step 2: other bits in model.2.bias"


def test_loss_gradients_parameters_and_momentum_are_recorded(tmp_path: Path) -> None:
    train(Ledger(tmp_path / "a"), range(1))
    names = read(tmp_path / "a")[0]
    assert {"loss", "grad.0.weight", "model.0.weight", "optimizer.state.0.momentum_buffer"} <= names.keys()


def test_a_ledger_is_continued(tmp_path: Path) -> None:
    train(Ledger(tmp_path / "whole"), range(5))
    train(Ledger(tmp_path / "parts"), range(3))
    resumed = Ledger(tmp_path / "parts")
    assert resumed.steps == (0, 1, 2)
    train(resumed, range(3, 5))
    assert Ledger.compare(tmp_path / "whole", tmp_path / "parts") is None


def test_repeating_over_a_ledger_checks_it_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    train(Ledger(path), range(4))
    before = path.read_bytes()
    train(Ledger(path), range(4))
    assert path.read_bytes() == before
    with pytest.raises(BitsDifferError, match=r"at step 3: other bits in model\.2\.bias"):
        train(Ledger(path), range(4), disturb_at=3)
    assert path.read_bytes() == before


def test_an_incomplete_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a"
    train(Ledger(path), range(3))
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert sorted(read(path)) == [0, 1]
    train(Ledger(path), range(3))
    assert path.read_bytes() == whole


def test_a_missing_step_or_entry_is_a_difference(tmp_path: Path) -> None:
    a, b, c = (Ledger(tmp_path / name) for name in "abc")
    a.record(0, x=torch.ones(1))
    a.record(1, x=torch.ones(1))
    b.record(0, x=torch.ones(1))
    c.record(0, x=torch.ones(1), y=torch.ones(1))
    assert "recorded only in" in str(Ledger.compare(tmp_path / "a", tmp_path / "b"))
    found = Ledger.compare(tmp_path / "b", tmp_path / "c")
    assert found is not None
    assert found.names == ("y",)


def test_nothing_to_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nothing to record at step 4"):
        Ledger(tmp_path / "a").record(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no complete line"),
        ("hello\n", "line 1: not a ledger's line"),
        ("{}\n", "ledger format None found, 1 expected"),
        (json.dumps({"detpass_ledger": 99}) + "\n", "ledger format 99 found"),
        (json.dumps({"detpass_ledger": 1}) + '\n{"a": 1}\n', "line 2: expected a step"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read(path)
