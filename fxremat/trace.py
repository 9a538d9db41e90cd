"""One graph on its way through AOTAutograd, and the code that runs it afterwards."""

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxremat.budget import Budget
from fxremat.code import Code, Fit, Pending, ends_of_code
from fxremat.errors import UnsupportedGraphError
from fxremat.notes import CHECKPOINTED, HOOKED, notes_of
from fxremat.passes.aliases import MARK, Aliases, aliases_of
from fxremat.passes.boxed import Boxed, boxed, dispatching, leaving_out
from fxremat.passes.contexts import checkpointed
from fxremat.passes.ends import ends_of
from fxremat.passes.gradients import drop_gradients_of_writes
from fxremat.passes.joint import Joint, primals_of
from fxremat.passes.reach import Reach, has_hooks, reach_of, references, untouched
from fxremat.passes.recurrent import as_it_runs, mkldnn_enabled
from fxremat.passes.shared import Shared
from fxremat.passes.split import Split
from fxremat.passes.symbolic import Place, Sizes, at_sizes, is_symbolic, sizes_of
from fxremat.passes.tangents import given
from fxremat.passes.tracing import joint_of, keep_buffers, keeps_graph
from fxremat.pipeline import Planned, partition, rewritten, written
from fxremat.planning import baseline_peak_bytes, make, make_lean
from fxremat.plans import Plan, Solution, make_plan
from fxremat.problem import RematProblem
from fxremat.records import GraphRecord, Piece
from fxremat.session import Session
from fxremat.simulate import Schedule
from fxremat.sizes import plan_at, posed_at, runs
from fxremat.together import seen

MOST_FITS = 128  # sizes of one graph whose plans are kept


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
        self.writes = False  # the step writes to inputs
        self.written: frozenset[int] | None = None  # inputs that the step writes to
        self.num_inputs = 0
        self.inputs: Sequence[tuple[str, Any]] = ()  # what it is traced with, while it is
        self.aliases = Aliases()
        self.leaves: frozenset[int] = frozenset()  # inputs that others have not computed
        self.shared = Shared()
        self.mkldnn = mkldnn_enabled()  # as the step will find it
        self.reach = Reach()
        self.untouched: frozenset[int] = frozenset()  # inputs that get no gradient, whatever comes
        self.absent: frozenset[int] = frozenset()  # gradients that this backward does not owe
        self.start_s = session.started_s or time.perf_counter()
        self.planned: Planned | None = None  # kept where other pieces share the budget
        self.graphs: Split | None = None
        self.swappable = True  # other code can take the place of what AOTAutograd compiled
        self.code: Code | None = None
        self.running: Code | None = None  # that of the forward or backward in progress
        self.codes: weakref.WeakKeyDictionary[Any, Pending] = weakref.WeakKeyDictionary()
        self.places: tuple[Place, ...] = ()  # of its symbols
        self.sizes: Sizes = ()  # of the call in progress
        self.symbolic: Joint | None = None  # kept where other sizes may follow
        self.fits: dict[Sizes, Fit] = {}  # of other calls
        self.around: Callable[[Sequence[Any], int], tuple[int, Piece]] | None = None

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
        """The joint graph with what is known of its ends, at the sizes of this call."""
        drop_gradients_of_writes(module, num_fwd_outputs, self.leaves)
        joint = self.shared.within(joint_of(module, num_fwd_outputs))
        self.know(joint)
        if not is_symbolic(module):
            return joint
        self.symbolic = joint
        return at_sizes(joint, self.sizes)

    def know(self, joint: Joint) -> None:
        """Remember what calls and backwards have to know of the joint graph's ends."""
        self.reach = reach_of(joint)
        self.writes = bool(joint.mutated)
        self._lay(joint)
        primals = primals_of(joint)
        if len(primals) == self.num_inputs:  # else AOTAutograd has merged or split some
            self.written = frozenset(i for i, n in enumerate(primals) if n.name in joint.mutated)
            if not self.shared.lent:  # else an output may be made from one of them
                self.untouched = untouched(joint) - self.written

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
        notes = notes_of(planned, self.shared)
        plan, shares = planned.plan, self.session.shares
        if not shares:
            budget_bytes = self.session.options.budget.resolve(baseline_peak_bytes(plan.problem))
            plan = replace(plan, budget_bytes=budget_bytes)
        self.record = GraphRecord(
            plan,
            trace_s,
            planned.profile_s,
            notes,
            self.piece,
            ends=ends_of(planned.analysis) if shares else None,
            constant_bytes=plan.problem.resident_bytes - self.resident_bytes,
        )
        self.session.graphs.append(self.record)
        self.graphs = planned.graphs
        self.planned = planned if shares else None
        if shares and self.swappable:
            self.record.adopt = self.adopt

    def aim(self, target_bytes: int) -> None:
        """Plan for less than the budget; the next partition takes the plan's place. [bytes]"""
        self.target_bytes = target_bytes
        self.session.graphs = [r for r in self.session.graphs if r is not self.record]

    def coming(self, args: Sequence[Any]) -> Sequence[Any]:
        """A call comes: what is planned for its sizes takes its place.

        Returns:
            The arguments, detached where they have hooks and no gradient comes to them: autograd
            would run the hooks without one.

        Raises:
            InfeasibleBudgetError: Its sizes do not fit into the budget.
            UnsupportedGraphError: What the forward writes would be written once where eager
                writes it twice, or shares memory with other inputs than when it was traced.
        """
        self.aliases.check(self.session.name, args, self._saved())
        if self.writes and torch.is_grad_enabled() and checkpointed():
            raise UnsupportedGraphError(CHECKPOINTED.format(name=self.session.name))
        if self.symbolic is not None:
            self._meet(sizes_of(self.places, args), args)
        if not any(has_hooks(args[place]) for place in self.untouched):
            return args
        return [
            value.detach() if place in self.untouched and isinstance(value, torch.Tensor) else value
            for place, value in enumerate(args)
        ]

    def unchecked(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        """What autograd saves of a call's inputs without a look at their versions."""
        return self.aliases.unchecked(args, self._saved())

    def _lay(self, joint: Joint) -> None:
        """Remember how the inputs lie; when a graph is compiled once more, that is known."""
        if self.inputs:
            self.aliases = aliases_of(joint, self.inputs, self.session.name)
        else:
            self.aliases.mark(joint)

    def _saved(self) -> Sequence[str]:
        return self.graphs.saved if self.graphs is not None else ()

    def _meet(self, sizes: Sizes, args: Sequence[Any]) -> None:
        """Put what is planned for some sizes in its place."""
        if sizes == self.sizes:
            return
        self.fits[self.sizes] = Fit(self.record, self.planned, self.graphs, self.code)
        while len(self.fits) > MOST_FITS:
            oldest = self.fits.pop(next(iter(self.fits))).record
            self.session.graphs = [r for r in self.session.graphs if r is not oldest]
        if (known := self.fits.pop(sizes, None)) is None:
            self._fit(sizes, args)
        else:
            self.record, self.planned = known.record, known.planned
            self.graphs, self.code = known.graphs, known.code
        self.sizes = sizes

    def _fit(self, sizes: Sizes, args: Sequence[Any]) -> None:
        """Plan the graph for sizes that it meets for the first time."""
        assert self.symbolic is not None  # for coming to call
        assert self.around is not None
        options = self.session.options
        resident_bytes, piece = self.around(args, self.piece.frame)
        posed = posed_at(
            self.symbolic,
            sizes,
            options,
            resident_bytes=resident_bytes,
            device=self.device,
            name=self.session.name,
            mkldnn=self.mkldnn,
        )
        plans = {sizes: fit.record.plan for sizes, fit in self.fits.items() if fit.record}
        choose = make_lean if self.session.shares else make
        plan = plan_at(posed.problem, options, plans.values(), choose)
        same = (self.fits[key] for key, known in plans.items() if runs(known, plan))
        fit = next(same, None)
        graphs, code = (fit.graphs, fit.code) if fit is not None else (None, None)
        if graphs is None or code is None:
            graphs = written(posed, plan, options)
            code = self._another(graphs)
        self.resident_bytes, self.piece, self.code = resident_bytes, piece, code
        self.keep(Planned(graphs, plan, posed.analysis, posed.profile_s), 0.0)

    def _another(self, graphs: Split) -> Code:
        """Code that can run in place of what AOTAutograd compiled.

        Raises:
            UnsupportedGraphError: It has changed the graph's ends, so nothing else can.
        """
        if not self.swappable:
            raise UnsupportedGraphError(
                f"{self.session.name} cannot be planned again for other sizes: AOTAutograd has "
                "changed what its graph takes or returns. Say dynamic=False: each shape gets a "
                "graph of its own.",
            )
        return Code(boxed(graphs.forward), boxed(graphs.backward))

    def adopt(self, schedule: Schedule) -> None:
        """Let another schedule run from the next forward on."""
        assert self.planned is not None  # only then can the record be asked to adopt one
        self.code = self._another(rewritten(self.planned, schedule))

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
            inputs = references(args) if len(args) == len(self.reach.gradients) else ()
            self.codes[context] = Pending(self.running, self.record, inputs)
        shares = self.session.shares
        arguments = [*seen(args, self.device), *seen(self.held(), self.device, numbered=False)]
        returned = seen(outputs, self.device)
        self.session.passed(
            self.record, arguments if shares else (), returned if shares else (), context
        )

    def turns(self, context: object, tangents: Sequence[object]) -> None:
        """A backward starts."""
        flight = self.codes.get(context, Pending(self.running, self.record))
        self.running, record = flight.code, flight.record
        self.absent = self.reach.absent(tangents)
        found = (reference() for i, reference in enumerate(flight.inputs) if i in self.absent)
        if any(has_hooks(tensor) for tensor in found):
            raise UnsupportedGraphError(HOOKED.format(name=self.session.name))
        keeps = keeps_graph()
        gradient_bytes, holds = self._gradient_bytes(flight), given(tangents)
        self.session.turn(context, record, gradient_bytes, keeps_graph=keeps, given=holds)
        if record is not None and self.device.type == "cuda" and self.session.alone:
            record.check_entry(torch.cuda.memory_allocated(self.device))

    def _gradient_bytes(self, flight: Pending) -> int:
        """Gradients that exist now; where nobody knows the module, those of the graph's inputs."""
        if self.session.find_gradients is not None:
            return self.session.find_gradients()
        given = (reference() for reference in flight.inputs)
        found = seen((t.grad for t in given if t is not None and t.is_leaf), self.device)
        return sum({each.key: each.size_bytes for each in found}.values())

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

        return leaving_out(dispatching(choose), lambda: self.absent)

    def _must_be_as_planned(self, module: fx.GraphModule, *, backward: bool) -> None:
        """Where AOTAutograd has changed a graph's ends, no other schedule can take its place."""
        if self.record is None or self.graphs is None:
            return
        mine = self.graphs.backward if backward else self.graphs.forward
        unchecked = any(node.meta.get(MARK) for node in mine.graph.find_nodes(op="placeholder"))
        if unchecked or ends_of_code(module) != ends_of_code(mine):
            self.swappable, self.record.adopt = False, None

    def inference_compiler(self, module: fx.GraphModule, _inputs: object) -> Boxed:
        """AOTAutograd's compiler of graphs without a backward."""
        code = boxed(module)
        self._lay(joint_of(module, ends_of_code(module)[1]))

        def choose() -> Boxed:
            self.mark()
            return code

        return dispatching(choose)


def nothing_to_plan(session: Session, device: torch.device, resident_bytes: int) -> Plan:
    """The plan of a graph without a backward: nothing is saved, nothing recomputed."""
    problem = RematProblem(
        (), (), 0, (), (), (), resident_bytes, device=str(device), name=session.name
    )
    budget_bytes = session.options.budget.resolve(resident_bytes)
    return make_plan(problem, budget_bytes, Solution(Schedule((), ())), solver="nothing to do")
