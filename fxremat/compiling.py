"""The Dynamo backend: what happens to one graph that Dynamo has captured."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from fxremat.budget import Budget
from fxremat.errors import CaptureError, UnsupportedGraphError
from fxremat.passes.boxed import Boxed, boxed
from fxremat.passes.cublas import cublas_bytes
from fxremat.passes.joint import primals_of
from fxremat.passes.reference import reference_partition
from fxremat.passes.second_order import refusing_second_order
from fxremat.passes.select import detach_the_rest
from fxremat.passes.storages import round_up
from fxremat.passes.tracing import (
    compiling,
    current_frame,
    joint_of,
    keeps_graph,
    outputs_share_memory,
)
from fxremat.pipeline import Planned, partition, tangents
from fxremat.planning import baseline_peak_bytes
from fxremat.plans import Plan, Solution, make_plan
from fxremat.problem import RematProblem
from fxremat.reserve import reserve_bytes
from fxremat.session import GraphRecord, Piece, Session, tangent_note
from fxremat.simulate import Schedule
from fxremat.trial import compile_and_try

VIEWS_NOTE = (
    "some outputs are views of one value: autograd adds their gradients up outside the graph, in "
    "memory that is not counted. Return one of them, or clones."
)
NOTEWORTHY_SHARE = 0.02  # of the baseline peak; smaller tangents are not worth a hint


class Backend:
    """Compiles graphs for one session.

    Args:
        session: Where plans are kept.
        held: Tensors that the step's device holds besides the graph's inputs.
        with_gradients: Parameters have gradients when the step begins; False: count those that
            are there when the graph is compiled, unless the options say that they are freed.
        trace: What takes a graph through AOTAutograd.
        outside_bytes: What is known to stay on the device besides tensors. [bytes]
    """

    def __init__(
        self,
        session: Session,
        held: Callable[[], Iterable[torch.Tensor]] = tuple,
        with_gradients: bool = False,
        trace: "type[Trace] | None" = None,
        outside_bytes: int = 0,
    ) -> None:
        self.session = session
        self.outside_bytes = outside_bytes
        self.trace = trace or Trace
        self.held = held
        self.with_gradients = with_gradients
        self.__name__ = "fxremat"  # Dynamo shows it in its messages

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph that Dynamo captured."""
        options = self.session.options
        if options.keys is not None:
            graph = detach_the_rest(graph, options.keys)
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        self.session.on_inputs(list(zip(names, inputs, strict=True)))
        given = [value for value in inputs if isinstance(value, torch.Tensor)]
        device = device_of(given)
        resident = [*given, *self.held()]
        total_bytes = bytes_on(device, resident) + reserve_bytes(options.reserve)
        total_bytes += self.outside_bytes
        existing_bytes = 0
        if self.with_gradients:
            existing_bytes = expected_gradient_bytes(device, resident)
        elif options.gradients == "auto":
            existing_bytes = bytes_on(device, gradients_of(resident))
        piece = self.piece(device, given, existing_bytes)
        total_bytes += existing_bytes + piece.others_bytes + cublas_bytes(device)
        trace = self.trace(self.session, device, total_bytes, piece)
        trace.num_inputs = len(inputs)
        trace.shared_outputs = outputs_share_memory(graph)
        with compiling():
            if options.executor == "inductor":
                code = compile_and_try(graph, inputs, trace, _identity(options))
                return refusing_second_order(code, trace.check_backward)
            return refusing_second_order(self.compile(graph, inputs, trace))

    def piece(self, device: torch.device, given: list[torch.Tensor], existing_bytes: int) -> Piece:
        """What other pieces of the same call hold while this one runs forward or back."""
        frame = current_frame()
        earlier = sum(record.held_bytes for record in self.session.earlier(frame))
        mine = {id(tensor) for tensor in given}
        breaks = not self.session.options.fullgraph
        outside = [t for t in self.held() if id(t) not in mine] if breaks else []
        others_bytes = earlier + gradient_bytes(device, outside)
        return Piece(frame, others_bytes, gradient_bytes(device, given), existing_bytes)

    def compile(
        self, graph: fx.GraphModule, inputs: Sequence[Any], trace: "Trace"
    ) -> Callable[..., Any]:
        """Hand a graph to the eager executor."""
        compiler = aot_autograd(
            fw_compiler=trace.forward_compiler,
            bw_compiler=trace.backward_compiler,
            inference_compiler=trace.inference_compiler,
            partition_fn=trace.partition,
        )
        compiled: Callable[..., Any] = compiler(graph, inputs)
        return compiled


class Trace:
    """One graph on its way through AOTAutograd."""

    def __init__(
        self, session: Session, device: torch.device, resident_bytes: int, piece: Piece
    ) -> None:
        self.session = session
        self.piece = piece
        self.device = device
        self.resident_bytes = resident_bytes
        self.record: GraphRecord | None = None
        self.target_bytes: int | None = None  # less than the budget, where code holds more
        self.written: frozenset[int] | None = None  # inputs that the step writes to
        self.num_inputs = 0
        self.shared_outputs = False  # some are views of others
        self.start_s = session.started_s or time.perf_counter()

    def partition(
        self,
        module: fx.GraphModule,
        _inputs: object,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """AOTAutograd's partitioner."""
        trace_s = time.perf_counter() - self.start_s
        asked = self.session.options.budget
        planned = partition(
            joint_of(module, num_fwd_outputs),
            asked if self.target_bytes is None else Budget(self.target_bytes),
            self.session.options,
            resident_bytes=self.resident_bytes,
            device=self.device,
            name=self.session.name,
        )
        self.keep(planned, trace_s)
        return planned.graphs.forward, planned.graphs.backward

    def keep(self, planned: Planned, trace_s: float) -> None:
        """Remember the plan for the report."""
        notes = []
        for name, size_bytes in tangents(planned.analysis):
            if size_bytes > NOTEWORTHY_SHARE * planned.plan.peak_bytes:
                notes.append(tangent_note(name.removeprefix("tangents_"), size_bytes))
        if self.shared_outputs:
            notes.append(VIEWS_NOTE)
        asked_bytes = self.session.options.budget.resolve(baseline_peak_bytes(planned.plan.problem))
        plan = replace(planned.plan, budget_bytes=asked_bytes)
        self.record = GraphRecord(plan, trace_s, planned.profile_s, tuple(notes), self.piece)
        primals = primals_of(planned.analysis.joint)
        if len(primals) == self.num_inputs:  # else AOTAutograd has merged or split some
            mutated = planned.analysis.joint.mutated
            self.written = frozenset(i for i, n in enumerate(primals) if n.name in mutated)
        self.session.graphs.append(self.record)

    def aim(self, target_bytes: int) -> None:
        """Plan for less than the budget; the next partition takes the plan's place. [bytes]"""
        self.target_bytes = target_bytes
        self.session.graphs = [r for r in self.session.graphs if r is not self.record]

    def mark(self) -> None:
        """The graph runs now."""
        if self.record is None:
            plan = nothing_to_plan(self.session, self.device, self.resident_bytes)
            self.record = GraphRecord(plan, 0.0, 0.0, (), self.piece, differentiated=False)
            self.session.graphs.append(self.record)
        self.session.mark(self.record)

    def forward_compiler(self, module: fx.GraphModule, _inputs: object) -> Boxed:
        return boxed(module, before=self.mark)

    def backward_compiler(self, module: fx.GraphModule, _inputs: object) -> Boxed:
        return boxed(module, before=self.check_backward)

    def check_backward(self) -> None:
        """The backward is about to run."""
        self.session.turn()
        if self.record is not None and keeps_graph():
            self.record.check_retained()
        if self.record is not None and self.device.type == "cuda" and self.session.alone:
            self.record.check_entry(torch.cuda.memory_allocated(self.device))

    def inference_compiler(self, module: fx.GraphModule, _inputs: object) -> Boxed:
        return boxed(module, before=self.mark)


class ReferenceTrace(Trace):
    """The unrewritten graph on its way through AOTAutograd: no plan, torch's own partition."""

    def partition(
        self,
        module: fx.GraphModule,
        _inputs: object,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return reference_partition(
            module,
            _inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
        )


def nothing_to_plan(session: Session, device: torch.device, resident_bytes: int) -> Plan:
    """The plan of a graph without a backward: nothing is saved, nothing recomputed."""
    problem = RematProblem(
        (), (), 0, (), (), (), resident_bytes, device=str(device), name=session.name
    )
    budget_bytes = session.options.budget.resolve(resident_bytes)
    return make_plan(problem, budget_bytes, Solution(Schedule((), ())), solver="nothing to do")


def require_device(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse to trace for CUDA where torch has no such device.

    A trace runs autograd on fake tensors, and its engine asks the device for streams: without one
    it raises, or ends the process where torch was built for the CPU.

    Raises:
        CaptureError: It would.
    """
    if any(tensor.device.type == "cuda" for tensor in tensors) and not torch.cuda.is_available():
        raise CaptureError(
            "the model or its arguments are on 'cuda', and torch sees no CUDA device here; "
            "its autograd "
            "cannot trace a backward for one, not even of fake tensors. Capture on a machine "
            "that has one "
            "and save the problem, or put the fake tensors on 'cpu'."
        )


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The one device that a step runs on.

    Host scalars are allowed beside a device: operators take them as arguments.

    Raises:
        UnsupportedGraphError: There are two.
    """
    found: dict[torch.device, str] = {}
    for tensor in tensors:
        if tensor.dim() > 0:
            found.setdefault(tensor.device, f"a tensor of shape {tuple(tensor.shape)}")
    if len(found) > 1:
        where = "; ".join(f"{name} on {device}" for device, name in found.items())
        raise UnsupportedGraphError(
            f"the step uses {len(found)} devices ({where}), and a budget speaks of one. "
            "Move the model and its arguments to one device, or optimise the part on each by "
            "itself."
        )
    return next(iter(found), torch.device("cpu"))


def bytes_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages on a device, as its allocator counts them. [bytes]"""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.device == device and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = round_up(storage.nbytes(), device)
    return sum(sizes.values())


def gradients_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that exist now."""
    return [t.grad for t in tensors if t.is_leaf and t.grad is not None]


def gradient_bytes(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of a gradient for every leaf that takes one. [bytes]"""
    wanted = {id(t): t for t in tensors if t.is_leaf and t.requires_grad and t.device == device}
    return sum(round_up(t.numel() * t.element_size(), device) for t in wanted.values())


def expected_gradient_bytes(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of a gradient for every parameter, and of those that other tensors have now. [bytes]"""
    kept = (t for t in tensors if t.is_leaf)
    return gradient_bytes(
        device, [t for t in kept if isinstance(t, torch.nn.Parameter) or t.grad is not None]
    )


def _identity(options: Any) -> str:
    """What a compiled graph depends on besides itself, for Inductor's cache."""
    return repr(replace(options, progress=None))
