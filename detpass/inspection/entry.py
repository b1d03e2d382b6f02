"""``detpass.inspect``: brings a model or a file to graphs, has them analysed, and gathers the report."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from detpass import _torch_private_capture, _torch_private_cuda, _torch_private_triton, environment, rules
from detpass.errors import InspectionError
from detpass.inspection import inputs, lowered
from detpass.inspection.analysis import Analysis, names_of, whole_graph
from detpass.inspection.capture import Outcome, capture, capture_program
from detpass.inspection.locations import source_line
from detpass.inspection.records import GraphBreak, LoweredFinding
from detpass.inspection.report import InspectionReport
from detpass.inspection.settings import LOWERING_LIMIT, Settings, Target
from detpass.inspection.stand_in import modules_of, uncompiled
from detpass.rewriting.registry import RuleSet, registered_rules
from detpass.user_kernels import CAPABILITY


def inspect(
    subject: Any, *example_inputs: Any, target: str | None = None, dynamic: bool | None = None, **kwargs: Any
) -> InspectionReport:
    """What in ``subject`` may differ from run to run, where, and what becomes of it under detpass.

    ``subject`` is a function or module, called as ``subject(*example_inputs, **kwargs)``; or a ``torch.export``
    program, an ``fx.GraphModule`` of ATen operators, or the path of a file that holds one of these (``.pt2``,
    ``fx_graph_readable.py``, ``fx_graph_runnable.py``), which need no example inputs. Files are read as data: nothing
    in them is executed.

    ``target`` is ``"cpu"``, ``"cuda"`` or ``"cuda:sm_90"``; no GPU is needed; by default the device of the inputs and
    parameters. ``dynamic`` is as in ``torch.compile``.

    The training graph is inspected when an input or a parameter requires grad, else the inference graph. Nothing is
    executed and no parameter, buffer or random state is changed: the model is traced with tensors that hold no data
    (a model on the meta device will do). Code between graph breaks is run on such tensors.

    Raises InspectionError for a subject that cannot be traced or read, ConfigurationError for an unknown target.
    """
    return inspect_with(Settings(target=target, dynamic=dynamic), subject, example_inputs, kwargs)


def inspect_with(
    settings: Settings, subject: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> InspectionReport:
    """:func:`inspect` with all its settings."""
    start = time.perf_counter()
    loaded = _loaded(subject, settings)
    name = _name(subject)
    target = Target.parse(settings.target) if settings.target is not None else Target.parse(_device_type(loaded, args))
    rule_set = RuleSet((*reversed(registered_rules()), *rules.BUILTIN_RULES))
    analysis = Analysis(target.type, rule_set, target.capability or CAPABILITY, progress=settings.progress)
    outcome = _graphs(loaded, args, kwargs or {}, settings, target, analysis)
    settings.progress("reading the lowered code")
    found, note = _lowered(analysis, target, settings, _call_of(loaded, args, kwargs or {}))
    return InspectionReport(
        subject=name,
        target=str(target),
        records=analysis.finished_records(),
        graphs=tuple(analysis.graphs),
        breaks=_breaks(outcome),
        unknown_ops=tuple(analysis.unknown.values()),
        triton_kernels=tuple(analysis.kernels.values()),
        lowered=tuple(found),
        lowered_note=note,
        notes=_notes(target),
        environment=environment.findings(),
        incomplete=outcome.incomplete,
        torch_version=torch.__version__,
        seconds=time.perf_counter() - start,
    )


def _graphs(
    subject: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    settings: Settings,
    target: Target,
    analysis: Analysis,
) -> Outcome:
    if isinstance(subject, fx.GraphModule) and not args and not kwargs:
        placeholders = [node for node in subject.graph.nodes if node.op == "placeholder"]
        if not all("val" in node.meta for node in placeholders):
            raise InspectionError(
                f"{type(subject).__name__} says nothing of its inputs (no meta['val']; a saved one keeps none): "
                "give example inputs beside it; on the command line by a factory that returns "
                "torch.load(file, weights_only=False), (inputs...)"
            )
        whole_graph(analysis, copy.deepcopy(subject))
        return Outcome()
    if isinstance(subject, inputs.Program):
        settings.progress("tracing")
        return capture_program(subject.graph_module, subject.inputs, analysis.rule_set, analysis.visit, analysis.finish)
    if not callable(subject):
        raise InspectionError(
            f"cannot inspect {type(subject).__name__}: expected a function, a module, a torch.export program, an "
            "fx.GraphModule or the path of a file"
        )
    settings.progress("tracing")
    analysis.module_names = names_of(modules_of(uncompiled(subject)))
    traced_on = torch.device("cuda" if target.type == "cuda" and torch.cuda.is_available() else "cpu")
    with contextlib.ExitStack() as as_there:
        as_there.enter_context(_torch_private_triton.offline_triton(target.capability or CAPABILITY))
        if target.type == "cuda":
            as_there.enter_context(_torch_private_cuda.flex_attention_as_on_cuda())
            as_there.enter_context(_torch_private_cuda.associative_scan_as_on_cuda())
        return capture(
            subject,
            args,
            kwargs,
            device=traced_on,
            dynamic=settings.dynamic,
            rule_set=analysis.rule_set,
            visit=analysis.visit,
            finish=analysis.finish,
        )


def _loaded(subject: Any, settings: Settings) -> Any:
    """What a path stands for, and programs as graphs; anything else as it is."""
    if isinstance(subject, (str, Path)):
        return inputs.from_file(Path(subject), settings.allow_pickle)
    return inputs.from_object(subject)


Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]


def _call_of(subject: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """What to call, and with what, to run a subject."""
    if isinstance(subject, inputs.Program):
        return subject.graph_module, subject.inputs, {}
    if isinstance(subject, fx.GraphModule) and not args and not kwargs:
        return subject, [node.meta["val"] for node in subject.graph.nodes if node.op == "placeholder"], {}
    return subject, args, kwargs


def _notes(target: Target) -> tuple[str, ...]:
    if target.type == "cuda" and not torch.cuda.is_available():
        return (
            "There is no GPU here: the model was traced on the CPU. Code of the model that asks for the device, and "
            "kernels that torch chooses by device while tracing (attention, dropout, batch norm), may differ there.",
        )
    return ()


def _lowered(
    analysis: Analysis, target: Target, settings: Settings, call: Call
) -> tuple[list[LoweredFinding], str | None]:
    if settings.read_lowered is False:
        return [], "not read, as asked"
    operators = sum(graph.nodes_after for graph in analysis.graphs)
    if settings.read_lowered is None and operators > LOWERING_LIMIT:
        return [], f"not read: {operators} operators, more than {LOWERING_LIMIT} (ask for it with read_lowered=True)"
    if target.type == "cuda":
        try:
            return lowered.cuda_findings(*call, capability=target.capability or 90, dynamic=settings.dynamic), None
        except InspectionError as error:
            return [], f"not read: {error}"
    try:
        return lowered.cpu_findings(analysis.modules), None
    except _torch_private_capture.lowering_errors() as error:
        return [], f"not read: Inductor cannot lower it for the CPU ({_first_line(str(error))})"


def _device_type(subject: Any, args: Sequence[Any]) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    for module in modules_of(subject):
        tensors += [*module.parameters(), *module.buffers()]
    if isinstance(subject, fx.GraphModule):
        values = [node.meta.get("val") for node in subject.graph.nodes if node.op == "placeholder"]
        tensors += [value for value in values if isinstance(value, torch.Tensor)]
    return "cuda" if any(tensor.device.type == "cuda" for tensor in tensors) else "cpu"


def _name(subject: Any) -> str:
    if isinstance(subject, (str, Path)):
        return str(subject)
    plain: Callable[..., Any] = uncompiled(subject)
    if isinstance(plain, nn.Module):
        return type(plain).__name__
    return getattr(plain, "__qualname__", type(plain).__name__).replace("<locals>.", "")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]


def _breaks(outcome: Outcome) -> tuple[GraphBreak, ...]:
    """One for each place: Dynamo may give a branch on a tensor twice, once as a bare jump."""
    found: dict[tuple[str, str | None], GraphBreak] = {}
    for reason, place in sorted(outcome.breaks, key=lambda item: item[0].startswith(_JUMP)):
        key = ("", place) if place is not None else (reason, None)
        found.setdefault(key, GraphBreak(_break_reason(reason), place, source_line(place)))
    return tuple(found.values())


_JUMP = "generic_jump"


def _break_reason(text: str) -> str:
    """Dynamo's explanation, or its headline where it gives none."""
    if text.startswith(_JUMP):
        return "a Python branch on a tensor's value"
    explained = [line.strip() for line in text.splitlines() if line.strip().startswith("Explanation:")]
    return explained[0].removeprefix("Explanation: ") if explained else _first_line(text)
