"""Which node of a model's graph is the first to give other bits.

The graphs that Inductor would get are interpreted node by node with eager kernels, several times from the same inputs
and the same random state, and each node's output is digested. A node whose inputs had the same bits in all runs while
its output did not is a source of nondeterminism; what differs downstream of it is a consequence.

What this says and what it does not: it is about the ATen kernel of each node on this machine with this thread count. A
fused kernel of Inductor may lose repeatability where the node's own kernel does not, and a node that repeated here may
differ on another day. ``detpass.inspect`` looks at the code instead. Neighbours: ``runs.py`` (does the whole differ?).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from detpass._torch_private import aot_interpreter_backend
from detpass.errors import ConfigurationError
from detpass.graph_query import source_location
from detpass.reproducibility.differences import Difference, first_difference
from detpass.reproducibility.digests import digest
from detpass.reproducibility.runs import snapshot, thread_count


@dataclass(frozen=True)
class NodeSource:
    """A node that gave other bits from inputs with the same bits."""

    position: int
    """Its place in the order of execution, over all graphs of the run."""
    graph: str
    """``forward`` or ``backward``, and the graph's number when a break cut the model."""
    node: str
    """Its name in the graph."""
    target: str
    """The operator."""
    location: str | None
    """``file:line`` of the model, when the graph kept it."""
    distinct: int
    """How many different outputs the runs gave."""
    difference: Difference | None
    """How two outputs differ; None when the second pass over the model happened to repeat."""

    def __str__(self) -> str:
        where = f" at {self.location}" if self.location else ""
        how = f"\n    {self.difference}" if self.difference else ""
        name = f"{self.target} (node {self.node} of the {self.graph} graph)"
        return f"{name}{where}: {self.distinct} different outputs{how}"


@dataclass(frozen=True)
class BisectReport:
    """What :func:`bisect` saw. True in a condition when every node repeated."""

    runs: int
    """How often the model was run."""
    nodes: int
    """How many nodes were compared in each run."""
    sources: tuple[NodeSource, ...]
    """The nodes that differed from equal inputs, in the order of execution."""

    @property
    def first(self) -> NodeSource | None:
        """The first node whose bits differ, or None."""
        return self.sources[0] if self.sources else None

    def __bool__(self) -> bool:
        return not self.sources

    def __str__(self) -> str:
        if not self.sources:
            return f"{self.nodes} nodes gave the same bits in {self.runs} runs"
        lines = [f"{len(self.sources)} of {self.nodes} nodes gave other bits from equal inputs in {self.runs} runs:"]
        return "\n".join(lines + [f"  {source}" for source in self.sources])


@dataclass(frozen=True)
class _Step:
    graph: str
    node: fx.Node
    inputs: str
    output: str


@dataclass
class _Recorder:
    """Collects one run's steps; keeps the values of the positions in ``watched``."""

    steps: list[_Step] = field(default_factory=list)
    watched: frozenset[int] = frozenset()
    values: dict[int, Any] = field(default_factory=dict)
    graphs: dict[str, int] = field(default_factory=dict)

    def start(self, watched: frozenset[int] = frozenset()) -> None:
        self.steps, self.watched, self.values = [], watched, {}

    def run_graph(self, graph: fx.GraphModule, phase: str) -> Callable[..., Any]:
        number = self.graphs[phase] = self.graphs.get(phase, 0) + 1
        name = phase if number == 1 else f"{phase} {number}"
        return lambda *args: _DigestingInterpreter(graph, name, self).run(*args)


class _DigestingInterpreter(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, name: str, recorder: _Recorder) -> None:
        super().__init__(graph)
        self._name, self._recorder = name, recorder

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        arguments = self.fetch_args_kwargs_from_env(n)
        before = digest(_readable(arguments))
        result = super().run_node(n)
        position = len(self._recorder.steps)
        self._recorder.steps.append(_Step(self._name, n, before, digest(_readable(result))))
        if position in self._recorder.watched:
            self._recorder.values[position] = snapshot(_readable(result))
        return result


def bisect(
    fn: Callable[..., Any],
    *inputs: Any,
    runs: int = 10,
    threads: int | None = None,
    seed: int = 0,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> BisectReport:
    """Find the first node of ``fn``'s graphs, forward and backward, that does not repeat.

    ``fn`` is a function or module, called with ``inputs``. Where something requires grad, the backward graph is run
    too, from ``loss(output)`` or, without ``loss``, from the sum of all floating-point outputs. Gradients are not
    accumulated into ``.grad``. ``threads`` sets the thread count meanwhile. The model is run ``2 * runs`` times at
    most; every node's inputs and output are hashed, so it is slow.

    Raises ConfigurationError for fewer than two runs, for runs that execute different nodes (control flow that depends
    on something other than the inputs), and for a model whose graph Dynamo cannot capture at all.
    """
    if runs < 2:
        raise ConfigurationError(f"bisect(runs={runs}): at least two runs are needed to compare")
    recorder = _Recorder()
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=aot_interpreter_backend(recorder.run_graph))
    try:
        with thread_count(threads or torch.get_num_threads()):
            histories = []
            for _ in range(runs):
                recorder.start()
                _run_once(compiled, fn, inputs, loss, seed)
                histories.append(recorder.steps)
            _check_same_nodes(histories)
            sources = _sources(histories)
            differences = _measure(recorder, sources, runs, lambda: _run_once(compiled, fn, inputs, loss, seed))
    finally:
        torch._dynamo.reset()
    return BisectReport(
        runs,
        len(histories[0]),
        tuple(_describe(position, histories, differences.get(position)) for position in sources),
    )


def _run_once(
    compiled: Callable[..., Any],
    fn: Callable[..., Any],
    inputs: tuple[Any, ...],
    loss: Callable[[Any], torch.Tensor] | None,
    seed: int,
) -> None:
    parameters = list(fn.parameters()) if isinstance(fn, torch.nn.Module) else []
    leaves = [t for t in (*parameters, *inputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        output = compiled(*inputs)
        total = loss(output) if loss is not None else _sum_of_floats(output)
        if leaves and total is not None and total.requires_grad:
            torch.autograd.grad(total, leaves, allow_unused=True)


def _sum_of_floats(output: Any) -> torch.Tensor | None:
    leaves = torch.utils._pytree.tree_leaves(output)
    parts = [leaf.sum() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([part.to(torch.float64) for part in parts if not part.is_complex()]).sum() if parts else None


def _check_same_nodes(histories: list[list[_Step]]) -> None:
    if not histories[0]:
        raise ConfigurationError("nothing was captured: the function runs no tensor operation that Dynamo can trace")
    names = [(step.graph, step.node.name) for step in histories[0]]
    for number, history in enumerate(histories[1:], start=1):
        if [(step.graph, step.node.name) for step in history] != names:
            raise ConfigurationError(
                f"runs 0 and {number} executed different nodes ({len(names)} and {len(history)} of them): the model's "
                "control flow depends on more than its inputs; make it the same in each run"
            )


def _sources(histories: list[list[_Step]]) -> list[int]:
    """Positions at which two runs had equal inputs and other outputs."""
    found = []
    for position in range(len(histories[0])):
        outputs: dict[str, set[str]] = {}
        for history in histories:
            outputs.setdefault(history[position].inputs, set()).add(history[position].output)
        if any(len(seen) > 1 for seen in outputs.values()):
            found.append(position)
    return found


def _measure(recorder: _Recorder, sources: list[int], runs: int, run: Callable[[], None]) -> dict[int, Difference]:
    """Run again, keeping the outputs of the sources, until each has shown two different ones from equal inputs."""
    found: dict[int, Difference] = {}
    reference: dict[tuple[int, str], Any] = {}
    for _ in range(runs):
        missing = frozenset(position for position in sources if position not in found)
        if not missing:
            break
        recorder.start(watched=missing)
        run()
        for position in missing:
            key = (position, recorder.steps[position].inputs)
            value = recorder.values[position]
            difference = first_difference(reference.setdefault(key, value), value)
            if difference is not None:
                found[position] = difference
    return found


def _describe(position: int, histories: list[list[_Step]], difference: Difference | None) -> NodeSource:
    step = histories[0][position]
    return NodeSource(
        position=position,
        graph=step.graph,
        node=step.node.name,
        target=str(step.node.target),
        location=source_location(step.node),
        distinct=len({history[position].output for history in histories}),
        difference=difference,
    )


def _readable(value: Any) -> Any:
    """``value`` with what has no bits of its own (sizes, generators, submodules) replaced by its text."""
    if isinstance(value, (list, tuple)):
        return [_readable(item) for item in value]
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if value is None or isinstance(value, (torch.Tensor, bool, int, float, complex, str, bytes)):
        return value
    return f"<{type(value).__name__}>"
