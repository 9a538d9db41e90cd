"""What one optimised module or function knows: its options, its graphs, which of them ran last."""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxremat.errors import FxrematError, InfeasibleBudgetError, OverBudgetError
from fxremat.limits import check_gradients, check_pieces, refuse_another
from fxremat.options import Options
from fxremat.plans import Plan
from fxremat.records import Flight, GraphRecord
from fxremat.reporting import RematReport, remat_report
from fxremat.reserve import reserve_bytes
from fxremat.together import Call, Seen, Together, keep_little, together


@dataclass
class Session:
    """The state behind one optimised module or function.

    Attributes:
        options: What was asked for.
        name: What was optimised, for people.
        graphs: Every graph captured, in order.
        call: The call in progress, or the last one.
        last: The last call before it that ran a graph.
        known: The kinds of call whose pieces have been planned together.
        told: Whether ``begin`` says where a call starts; ``torch.compile`` does not.
        on_inputs: Told the names and values of a graph's inputs before it first runs.
        started_s: When the trace in progress began. [s]
        alone: Nobody else's tensors are on the device, so what it holds can be compared.
        waiting: Autograd nodes of forwards whose backward has not run.
        find_gradients: Bytes of the gradients that exist now; None where only graphs know. [bytes]
    """

    options: Options
    name: str = ""
    graphs: list[GraphRecord] = field(default_factory=list)
    call: Call = field(default_factory=Call)
    last: Call = field(default_factory=Call)
    known: list[Together] = field(default_factory=list)
    on_inputs: Callable[[Sequence[tuple[str, Any]]], None] = lambda found: None
    started_s: float = 0.0
    told: bool = False
    turned: bool = False  # a backward has begun since the last forward
    alone: bool = True
    once: set[tuple[int, ...]] = field(default_factory=set)  # kinds of call that came once
    little: bool = False  # each piece keeps as little as it can, and no plan is made for all
    here: threading.local = field(default_factory=threading.local)  # this thread's call
    number: int = 0  # of the call
    waiting: "weakref.WeakKeyDictionary[Any, Flight]" = field(
        default_factory=weakref.WeakKeyDictionary
    )
    find_gradients: Callable[[], int] | None = None

    @property
    def shares(self) -> bool:
        """May a call run several graphs, which are to be planned together?"""
        return not self.options.fullgraph and self.options.executor == "eager"

    @property
    def ran(self) -> list[GraphRecord]:
        """The graphs that the last call ran, in order."""
        return self.call.ran

    @property
    def existing_bytes(self) -> int:
        """Gradients that the last call found. [bytes]"""
        return self.call.existing_bytes

    @property
    def idle(self) -> bool:
        """Has no planned graph run since this thread's call began?"""
        return bool(getattr(self.here, "idle", False))

    def begin(self, existing_bytes: int) -> None:
        """A call starts, and finds gradients of so many bytes."""
        self._next(existing_bytes)
        self.here.idle = True
        self.told = True
        self.started_s = time.perf_counter()

    def _next(self, existing_bytes: int = 0) -> None:
        self.settle()
        if self.call.ran:
            self.last = self.call
        self.call = Call(existing_bytes=existing_bytes)
        self.number += 1

    def turn(
        self,
        context: object,
        record: GraphRecord | None,
        gradient_bytes: int,
        *,
        keeps_graph: bool,
        given: bool = False,
    ) -> None:
        """A backward starts; unless the graph is kept, its forward waits no more.

        Args:
            context: Its autograd node.
            record: Its graph; None where nothing is planned.
            gradient_bytes: Gradients that exist now. [bytes]
            keeps_graph: It may run once more.
            given: The caller has made some of its tangents, and holds them.

        Raises:
            InfeasibleBudgetError: It keeps its graph, for which there is no room.
            OverBudgetError: There is no room beside gradients that came since the forward.
        """
        self.turned = True
        if record is not None:
            flight = self.waiting.get(context)
            others = self._others(self.number if flight is None else flight.call)
            more_bytes = sum(each.held_bytes for each in others)
            if len(self.ran) == 1:  # of several pieces, the gradients of later ones are planned for
                more_bytes += max(0, gradient_bytes - record.piece.existing_bytes)
            if given:
                self.check_given(record)
            record.check_backward(more_bytes, keeps_graph=keeps_graph)
        if not keeps_graph:
            self.waiting.pop(context, None)

    def check_given(self, record: GraphRecord) -> None:
        """Is there room for tangents that the caller holds until the backward has returned?

        Raises:
            OverBudgetError: There is not.
        """
        plan, reserve = record.plan, self.options.reserve
        aside_bytes = 0 if hasattr(reserve, "param_groups") else reserve_bytes(reserve)
        peak_bytes = record.given_peak_bytes - aside_bytes
        if peak_bytes <= plan.budget_bytes:
            return
        more_bytes = record.given_peak_bytes - record.peaks_bytes[1]
        raise OverBudgetError(
            f"this backward was given gradients, which its caller holds until it returns: with "
            f"{more_bytes:,} bytes more than planned it would hold {peak_bytes:,} bytes, above the "
            f"budget of {plan.budget_bytes:,} bytes. Say reserve={more_bytes}, or let the loss be "
            "computed from the outputs, so that autograd makes the gradients.",
            peak_bytes,
            plan.budget_bytes,
        )

    def earlier(self, frame: int) -> list[GraphRecord]:
        """The pieces of the call in progress that have run when code of a frame comes next.

        Where nobody tells, a call starts after a backward, or when a frame comes again.
        """
        if not self.told and (self.turned or any(r.piece.frame == frame for r in self.ran)):
            self._next()
        self.turned = False
        return self.ran

    def mark(self, record: GraphRecord) -> None:
        """A graph starts to run.

        Raises:
            InfeasibleBudgetError: It would take the pieces of this call, or the forwards that wait
                for their backward, over the budget together.
            OverBudgetError: Gradients exist that the plan took for freed, and there is no room.
        """
        more_bytes = self.existing_bytes - record.piece.existing_bytes
        if record.differentiated and more_bytes > 0:
            check_gradients(record.plan, more_bytes, self.options.gradients)
        ran = [*self.earlier(record.piece.frame), record]
        if self.told and self.options.fullgraph and len(ran) > 1:  # another thread's call
            self.call = Call(existing_bytes=self.existing_bytes)
            ran = [record]
        known = self._following(tuple(r.key for r in ran if r.differentiated))
        if record.differentiated:
            self._check_waiting(known.record if known is not None else record)
        limited = self.options.budget.bytes_ is not None  # a percentage is of what is not known yet
        if known is None and len(ran) > 1 and limited:
            with self.giving_way():
                check_pieces(ran)
        self.call.ran.append(record)
        self.here.idle = False

    def passed(
        self,
        record: GraphRecord,
        arguments: Iterable[Seen],
        outputs: Iterable[Seen],
        context: object | None,
    ) -> None:
        """A graph has run forward; its context lives until its backward cannot run any more."""
        if not record.differentiated:
            return
        if self.shares:
            self.call.passed(record, arguments, outputs)
        if context is not None:
            waiting_bytes = record.plan.problem.waiting_bytes
            self.waiting[context] = Flight(self.number, record.flight_bytes, waiting_bytes)

    @contextlib.contextmanager
    def giving_way(self) -> Iterator[None]:
        """Where a new piece does not fit beside others that follow a plan, end that plan.

        From the next call on each piece keeps as little as it can, for good.

        Raises:
            InfeasibleBudgetError: What was raised inside, with that in words.
        """
        try:
            yield
        except InfeasibleBudgetError as error:
            self.call = Call(existing_bytes=self.existing_bytes)  # what has run is no whole call
            if not self.known or self.little:
                raise
            self.little = True
            for each in self.known:
                keep_little(each)
            raise InfeasibleBudgetError(
                f"{error} The pieces before it followed a plan that did not know it; from now on "
                "each piece keeps as little as it can, so the same call may fit when it is made "
                "again.",
                error.budget_bytes,
                error.floor_bytes,
            ) from None

    def settle(self, *, asked: bool = False) -> None:
        """Plan the pieces of the last call together, once for each kind of call.

        The first kind is planned at once. A kind that comes later may be one of many, where pieces
        are compiled anew again and again: all pieces then keep as little as they can, until a kind
        comes a second time.

        Args:
            asked: A report is wanted, of whatever has run.

        Raises:
            InfeasibleBudgetError: A percentage of the baseline turned out to be too little.
        """
        if not self.shares or not self.call.pieces:
            return
        key, found = self.call.key, self._found()
        if found is not None and (asked or not found.waits):
            return
        new = bool(self.known) and found is None and key not in self.once
        if new:
            for each in self.known:
                if not each.waits and each.keys & set(key):
                    keep_little(each)
                    each.waits = True
            if not asked:
                self.once.add(key)
                return
        planned = together(self.call, self.options, self.known, little=self.little or new)
        if planned is not None:
            planned.waits = new
            self.known = [each for each in self.known if each is not found]
            self.known.append(planned)

    def _found(self) -> Together | None:
        """The plan of all pieces of the last call."""
        key = self.call.key
        return next((t for t in self.known if tuple(r.key for r in t.records) == key), None)

    def _following(self, ran: tuple[int, ...]) -> Together | None:
        """A kind of call that begins like this one and is planned within the budget."""
        for each in self.known:
            plan = each.record.plan
            begins = tuple(r.key for r in each.records[: len(ran)]) == ran
            if begins and plan.peak_bytes <= plan.budget_bytes:
                return each
        return None

    def _check_waiting(self, record: GraphRecord) -> None:
        """Is there room beside forwards of other calls that wait for their backward?"""
        budget_bytes = record.plan.budget_bytes
        others = self._others(self.number)
        if others and record.peak_beside(others) > budget_bytes:
            gc.collect()  # a cycle may keep what nobody can run back any more
            others = self._others(self.number)
            if others and record.peak_beside(others) > budget_bytes:
                refuse_another(record, others)

    def _others(self, call: int) -> list[Flight]:
        """The calls beside one that wait for their backward, each with all its pieces."""
        found: dict[int, Flight] = {}
        for number, held_bytes, waiting_bytes in self.waiting.values():
            if number != call:
                before = found.get(number, Flight(number, 0, 0))
                found[number] = Flight(
                    number, before.held_bytes + held_bytes, before.waiting_bytes + waiting_bytes
                )
        return list(found.values())

    def only_plan(self) -> Plan:
        """The plan of the last call: of its one graph, or of all its pieces together.

        Raises:
            FxrematError: It ran none, or several without one plan.
        """
        found = self._found() if self.shares else None
        if found is not None:
            return found.record.plan
        if len(self.ran) != 1:
            raise FxrematError(
                f"{self.name} ran {len(self.ran)} planned graphs in one call; this needs "
                "exactly one."
            )
        return self.ran[0].plan

    def report(self) -> RematReport:
        """The report of the last call that ran.

        Raises:
            FxrematError: No call has run yet.
        """
        if not self.ran and self.last.ran:  # the call in progress has raised before it ran
            self.call = self.last
        if not self.ran:
            raise FxrematError(
                f"{self.name or 'this callable'} has not run a planned graph yet: plans are "
                "made in "
                "the first call. Call it once, then ask for the report."
            )
        self.settle(asked=True)
        found = self._found() if self.shares else None
        records = self.ran if found is None else [found.record]
        ran = [record.report_with(self.existing_bytes) for record in records]
        return remat_report(ran, [record.report for record in self.graphs])
