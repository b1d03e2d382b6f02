"""Graphs that a user already has: exported programs, printed graphs, saved graph modules. Files are read as data.

``exported.py`` reads ``.pt2`` archives, ``printed.py`` the ``fx_graph_readable.py`` and ``fx_graph_runnable.py`` of
``TORCH_COMPILE_DEBUG`` and ``TORCH_TRACE``; ``statements.py`` builds FX graphs for both.
"""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from detpass.errors import InspectionError
from detpass.inspection.inputs import exported, printed

KNOWN = "a .pt2 file of torch.export.save, an fx_graph_readable.py or fx_graph_runnable.py, or a saved fx.GraphModule"


@dataclass(frozen=True)
class Program:
    """A graph of ATen operators whose joint graph is still to be traced, with fake inputs."""

    graph_module: fx.GraphModule
    inputs: tuple[Any, ...]


def from_object(subject: Any) -> Any:
    """A :class:`Program` for a ``torch.export`` program; anything else as it is."""
    if isinstance(subject, torch.export.ExportedProgram):
        return Program(*exported.from_program(subject))
    return subject


def from_file(path: Path, allow_pickle: bool) -> Any:
    """What the file ``path`` holds: a :class:`Program`, or an ``fx.GraphModule`` after AOTAutograd, or a saved module.

    Nothing in the file is executed, unless ``allow_pickle`` says that it may be. Raises InspectionError for anything
    else, naming what was expected.
    """
    if not path.is_file():
        raise InspectionError(f"file {str(path)!r} not found; expected {KNOWN}")
    if path.suffix == ".py":
        return printed.read(path)
    if not zipfile.is_zipfile(path):
        raise InspectionError(f"{path} is neither Python text nor a zip archive; expected {KNOWN}")
    with zipfile.ZipFile(path) as archive:
        if exported.model_entry(archive) is not None:
            return Program(*exported.from_archive(archive, path))
        if not any(name.endswith("data.pkl") for name in archive.namelist()):
            raise InspectionError(f"{path} is a zip archive of something else; expected {KNOWN}")
    return _unpickled(path, allow_pickle)


def _unpickled(path: Path, allow_pickle: bool) -> Any:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        raise InspectionError(
            f"{path} is a pickle, and loading it runs code that it holds. If you trust the file as you trust a "
            "program, say so: detpass inspect --allow-pickle, or Settings(allow_pickle=True)"
        ) from error
    if isinstance(loaded, (fx.GraphModule, torch.nn.Module)):
        return loaded
    raise InspectionError(f"{path} holds a {type(loaded).__name__} (weights, perhaps), no graph; expected {KNOWN}")
