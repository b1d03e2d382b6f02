"""The ``torch.compile`` backend: puts the rules and the engine into Inductor's own pipeline.

``torch.compile(model, backend="detpass")`` finds :func:`detpass` by the entry point group ``torch_dynamo_backends``.
The rewrite is added beside the user's own passes as ``joint_custom_post_pass``; the lowered code is checked by
``_pre_fusion_custom_pass``. Both have a ``uuid``, so Inductor's and AOTAutograd's caches keep working.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from detpass import _torch_private, escapes, rules, segment, torch_faults, user_kernels
from detpass.config import Options, split_options
from detpass.errors import own_error
from detpass.graph_query import source_location
from detpass.rewriting.graph_pass import Rewriter
from detpass.rewriting.lowering_audit import LoweringAudit
from detpass.rewriting.registry import RuleSet, registered_rules
from detpass.rewriting.report import Report, load, save
from detpass.torch_faults import TorchFaults

log = logging.getLogger(__name__)

FIXED_SETTINGS: Mapping[str, Any] = {
    "deterministic": True,
    "use_joint_graph_passes": True,
    "partitioned_scatter_enabled": False,
    "cpp.enable_unsafe_math_opt_flag": False,
}
"""Inductor settings that close its own sources of run-to-run change for the graphs we compile."""

_reports: deque[Report] = deque(maxlen=256)


def last_report() -> Report | None:
    """The report of the graph that detpass compiled last in this process, or None when it compiled none.

    A model with graph breaks has several graphs: :func:`reports` lists the newest 256.
    """
    return _reports[-1] if _reports else None


def reports() -> tuple[Report, ...]:
    """The reports of the newest 256 graphs that detpass compiled in this process, oldest first."""
    return tuple(_reports)


def detpass(
    graph_module: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph with Inductor so that it gives the same bits in every run.

    Called by ``torch.compile``. ``mode`` is one of Inductor's; ``options`` holds detpass's options
    (:class:`detpass.config.Options`) and any of Inductor's.

    Every refusal is raised when the compiled model is called, as what it is and not wrapped by Dynamo (and so that
    ``suppress_errors`` cannot turn it into eager code): ConfigurationError for an unknown option, UncoveredError for
    an operation that no rule covers, eager's own error for arguments that eager refuses.
    """
    try:
        return _compile(graph_module, example_inputs, mode, options)
    except Exception as error:  # the border: our own errors are unwrapped from torch's, everything else passes on
        cause = own_error(error)
        if cause is None:
            raise
        return _raiser(cause)


detpass.reset = _torch_private.reset_cudagraphs  # type: ignore[attr-defined]  # torch._dynamo.reset calls it
detpass.runs_rules = True  # type: ignore[attr-defined]  # torch_faults asks


def _compile(
    graph_module: fx.GraphModule, example_inputs: list[Any], mode: str | None, options: Mapping[str, Any] | None
) -> Callable[..., Any]:
    plan = prepare(graph_module, example_inputs, mode, options)
    report = plan.report
    message = escapes.graph_break_message(graph_module)
    if message is not None:
        report.escapes.append(message)
        escapes.escape(plan.own.on_escape, message)

    key = _report_key(graph_module, example_inputs, plan.uuid)
    with plan.rule_set.operators_kept_whole():
        compiled: Callable[..., Any] = _torch_private.compile_fx(graph_module, example_inputs, plan.patches)
    directory = Path(_torch_private.cache_directory()) / "detpass" / "reports"
    if plan.rewrite.ran:
        save(report, directory, key)
    else:
        report.from_cache = True
        found = load(directory, key)
        report.complete = found is not None
        report.records, report.unknown = found or ([], [])
    plan.remember()
    return compiled


@dataclass(frozen=True)
class Plan:
    """What a compile needs, of a graph or of a package: options, rules, the rewrite, Inductor's settings with it."""

    own: Options
    rule_set: RuleSet
    uuid: str
    report: Report
    rewrite: RewritePass
    patches: Mapping[str, Any]

    def remember(self) -> None:
        """Add the report to those of this process, hand it to the option ``report``, and say what a user must know."""
        messages = list(map(escapes.unknown_operator_message, self.report.unknown))
        self.report.escapes += messages
        _reports.append(self.report)
        if self.own.report is not None:
            self.own.report(self.report)
        for record in self.report:
            if record.advice:
                escapes.warn_of_replacement(record.location, f"{record.reason}. {record.advice}")
        for message in messages:
            escapes.escape(self.own.on_escape, message)


def prepare(
    graph_module: fx.GraphModule, tensors: Iterable[Any], mode: str | None, options: Mapping[str, Any] | None
) -> Plan:
    """The plan for a graph over ``tensors`` (other values among them are passed over).

    Raises ConfigurationError for an unknown option or a setting that skips the rewrite, RuleError for a bad rule.
    """
    settings = _torch_private.inductor_settings()
    own, patches = split_options(options, settings, _torch_private.inductor_setting_type)
    escapes.check_settings(patches, settings)
    escapes.check_cublas({str(own.target), *(x.device.type for x in tensors if isinstance(x, torch.Tensor))})
    report = Report(compile_id=_torch_private.current_compile_id(), order=(segment.CHUNK_ROWS, segment.FAN_IN))
    rule_set = RuleSet((*own.rules, *reversed(registered_rules()), *rules.BUILTIN_RULES))
    uuid = fingerprint(graph_module, own, rule_set)
    rewriter = Rewriter(rule_set, rules.hazard, own, segment.assume_device, rules.FINISHERS, rules.unknown)
    rewrite = RewritePass(rewriter, report, uuid)
    merged = _patches_with(rewrite, own, {**_torch_private.mode_patches(mode), **FIXED_SETTINGS, **patches}, uuid)
    return Plan(own, rule_set, uuid, report, rewrite, merged)


def _patches_with(rewrite: Any, own: Options, patches: Mapping[str, Any], uuid: str) -> dict[str, Any]:
    """``patches`` of Inductor's settings with our passes added after the user's own (those this torch knows)."""
    settings = _torch_private.inductor_settings()
    merged = {name: value for name, value in patches.items() if name in settings or name not in FIXED_SETTINGS}
    merged["joint_custom_pre_pass"] = _chain(TorchFaults(), merged, settings, "joint_custom_pre_pass")
    merged["joint_custom_post_pass"] = _chain(rewrite, merged, settings, "joint_custom_post_pass")
    users_scheduler_pass = merged.get("_pre_fusion_custom_pass", settings.get("_pre_fusion_custom_pass"))
    merged["_pre_fusion_custom_pass"] = LoweringAudit(rules.hazard, own, uuid, users_scheduler_pass)
    return merged


class RewritePass(_torch_private.custom_graph_pass_class()):  # type: ignore[misc]  # the base is torch's
    """The rewrite as a graph pass of Inductor."""

    def __init__(self, rewriter: Rewriter, report: Report, uuid: str) -> None:
        self._rewriter = rewriter
        self._report = report
        self._uuid = uuid
        self.ran = False

    def __call__(self, graph: fx.Graph) -> None:
        self.ran = True
        self._rewriter.rewrite(graph, self._report)

    def uuid(self) -> Any:
        return ("detpass.rewrite", self._uuid)

    def __deepcopy__(self, _: Any) -> RewritePass:
        """Itself: AOTInductor copies the settings, and the report of the copy is to be ours."""
        return self


def _chain(ours: Any, merged: Mapping[str, Any], settings: Mapping[str, Any], name: str) -> Any:
    """Our pass after the user's own: what they insert is treated too."""
    users = merged.get(name, settings.get(name))
    if users is None:
        return ours
    return _Passes((*(users if isinstance(users, (list, tuple)) else (users,)), ours))


class _Passes(_torch_private.custom_graph_pass_class()):  # type: ignore[misc]  # the base is torch's
    """Several graph passes as one: torch 2.11 takes no more."""

    def __init__(self, passes: tuple[Any, ...]) -> None:
        self._passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        for each in self._passes:
            each(graph)

    def uuid(self) -> Any:
        """None, nothing is cached, where a pass does not say what identifies it."""
        found = [each.uuid() if hasattr(each, "uuid") else None for each in self._passes]
        return tuple(found) if all(found) else None


def _raiser(error: Exception) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise error.with_traceback(None)

    return refuse


@functools.cache
def _package_fingerprint() -> str:
    """A hash of every source file of this package and of the versions that decide what it does."""
    digest = hashlib.sha256(torch.__version__.encode())
    root = Path(__file__).parent
    for path in sorted((*root.rglob("*.py"), *root.rglob("*.cpp"), *root.rglob("*.h"))):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def fingerprint(graph_module: fx.GraphModule, own: Options, rule_set: RuleSet) -> str:
    """What decides the rewrite of a graph: this package's sources, the rules, the options, operators and lines."""
    digest = hashlib.sha256(_package_fingerprint().encode())
    digest.update(rule_set.fingerprint().encode())
    digest.update(repr((own.on_uncovered, own.target)).encode())
    for node in _all_nodes(graph_module):
        kernels = ",".join(user_kernels.source_keys(node))
        digest.update(f"{_name(node.target)}@{source_location(node)}{kernels}\n".encode())
    return digest.hexdigest()


def _name(target: Any) -> str:
    """The name of a node's target, without the address that the repr of a function has."""
    qualified = getattr(target, "__qualname__", None)
    return str(target) if qualified is None else f"{getattr(target, '__module__', '')}.{qualified}"


def _all_nodes(graph_module: fx.GraphModule) -> Iterable[fx.Node]:
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            yield from (
                node for node in module.graph.nodes if node.op in ("call_function", "call_method", "call_module")
            )


def _report_key(graph_module: fx.GraphModule, example_inputs: Iterable[Any], uuid: str) -> str:
    digest = hashlib.sha256(uuid.encode())
    digest.update(repr(torch.is_grad_enabled()).encode())
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            digest.update(module.code.encode())
    for value in example_inputs:
        if isinstance(value, torch.Tensor):
            described: Any = (
                tuple(map(str, value.shape)),
                str(value.dtype),
                str(value.device),
                tuple(map(str, value.stride())) if value.layout is torch.strided else str(value.layout),
                value.requires_grad,
            )
        else:
            described = type(value).__name__
        digest.update(repr(described).encode())
    return digest.hexdigest()


def _compiles_ours() -> bool:
    """Whether Inductor's settings at this moment are those of a compile by detpass."""
    return isinstance(_torch_private.inductor_config()._pre_fusion_custom_pass, LoweringAudit)


for _functional, _inplace in segment.ops.INPLACE_VARIANTS:
    _torch_private.register_inplace_variant(_functional, _inplace, 0)
escapes.watch(detpass)
torch_faults.install(_compiles_ours)
