"""The Dynamo backend: what happens to one graph that Dynamo has captured."""

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.multiprocessing.reductions import StorageWeakRef

from fxremat.budget import Budget
from fxremat.errors import CaptureError, UnsupportedGraphError
from fxremat.passes.boxed import Boxed, boxed, dispatching
from fxremat.passes.contexts import watched
from fxremat.passes.cublas import cublas_bytes
from fxremat.passes.ends import ends_of
from fxremat.passes.gradients import drop_gradients_of_writes
from fxremat.passes.inner import is_unknown
from fxremat.passes.joint import Joint, primals_of, target_name
from fxremat.passes.recurrent import (
    as_it_runs,
    mkldnn_enabled,
    plain_recurrence,
    refuse_lost_dropout,
)
from fxremat.passes.reference import reference_partition
from fxremat.passes.seeding import tensors_in
from fxremat.passes.select import detach_the_rest
from fxremat.passes.shared import Shared, shared_outputs
from fxremat.passes.storages import round_up
from fxremat.passes.tracing import (
    compiling,
    current_frame,
    joint_of,
    keep_buffers,
    keeps_graph,
)
from fxremat.pipeline import Planned, partition, rewritten, tangents
from fxremat.planning import baseline_peak_bytes, make, make_lean
from fxremat.plans import Plan, Solution, make_plan
from fxremat.problem import RematProblem
from fxremat.records import GraphRecord, Piece
from fxremat.reserve import reserve_bytes
from fxremat.session import Session, tangent_note
from fxremat.simulate import Schedule
from fxremat.together import Seen
from fxremat.trial import compile_and_try
from fxremat.unplanned import refuse_subclasses

VIEWS_NOTE = (
    "some outputs are arguments, or views of arguments or of one another: autograd adds their "
    "gradients up outside the graph, and the memory for that is counted at its most. Returning "
    "one of them, or clones, needs less."
)
UNKNOWN_NOTE = (
    "what {names} hold inside themselves is not known and taken as 0: fxremat.verify measures the "
    "step; leave room with reserve=."
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
        refuse_subclasses(self.session.name, inputs)
        if options.keys is not None:
            graph = detach_the_rest(graph, options.keys)
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        found = zip(names, inputs, strict=True)
        self.session.on_inputs([f for f in found if not self.session.shares or _is_given(f[1])])
        given = [value for value in inputs if isinstance(value, torch.Tensor)]
        device = device_of(given)
        resident = [*given, *self.held()]
        existing_bytes = 0
        if self.with_gradients:
            existing_bytes = expected_gradient_bytes(device, resident)
        elif options.gradients == "auto":
            existing_bytes = bytes_on(device, gradients_of(resident))
            existing_bytes = max(existing_bytes, self.session.existing_bytes)
        fixed_bytes = reserve_bytes(options.reserve) + existing_bytes + cublas_bytes(device)
        fixed_bytes += self.outside_bytes
        piece = self.piece(device, given, existing_bytes, fixed_bytes)
        total_bytes = bytes_on(device, resident) + fixed_bytes + piece.others_bytes
        trace = self.trace(self.session, device, total_bytes, piece, self.held)
        trace.num_inputs = len(inputs)
        trace.leaves = frozenset(
            i for i, v in enumerate(inputs) if isinstance(v, torch.Tensor) and v.is_leaf
        )
        trace.shared = shared_outputs(graph)
        refuse_lost_dropout(graph.graph)
        with compiling(), plain_recurrence(graph.graph):
            if options.executor == "inductor":
                code = compile_and_try(graph, inputs, trace, _identity(options))
                return watched(code, trace)
            return watched(self.compile(graph, inputs, trace), trace)

    def piece(
        self,
        device: torch.device,
        given: list[torch.Tensor],
        existing_bytes: int,
        fixed_bytes: int,
    ) -> Piece:
        """What other pieces of the same call hold while this one runs forward or back."""
        frame = current_frame()
        earlier = sum(record.held_bytes for record in self.session.earlier(frame))
        mine = {id(tensor) for tensor in given}
        breaks = not self.session.options.fullgraph
        outside = [t for t in self.held() if id(t) not in mine] if breaks else []
        return Piece(
            frame,
            others_bytes=earlier + gradient_bytes(device, outside),
            earlier_bytes=earlier,
            gradient_bytes=gradient_bytes(device, given),
            existing_bytes=existing_bytes,
            fixed_bytes=fixed_bytes,
        )

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


@dataclass(frozen=True)
class Code:
    """What runs one schedule of a graph: boxed callables."""

    forward: Boxed
    backward: Boxed | None = None


class Trace:
    """One graph on its way through AOTAutograd, and the code that runs it afterwards.

    AOTAutograd gets callables that ask for the code each time, so that a plan can change between
    steps. A backward runs the code that belongs to its own forward.
    """

    def __init__(
        self,
        session: Session,
        device: torch.device,
        resident_bytes: int,
        piece: Piece,
        held: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        self.session = session
        self.piece = piece
        self.device = device
        self.resident_bytes = resident_bytes
        self.held = held
        self.record: GraphRecord | None = None
        self.target_bytes: int | None = None  # less than the budget, where code holds more
        self.written: frozenset[int] | None = None  # inputs that the step writes to
        self.num_inputs = 0
        self.leaves: frozenset[int] = frozenset()  # inputs that others have not computed
        self.shared = Shared()
        self.mkldnn = mkldnn_enabled()  # as the step will find it
        self.start_s = session.started_s or time.perf_counter()
        self.planned: Planned | None = None  # kept where another schedule may follow
        self.code: Code | None = None
        self.running: Code | None = None  # that of the forward or backward in progress
        self.codes: weakref.WeakKeyDictionary[Any, Code] = weakref.WeakKeyDictionary()

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
        joint = self.joint(module, num_fwd_outputs)
        with as_it_runs(mkldnn=self.mkldnn):
            planned = self._plan(joint)
        self.keep(planned, trace_s)
        return planned.graphs.forward, planned.graphs.backward

    def joint(self, module: fx.GraphModule, num_fwd_outputs: int) -> Joint:
        """The joint graph with what is known of its ends."""
        drop_gradients_of_writes(module, num_fwd_outputs, self.leaves)
        return self.shared.within(joint_of(module, num_fwd_outputs))

    def _plan(self, joint: Joint) -> Planned:
        asked = self.session.options.budget
        return partition(
            joint,
            asked if self.target_bytes is None else Budget(self.target_bytes),
            self.session.options,
            resident_bytes=self.resident_bytes,
            device=self.device,
            name=self.session.name,
            choose=make_lean if self.session.shares else make,
        )

    def keep(self, planned: Planned, trace_s: float) -> None:
        """Remember the plan for the report."""
        notes = []
        for name, size_bytes in tangents(planned.analysis):
            if size_bytes > NOTEWORTHY_SHARE * planned.plan.peak_bytes:
                notes.append(tangent_note(name.removeprefix("tangents_"), size_bytes))
        unknown = [n for n in planned.analysis.joint.graph.nodes if is_unknown(n)]
        if unknown:
            names = ", ".join(dict.fromkeys(target_name(node) for node in unknown))
            notes.append(UNKNOWN_NOTE.format(names=names))
        if self.shared.beside_bytes or self.shared.turn_bytes:
            notes.append(VIEWS_NOTE)
        plan, shares = planned.plan, self.session.shares
        if not shares:
            budget_bytes = self.session.options.budget.resolve(baseline_peak_bytes(plan.problem))
            plan = replace(plan, budget_bytes=budget_bytes)
        self.record = GraphRecord(
            plan,
            trace_s,
            planned.profile_s,
            tuple(notes),
            self.piece,
            ends=ends_of(planned.analysis) if shares else None,
            constant_bytes=plan.problem.resident_bytes - self.resident_bytes,
        )
        primals = primals_of(planned.analysis.joint)
        if len(primals) == self.num_inputs:  # else AOTAutograd has merged or split some
            mutated = planned.analysis.joint.mutated
            self.written = frozenset(i for i, n in enumerate(primals) if n.name in mutated)
        self.session.graphs.append(self.record)
        if shares:
            self.planned, self.record.adopt = planned, self.adopt

    def aim(self, target_bytes: int) -> None:
        """Plan for less than the budget; the next partition takes the plan's place. [bytes]"""
        self.target_bytes = target_bytes
        self.session.graphs = [r for r in self.session.graphs if r is not self.record]

    def adopt(self, schedule: Schedule) -> None:
        """Let another schedule run from the next forward on."""
        assert self.planned is not None  # only then can the record be asked to adopt one
        graphs = rewritten(self.planned, schedule)
        self.code = Code(boxed(graphs.forward), boxed(graphs.backward))

    def mark(self) -> None:
        """The graph runs now."""
        if self.record is None:
            plan = nothing_to_plan(self.session, self.device, self.resident_bytes)
            self.record = GraphRecord(plan, 0.0, 0.0, (), self.piece, differentiated=False)
            self.session.graphs.append(self.record)
        self.session.mark(self.record)

    def passed(self, args: Sequence[Any], outputs: Sequence[Any], context: object | None) -> None:
        """A forward has run."""
        if self.record is None:
            return
        if context is None:
            self.record.adopt = None  # its backward could not tell which code is its own
        elif self.running is not None:
            self.codes[context] = self.running
        shares = self.session.shares
        arguments = [*seen(args, self.device), *seen(self.held(), self.device, numbered=False)]
        returned = seen(outputs, self.device)
        self.session.passed(
            self.record, arguments if shares else (), returned if shares else (), context
        )

    def turns(self, context: object) -> None:
        """A backward starts."""
        self.running = self.codes.get(context, self.running)
        keeps = keeps_graph()
        self.session.turn(context, keeps_graph=keeps)
        if self.record is not None and keeps:
            self.record.check_retained()
        if self.record is not None and self.device.type == "cuda" and self.session.alone:
            self.record.check_entry(torch.cuda.memory_allocated(self.device))

    def forward_compiler(self, module: fx.GraphModule, _inputs: object) -> Boxed:
        """AOTAutograd's compiler of forwards."""
        keep_buffers()
        self.code = Code(boxed(module))
        self._must_be_as_planned(module, backward=False)
        return dispatching(self._forward)

    def _forward(self) -> Boxed:
        self.mark()
        assert self.code is not None  # the forward has been compiled
        self.running = self.code
        return self.code.forward

    def backward_compiler(self, module: fx.GraphModule, _inputs: object) -> Boxed:
        """AOTAutograd's compiler of backwards; called when the first of them starts."""
        first = boxed(module)
        self._must_be_as_planned(module, backward=True)

        def choose() -> Boxed:
            of_forward = self.running.backward if self.running is not None else None
            return of_forward or first

        return dispatching(choose)

    def _must_be_as_planned(self, module: fx.GraphModule, *, backward: bool) -> None:
        """Where AOTAutograd has changed a graph's ends, no other schedule can take its place."""
        if self.record is None or self.planned is None:
            return
        graphs = self.planned.graphs
        mine = graphs.backward if backward else graphs.forward
        unchecked = any(
            node.meta.get("saved_tensor_with_no_vc_check")
            for node in mine.graph.find_nodes(op="placeholder")
        )
        if unchecked or ends_of_code(module) != ends_of_code(mine):
            self.record.adopt = None

    def inference_compiler(self, module: fx.GraphModule, _inputs: object) -> Boxed:
        """AOTAutograd's compiler of graphs without a backward."""
        code = boxed(module)

        def choose() -> Boxed:
            self.mark()
            return code

        return dispatching(choose)


def seen(values: Iterable[Any], device: torch.device, *, numbered: bool = True) -> list[Seen]:
    """The storages behind values that are tensors on a device."""
    found = []
    for position, value in enumerate(values):
        if (
            isinstance(value, torch.Tensor)
            and value.layout is torch.strided
            and value.device == device
        ):
            alive = StorageWeakRef(value.untyped_storage())
            size_bytes = round_up(value.untyped_storage().nbytes(), device)
            found.append(Seen(position if numbered else -1, alive.cdata, size_bytes, alive))
    return found


def _is_given(value: object) -> bool:
    """Is it certain that no piece of the same call has made it?"""
    return isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad


def storages_in(output: Any) -> list[Seen]:
    """The storages behind the tensors of an output, however it is packed."""
    tensors = tensors_in(output)
    return [one for tensor in tensors for one in seen([tensor], tensor.device)]


def ends_of_code(module: fx.GraphModule) -> tuple[int, int]:
    """How many inputs and outputs a graph has."""
    (output,) = module.graph.find_nodes(op="output")
    return len(module.graph.find_nodes(op="placeholder")), len(output.args[0])


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
        drop_gradients_of_writes(module, num_fwd_outputs, self.leaves)
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
