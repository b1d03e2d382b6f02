"""What is left in the code that Inductor makes of a model after the rewrite.

For the CPU, the rewritten graphs go through Inductor's lowering up to its scheduler, where
``rewriting/lowering_audit.py`` reads them; no code is generated, compiled or run. A joint graph is lowered whole,
before it is cut into forward and backward. For CUDA, ``cuda_code.py`` generates the text that a GPU would run.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from detpass import _torch_private, _torch_private_capture, rules
from detpass.backend import FIXED_SETTINGS
from detpass.config import Options
from detpass.graph_query import source_location
from detpass.inspection.cuda_code import CudaSettings, cuda_code_with
from detpass.inspection.records import LoweredFinding
from detpass.rewriting.lowering_audit import Finding, findings


class _Read(BaseException):
    """Leaves Inductor, which catches every Exception, once the scheduler's nodes have been read."""


def cpu_findings(graph_modules: Iterable[fx.GraphModule]) -> list[LoweredFinding]:
    """Lower each graph for the CPU and list what is nondeterministic in it.

    The graphs have fake CPU tensors in ``meta["val"]`` and are left as they are. Raises Inductor's own error for a
    graph that it cannot lower.
    """
    options = Options(on_uncovered="ignore", target="cpu")
    found: list[LoweredFinding] = []
    for graph_module in graph_modules:
        found += [_describe(finding) for finding in _read(graph_module, options)]
    return found


def cuda_findings(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, capability: int, dynamic: bool | None
) -> list[LoweredFinding]:
    """Generate the CUDA code of ``target(*args, **kwargs)`` under detpass and list what is nondeterministic in it.

    Raises InspectionError where no code can be generated.
    """
    settings = CudaSettings(backend="detpass", dynamic=dynamic, capability=capability, compile_kernels=False)
    code = cuda_code_with(settings, target, args, kwargs)
    said = [f"{a.operation} by atomics in kernel {a.kernel} of {a.graph}" for a in code.float_atomics]
    said += [f"{a.operation}, a lock or an atomic made by hand, in kernel {a.kernel} of {a.graph}" for a in code.locks]
    said += [f"look-back scan in kernel {s.kernel} of {s.graph}" for s in code.float_scans]
    found = [LoweredFinding(text, (), None) for text in said]
    calls = code.nondeterministic_externs
    return found + [LoweredFinding(f"call in {c.graph}: {c.hazard}", (c.operator,), None) for c in calls]


def _read(graph_module: fx.GraphModule, options: Options) -> list[Finding]:
    read: list[Finding] = []

    def reader(nodes: list[Any]) -> Any:
        read.extend(findings(nodes, rules.hazard, options))
        raise _Read

    inputs = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    settings = _torch_private.inductor_settings()
    patches = {name: value for name, value in FIXED_SETTINGS.items() if name in settings}
    patches["_pre_fusion_custom_pass"] = reader
    with (
        torch.random.fork_rng(devices=[]),
        _torch_private_capture.isolated_compile(),
        _torch_private_capture.quiet_compile(),
        contextlib.suppress(_Read),
    ):
        _torch_private_capture.lower(_copied(graph_module), inputs, patches)
    return read


def _copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph, and of the graphs nested in it, whose constants are shared."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, copies))
    for old, new in copies.items():
        new.meta = copy.copy(old.meta)
    copied = fx.GraphModule(graph_module, graph)
    for name, child in list(copied.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, _copied(child))
    return copied


def _describe(finding: Finding) -> LoweredFinding:
    places = [place for node in finding.origins if (place := source_location(node)) is not None]
    ops = tuple(sorted({str(node.target) for node in finding.origins}))
    return LoweredFinding(finding.what, ops, places[0] if places else None)
