"""The joint graphs of a function, traced by Dynamo and AOTAutograd over stand-ins: nothing of the model is executed.

The same pipeline as the backend's (``detpass/backend.py``): Inductor's decompositions and joint passes, with our visit
as ``joint_custom_post_pass``. Where the function has no graph break, tracing ends as soon as the joint graph is
visited; at a break the pipeline goes on with stand-in results, so that the graphs after the break are seen too.
"""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from detpass import _torch_private, _torch_private_capture
from detpass.errors import InspectionError, own_error
from detpass.graph_query import frames
from detpass.inspection.stand_in import StandIns, modules_of, standing_in, uncompiled
from detpass.rewriting.registry import RuleSet

Visit = Callable[[fx.Graph], None]
"""Called with each graph where detpass would rewrite it; may rewrite it in place."""
Finish = Callable[[fx.GraphModule, str], None]
"""Called once for each whole graph, after its visits, with its kind: ``"joint"`` or ``"inference"``."""


@dataclass
class Outcome:
    """What is known about a trace besides its graphs."""

    breaks: list[tuple[str, str | None]] = field(default_factory=list)
    """Reason and ``file:line`` of each graph break."""
    incomplete: str | None = None
    """Why tracing ended before the function did, or None when it did not."""


def capture(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device,
    dynamic: bool | None,
    rule_set: RuleSet,
    visit: Visit,
    finish: Finish,
) -> Outcome:
    """Trace ``target(*args, **kwargs)`` on ``device`` and hand its graphs to ``visit`` and ``finish``.

    Parameters, buffers and random state are left as they were. Raises InspectionError where nothing can be traced.
    """
    target = uncompiled(target)
    stand_ins = StandIns(device)
    tracer = _Tracer(stand_ins, visit, finish)
    entry = _entry(target)
    tracer.entry_code = entry.__code__
    outcome = Outcome()
    known = len(_torch_private_capture.graph_breaks_seen())
    with _isolated(rule_set), standing_in(modules_of(target), stand_ins):
        compiled = torch.compile(entry, backend=tracer, dynamic=dynamic)
        try:
            compiled(*stand_ins.tree(tuple(args)), **stand_ins.tree(dict(kwargs)))
        except _Captured:
            outcome.incomplete = None
        except Exception as error:  # the border to the user's code, which may raise anything
            own = own_error(error)
            if own is not None:
                raise own from error
            if not tracer.graphs and len(_torch_private_capture.graph_breaks_seen()) == known:
                raise _untraceable(error) from error
            outcome.incomplete = _ended(error)
    outcome.breaks = list(dict.fromkeys(_torch_private_capture.graph_breaks_seen()[known:]))
    if not tracer.graphs and outcome.incomplete is None:
        outcome.incomplete = (
            "no graph was captured: the function runs eagerly as a whole (it is empty, disabled by "
            "torch.compiler.disable, or code that Dynamo skips)"
        )
    return outcome


def capture_program(
    graph_module: fx.GraphModule, inputs: Sequence[Any], rule_set: RuleSet, visit: Visit, finish: Finish
) -> Outcome:
    """:func:`capture` for a graph of ATen operators before autograd and a fake tensor for each of its inputs."""
    tracer = _Tracer(StandIns(torch.device("cpu")), visit, finish)
    with _isolated(rule_set):
        try:
            tracer(graph_module, list(inputs))
        except _Captured:
            return Outcome()
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            raise own_error(error) or _untraceable(error) from error
    raise InspectionError("the program's graph was not traced")


class _Captured(BaseException):
    """Leaves torch's compile stack, which catches every Exception, when all that is needed has been seen."""


class _Tracer:
    """The ``torch.compile`` backend of an inspection."""

    runs_rules = True  # as the backend's own: ``torch_faults`` asks

    def __init__(self, stand_ins: StandIns, visit: Visit, finish: Finish) -> None:
        self._stand_ins = stand_ins
        self._visit = visit
        self._finish = finish
        self.entry_code: Any = None
        self.graphs = 0

    def __call__(self, graph_module: fx.GraphModule, example_inputs: list[Any]) -> Any:
        broken = _torch_private.graph_break_reason(graph_module) is not None
        last = not broken and _torch_private_capture.frame_code_in_dynamo() is self.entry_code
        partitioner = _Partitioner(self, last)
        patches = {"joint_custom_post_pass": _Visitor(self._visit), "custom_partitioner_fn": partitioner}

        def inner(lowered: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
            if not partitioner.ran:
                self.finished(lowered, "inference", last)
                partitioner.ran = True
            return self._stand_in_call(lowered)

        return _torch_private_capture.compile_fx_standing_in(graph_module, example_inputs, patches, inner)

    def finished(self, graph_module: fx.GraphModule, kind: str, last: bool) -> None:
        self.graphs += 1
        self._finish(graph_module, kind)
        if last:
            raise _Captured

    def _stand_in_call(self, graph_module: fx.GraphModule) -> Any:
        (results,) = next(node for node in reversed(graph_module.graph.nodes) if node.op == "output").args
        results = results if isinstance(results, (list, tuple)) else [results]
        values = [node.meta.get("val") if isinstance(node, fx.Node) else node for node in results]

        def run(arguments: list[Any]) -> list[Any]:
            arguments.clear()
            return [self._stand_in(value) for value in values]

        run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's mark of a function that eats its argument list
        return run

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._stand_ins.fresh(value)
        return _torch_private_capture.hint(value) if isinstance(value, torch.SymInt) else value


class _Visitor(_torch_private.custom_graph_pass_class()):  # type: ignore[misc]  # a base class looked up at run time
    """The visit as a graph pass of Inductor."""

    def __init__(self, visit: Visit) -> None:
        self._visit = visit

    def __call__(self, graph: fx.Graph) -> None:
        self._visit(graph)

    def uuid(self) -> Any:
        return None  # caches are off


class _Partitioner(_torch_private_capture.custom_partitioner_class()):  # type: ignore[misc]  # looked up at run time
    """Takes the joint graph after Inductor's joint passes; partitions it only where tracing has to go on."""

    def __init__(self, tracer: _Tracer, last: bool) -> None:
        self._tracer = tracer
        self._last = last
        self.ran = False

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        self.ran = True
        self._tracer.finished(gm, "joint", self._last)
        return _torch_private_capture.default_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        return None


@contextlib.contextmanager
def _isolated(rule_set: RuleSet) -> Iterator[None]:
    with (
        _uncollected(),
        torch.random.fork_rng(devices=[]),
        _torch_private_capture.isolated_compile(),
        _torch_private_capture.quiet_compile(),
        rule_set.operators_kept_whole(),
    ):
        yield


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector: a trace makes millions of objects that live until its end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _entry(target: Callable[..., Any]) -> types.FunctionType:
    """A function with a code object of its own that calls ``target``: Dynamo keeps its caches by code object."""

    def inspected(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return types.FunctionType(inspected.__code__.replace(), globals(), "inspected", None, inspected.__closure__)


def _untraceable(error: Exception) -> InspectionError:
    return InspectionError(
        f"the function could not be traced: {type(error).__name__}: {_first_lines(error)}. "
        "Check that it runs in eager mode with these example inputs"
    )


def _ended(error: Exception) -> str:
    place = _place(error)
    data = isinstance(error, _torch_private_capture.DATA_ERRORS)
    what = "eager code between graphs needs data" if data else "eager code between graphs failed on stand-in values"
    where = f" at {place}" if place else ""
    return f"{what}{where} ({type(error).__name__}: {_first_lines(error)}); what follows was not seen"


def _place(error: BaseException) -> str | None:
    import traceback

    text = "".join(traceback.format_tb(error.__traceback__))
    skipped = (str(torch.__path__[0]), str(Path(__file__).parents[1]))
    own = [frame for frame in frames(text) if not frame[0].startswith(skipped)]
    return f"{own[-1][0]}:{own[-1][1]}" if own else None


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).strip().split("\n\n")[0].split())[:400].rstrip(".")
