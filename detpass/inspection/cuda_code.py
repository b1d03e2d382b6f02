"""The CUDA code that Inductor would generate for a model, on a machine with no GPU, and the atomics in it.

The model is traced and differentiated on the CPU over stand-ins (nothing of it is executed); each forward and backward
graph is moved to CUDA by its metadata and lowered by Inductor as for a GPU; the source is taken before it is loaded.
``cuda_text.py`` reads the sources, ``detpass/_torch_private_cuda.py`` holds the patched world.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from detpass import (
    _torch_private,
    _torch_private_capture,
    _torch_private_cuda,
    _torch_private_triton,
    rules,
    segment,
)
from detpass.backend import FIXED_SETTINGS, RewritePass
from detpass.config import Options
from detpass.errors import ConfigurationError, InspectionError
from detpass.graph_query import source_location
from detpass.inspection import settled
from detpass.inspection.cuda_refusals import described_breaks, nothing_compiled, refusal
from detpass.inspection.cuda_text import Atomic, ExternCall, KernelText, Scan, extern_calls, kernels, read_kernel
from detpass.inspection.stand_in import StandIns, modules_of, standing_in, uncompiled
from detpass.rewriting.graph_pass import Rewriter
from detpass.rewriting.registry import RuleSet, registered_rules
from detpass.rewriting.report import Report, UnknownOp
from detpass.rule import Treatment
from detpass.torch_faults import TorchFaults

BACKENDS = ("detpass", "inductor")


@dataclass(frozen=True)
class CudaSettings:
    """How :func:`cuda_code_with` generates code."""

    backend: str = "detpass"
    """``"detpass"`` or ``"inductor"``."""
    dynamic: bool | None = None
    """``torch.compile``'s argument."""
    capability: int = 90
    """The compute capability of the GPU that the code is for."""
    compile_kernels: bool = True
    """Compile every Triton kernel to PTX and read the atomics there too (about a second a kernel)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of Inductor for this compile."""


@dataclass(frozen=True)
class CudaCode:
    """Generated CUDA code and what in it can make results differ from run to run."""

    sources: Mapping[str, str]
    """Graph name (``forward0``, ``backward0``, ``inference1``) to the Python module that Inductor generated."""
    float_atomics: tuple[Atomic, ...]
    """Floating-point additions by atomics, in Inductor's kernels and in the user's: their order decides the bits."""
    other_atomics: tuple[Atomic, ...]
    """Atomics on integers, minima, maxima, and the bookkeeping of look-back scans: their result is exact. Those of a
    kernel that a rule of a user's own settles are here, too."""
    locks: tuple[Atomic, ...]
    """Exchanges and compare-and-swaps outside of a scan (a lock or an atomic made by hand), and atomics of a user's
    kernel whose results are used: in unknown order."""
    float_scans: tuple[Scan, ...]
    """Scans of floating-point values by decoupled look-back: not bit-stable either."""
    extern_calls: tuple[ExternCall, ...]
    """Calls of operators that Inductor does not generate itself, in program order."""
    nondeterministic_externs: tuple[ExternCall, ...]
    """Those of them that the catalogue lists as nondeterministic on CUDA."""
    unread_kernels: Mapping[str, str]
    """Kernels that Triton could not compile here, with the error: their atomics are known from the source alone."""
    graph_breaks: tuple[str, ...]
    """Where the model leaves its graphs, with the reason and a remedy: the eager code there was not read."""
    unknown_ops: tuple[UnknownOp, ...]
    """Operators of other libraries of which no rule says whether they repeat: their kernels were not read."""
    measured_kernels: Mapping[str, str]
    """Kernels of the user's of which Inductor would measure several configurations and choose one in each process, with
    the reason why the choice may decide bits."""
    report: Report | None
    """What detpass rewrote (None for ``backend="inductor"``)."""
    capability: int
    """The compute capability of the code, such as 90."""

    @property
    def deterministic(self) -> bool:
        """Whether nothing was found that can make results differ and everything could be read."""
        found = (self.float_atomics, self.locks, self.float_scans, self.nondeterministic_externs)
        uncovered = self.report is not None and any(r.treatment is Treatment.UNCOVERED for r in self.report)
        unread = (self.unread_kernels, self.graph_breaks, self.unknown_ops)
        return not any((*found, uncovered, self.measured_kernels, *unread))


def cuda_code(
    fn: Callable[..., Any],
    *example_inputs: Any,
    backend: str = "detpass",
    dynamic: bool | None = None,
    **kwargs: Any,
) -> CudaCode:
    """Return the code that ``torch.compile(fn, backend=backend)`` would run on a GPU of capability 9.0.

    ``fn`` is a function or module, called as ``fn(*example_inputs, **kwargs)``; its tensors may be on any device. With
    inputs or parameters that require grad the backward graphs are there too. No GPU and no CUDA build of torch is
    needed, but triton is. Nothing is executed; parameters, buffers and random state stay as they are.

    What the GPU would decide by itself is not in it: code that asks ``tensor.is_cuda``, decompositions that torch
    chooses by device while tracing (attention kernels, dropout, batch norm, convolution) and choices by benchmark.

    Raises InspectionError for a model of which Dynamo compiles no graph (a graph break in a loop, ``nn.LSTM``), whose
    code between graphs needs data, or that cannot be traced or lowered, and without triton: the message names the
    operator where it is known; ConfigurationError for an unknown backend. The patched globals belong to the process:
    no other thread may use CUDA or compile meanwhile.
    """
    return cuda_code_with(CudaSettings(backend, dynamic), fn, example_inputs, kwargs)


def cuda_code_with(
    settings: CudaSettings,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> CudaCode:
    """:func:`cuda_code` with all its settings."""
    _check(settings, fn)
    major, minor = divmod(settings.capability, 10)
    world = _World(settings, _torch_private_cuda.Gpu(major, minor))
    sources = world.trace(uncompiled(fn), args, kwargs or {})
    found = [(graph, kernel) for graph, source in sources.items() for kernel in kernels(source)]
    texts = world.compile({kernel.source: kernel for _, kernel in found}) if settings.compile_kernels else {}
    read = [(kernel, read_kernel(graph, kernel, *texts.get(kernel.source, ("", "", "")))) for graph, kernel in found]
    atomics = [atomic for _, reading in read for atomic in reading.atomics]
    accepted = {
        atomic
        for (graph, _), (kernel, reading) in zip(found, read, strict=True)
        for atomic in reading.atomics
        if kernel.is_users and kernel.function in world.settled[graph]
    }
    locks = {
        atomic
        for _, reading in read
        for atomic in reading.atomics
        if atomic in reading.ordered or (atomic.operation in ("exch", "cas") and not reading.scans)
    }
    decide = {atomic for atomic in atomics if atomic.operation == "fadd" or atomic in locks} - accepted
    calls = tuple(
        call for graph, source in sources.items() for call in extern_calls(graph, source, world.proved[graph])
    )
    return CudaCode(
        sources=sources,
        float_atomics=tuple(atomic for atomic in atomics if atomic in decide and atomic.operation == "fadd"),
        other_atomics=tuple(atomic for atomic in atomics if atomic not in decide),
        locks=tuple(atomic for atomic in atomics if atomic in decide and atomic.operation != "fadd"),
        float_scans=tuple(scan for _, kernel in read for scan in kernel.scans if scan.floating),
        extern_calls=calls,
        nondeterministic_externs=tuple(call for call in calls if call.hazard is not None),
        unread_kernels={kernel.name: text[2] for kernel, _ in read if (text := texts.get(kernel.source)) and text[2]},
        graph_breaks=world.breaks,
        unknown_ops=tuple(world.unknown.unknown),
        measured_kernels=world.measured,
        report=world.report,
        capability=settings.capability,
    )


def _check(settings: CudaSettings, fn: Any) -> None:
    if settings.backend not in BACKENDS:
        raise ConfigurationError(f"backend={settings.backend!r}: expected one of {', '.join(map(repr, BACKENDS))}")
    if not 80 <= settings.capability <= 129:
        raise ConfigurationError(f"capability={settings.capability!r}: expected 80 or more, as in sm_80 or sm_90")
    if settings.options.get("cpp_wrapper"):
        raise ConfigurationError(
            "cpp_wrapper=True: kernels are read in a wrapper in Python; leave it out, they are the same"
        )
    if not callable(fn):
        raise InspectionError(f"cannot generate code for {type(fn).__name__}: expected a function or a module")
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise InspectionError(
            "generating CUDA code needs triton and found none: pip install 'detpass[triton]'; it needs no GPU"
        ) from error


class _World:
    """One generation: the backend that Dynamo calls, and the sources it collects."""

    def __init__(self, settings: CudaSettings, gpu: _torch_private_cuda.Gpu) -> None:
        self._settings = settings
        self._gpu = gpu
        self._stand_ins = StandIns(torch.device("cpu"))
        self._rules = RuleSet((*reversed(registered_rules()), *rules.BUILTIN_RULES))
        self._sources: dict[str, str] = {}
        self.proved: dict[str, frozenset[str]] = {}
        self.settled: dict[str, frozenset[str]] = {}
        self.measured: dict[str, str] = {}
        self.unknown = Report()
        self.breaks: tuple[str, ...] = ()
        self.runs_rules = settings.backend == "detpass"
        self.report = Report(compile_id=None) if self.runs_rules else None

    def trace(self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
        known = len(_torch_private_capture.graph_breaks_seen())
        with (
            torch.random.fork_rng(devices=[]),
            _torch_private_capture.isolated_compile(),
            _torch_private_capture.quiet_compile(),
            # While tracing too: torch reads from a Triton kernel's code which of its arguments it writes.
            _torch_private_triton.offline_triton(self._settings.capability),
            _torch_private_cuda.backward_lowered_at_once(),
            _torch_private_cuda.flex_attention_as_on_cuda(),
            _torch_private_cuda.associative_scan_as_on_cuda(),
            standing_in(modules_of(target), self._stand_ins),
            self._rewriting(),
        ):
            compiled = torch.compile(_entry(target), backend=self, dynamic=self._settings.dynamic)
            try:
                compiled(*self._stand_ins.tree(tuple(args)), **self._stand_ins.tree(dict(kwargs)))
            except Exception as error:  # the border to the user's code, which may raise anything
                raise refusal(error) from error
        self.breaks = described_breaks(_torch_private_capture.graph_breaks_seen()[known:])
        if not self._sources:
            raise nothing_compiled(self.breaks)
        return self._sources

    def _rewriting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.report is None else self._rules.operators_kept_whole()

    def __call__(self, graph_module: fx.GraphModule, example_inputs: list[Any]) -> Any:
        number = len({name.strip("abcdefghijklmnopqrstuvwxyz") for name in self._sources})

        def inner(lowered: fx.GraphModule, inputs: Any, **options: Any) -> Any:
            inference = bool(options.get("is_inference"))
            kind = "backward" if options.get("is_backward") else "inference" if inference else "forward"
            self.proved[f"{kind}{number}"] = settled.operators(lowered)
            self.settled[f"{kind}{number}"] = settled.kernels(lowered)
            self.measured.update(settled.measured(lowered))
            for node in settled.unknown(lowered):
                self.unknown.note_unknown(str(node.target), source_location(node))
            moved, moved_inputs = _torch_private_cuda.retargeted(lowered, inputs)
            with _torch_private_cuda.offline_cuda(self._gpu):
                self._sources[f"{kind}{number}"] = _torch_private_cuda.generate(moved, moved_inputs, **options)
            return self._stand_in_call(lowered)

        return _torch_private_capture.compile_fx_standing_in(graph_module, example_inputs, self._patches(), inner)

    def _patches(self) -> dict[str, Any]:
        patches: dict[str, Any] = dict(self._settings.options)
        if self.report is not None:
            known = _torch_private.inductor_settings()
            patches |= {name: value for name, value in FIXED_SETTINGS.items() if name in known}
            own = Options(on_uncovered="ignore", target="cuda")
            rewriter = Rewriter(self._rules, rules.hazard, own, segment.assume_device, rules.FINISHERS, rules.unknown)
            patches["joint_custom_pre_pass"] = TorchFaults()
            patches["joint_custom_post_pass"] = RewritePass(rewriter, self.report, "cuda_code")
        return patches

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

    def compile(self, found: Mapping[str, KernelText]) -> dict[str, tuple[str, str, str]]:
        """TTIR, PTX and error of each distinct kernel, by its source."""
        texts: dict[str, tuple[str, str, str]] = {}
        with _torch_private_cuda.offline_cuda(self._gpu):
            for source, kernel in found.items():
                try:
                    texts[source] = (*_torch_private_cuda.compiled_texts(kernel.function, source), "")
                except _torch_private_cuda.triton_errors() as error:
                    texts[source] = ("", "", f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
        return texts


def _entry(target: Callable[..., Any]) -> Callable[..., Any]:
    """A fresh function that calls ``target``: Dynamo keeps its caches by code object."""

    def generated(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return types.FunctionType(generated.__code__.replace(), globals(), "generated", None, generated.__closure__)
