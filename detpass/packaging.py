"""Ahead-of-time packages (AOTInductor) of exported programs, rewritten like what ``torch.compile`` compiles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from detpass import _torch_private
from detpass.backend import prepare
from detpass.errors import ConfigurationError, own_error


def aoti_compile_and_package(
    exported_program: torch.export.ExportedProgram,
    package_path: str | Path | None = None,
    *,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Compile an exported program with AOTInductor so that it gives the same bits in every run; returns the path.

    As ``torch._inductor.aoti_compile_and_package``, with detpass's rewrite: the loaded package gives the bits that
    ``torch.compile(model, backend="detpass")`` gives. ``options`` are those of the backend: detpass's own and any of
    Inductor's. :func:`detpass.last_report` is the program's report afterwards.

    A package for a CPU calls detpass's operators: ``import detpass`` before ``torch._inductor.aoti_load_package``, in
    a Python process. An exported program that trains holds its backward pass as operators (make it with ``make_fx``
    over ``torch.func.grad``); gradients do not flow through a package.

    Raises ConfigurationError for what is no ExportedProgram or an unknown option, UncoveredError for an operation
    that no rule covers.
    """
    if not isinstance(exported_program, torch.export.ExportedProgram):
        raise ConfigurationError(
            f"exported_program: expected a torch.export.ExportedProgram, found {type(exported_program).__name__}; "
            "make one with torch.export.export(model, args)"
        )
    tensors = pytree.tree_leaves((exported_program.example_inputs, exported_program.state_dict))
    plan = prepare(exported_program.graph_module, tensors, None, options)
    with plan.rule_set.operators_kept_whole():
        try:
            made = _torch_private.aoti_compile_and_package(exported_program, package_path, plan.patches)
        except Exception as error:  # the border: our own errors are unwrapped from torch's, everything else passes on
            cause = own_error(error)
            if cause is None:
                raise
            raise cause from None
    plan.remember()
    return made
