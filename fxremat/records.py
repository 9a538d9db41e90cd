"""What is known of each captured graph: its plan, and what it holds while other graphs run."""

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from fxremat.errors import InfeasibleBudgetError, OverBudgetError
from fxremat.pieces import Ends
from fxremat.planning import baseline_peak_bytes, floor_plan
from fxremat.plans import Plan
from fxremat.problem import Kind
from fxremat.reporting import GraphReport, graph_report
from fxremat.simulate import Schedule, Simulation, simulate

_keys: Iterator[int] = itertools.count()


@dataclass(frozen=True, slots=True)
class Piece:
    """A graph as one of several that a call runs, where graph breaks are accepted.

    Attributes:
        frame: Dynamo's number of the code that the graph comes from.
        others_bytes: What other pieces of the call were assumed to hold; part of resident. [bytes]
        earlier_bytes: Those of them that had run before; part of others. [bytes]
        gradient_bytes: Gradients of its leaf inputs, there once it has been run back. [bytes]
        existing_bytes: Gradients that it was planned to find; part of resident. [bytes]
        fixed_bytes: Held by nobody's tensors: existing gradients, reserve, workspaces; part of
            resident. [bytes]
    """

    frame: int = -1
    others_bytes: int = 0
    earlier_bytes: int = 0
    gradient_bytes: int = 0
    existing_bytes: int = 0
    fixed_bytes: int = 0


class Flight(NamedTuple):
    """A forward that waits for its backward.

    Attributes:
        call: The number of its call.
        held_bytes: What it holds. [bytes]
        waiting_bytes: What its gradients take once it has run back, while others do. [bytes]
    """

    call: int
    held_bytes: int
    waiting_bytes: int


UNSPLIT_BYTES = 1 << 20  # c10/cuda/CUDACachingAllocator: a rest up to this stays with its block


@dataclass
class GraphRecord:
    """One captured graph with the plan that runs it.

    Attributes:
        plan: What runs.
        trace_s: Time to trace. [s]
        profile_s: Time to measure costs. [s]
        notes: Hints, a sentence each.
        piece: The graph as one of several.
        differentiated: It has a backward.
        ends: Where its arguments and results are in its problem.
        constant_bytes: Tensors that the graph itself carries; part of resident. [bytes]
        adopt: Lets another schedule run from the next forward on; None where that cannot be.
        find_floor_bytes: Finds the least peak; None: that of the problem.
        key: Its number in this process.
        first: The schedule that it was compiled with.
        alone_bytes: Resident bytes when it was compiled, without what earlier pieces held. [bytes]
        outside_bytes: Gradients of others among them. [bytes]
    """

    plan: Plan
    trace_s: float
    profile_s: float
    notes: tuple[str, ...]
    piece: Piece = Piece()
    differentiated: bool = True
    ends: Ends | None = None
    constant_bytes: int = 0
    adopt: Callable[[Schedule], None] | None = None
    find_floor_bytes: Callable[[], int] | None = None
    key: int = field(default_factory=lambda: next(_keys))
    _report: GraphReport | None = None

    def __post_init__(self) -> None:
        self.first = self.plan.schedule
        self.alone_bytes = self.plan.problem.resident_bytes - self.piece.earlier_bytes
        self.outside_bytes = self.piece.others_bytes - self.piece.earlier_bytes

    def replan(self, plan: Plan, piece: Piece) -> None:
        """Take another plan for the same graph."""
        self.plan, self.piece, self._report = plan, piece, None
        names = ("alone", "held_bytes", "retained_peak_bytes", "given_peak_bytes", "flight_bytes")
        for name in names:
            self.__dict__.pop(name, None)

    @property
    def given_bytes(self) -> int:
        """What its plan knows of that no piece made: parameters, arguments, reserve. [bytes]"""
        piece = self.piece
        return self.plan.problem.resident_bytes - piece.others_bytes - piece.existing_bytes

    @property
    def given_alone_bytes(self) -> int:
        """The same when it was compiled, before all pieces were planned together. [bytes]"""
        return self.alone_bytes - self.outside_bytes - self.piece.existing_bytes

    def has_room(self, existing_bytes: int) -> bool:
        """Does the plan fit where so many bytes of gradients exist when its step begins?"""
        more_bytes = max(0, existing_bytes - self.piece.existing_bytes)
        return self.plan.peak_bytes + more_bytes <= self.plan.budget_bytes

    @cached_property
    def alone(self) -> Simulation:
        """The plan's step without other forwards in flight."""
        return simulate(replace(self.plan.problem, in_flight=1), self.plan.schedule)

    @cached_property
    def flight_bytes(self) -> int:
        """Held by one more forward of this graph that waits for its backward. [bytes]"""
        two = simulate(replace(self.plan.problem, in_flight=2), self.plan.schedule)
        return two.entry_bytes - self.alone.entry_bytes

    @property
    def peaks_bytes(self) -> tuple[int, int]:
        """Peak up to the entry of the backward, and from there on, with no others. [bytes]"""
        live, entry = self.alone.live_bytes, len(self.plan.schedule.forward)
        return max(live[: entry + 1]), max(live[entry + 1 :])

    def peak_beside(self, flights: Collection[Flight]) -> int:
        """Peak of its step while other forwards wait for their backward. [bytes]

        Each of them runs back before or after it, and leaves its gradients.
        """
        forward_bytes, backward_bytes = self.peaks_bytes
        held_bytes = sum(flight.held_bytes for flight in flights)
        turned = (held_bytes - each.held_bytes + each.waiting_bytes for each in flights)
        return max(forward_bytes + held_bytes, backward_bytes + max((held_bytes, *turned)))

    @property
    def most_in_flight(self) -> int:
        """How many forwards of this graph alone fit at once."""
        left_bytes = self.plan.budget_bytes - max(self.peaks_bytes)
        turned_bytes = self.plan.budget_bytes - self.peaks_bytes[1]
        turned_bytes -= self.plan.problem.waiting_bytes
        each_bytes = max(1, self.flight_bytes)
        others = left_bytes // each_bytes
        return 1 + max(0, min(others, turned_bytes // each_bytes + 1))

    @cached_property
    def held_bytes(self) -> int:
        """Held for this graph between its forward and its backward. [bytes]"""
        problem = self.plan.problem
        tangents_bytes = sum(s.size_bytes for s in problem.storages if s.kind is Kind.TANGENT)
        return self.plan.simulation.entry_bytes - problem.resident_bytes - tangents_bytes

    @cached_property
    def retained_peak_bytes(self) -> int:
        """Peak of a backward that keeps what was saved, resident bytes included. [bytes]"""
        problem = replace(self.plan.problem, in_flight=1)
        return simulate(problem, self.plan.schedule, retain_graph=True).peak_bytes

    @cached_property
    def given_peak_bytes(self) -> int:
        """Peak of a backward whose tangents the caller holds; it stores copies of them. [bytes]"""
        problem = self.plan.problem
        tangents = {g for g, s in enumerate(problem.storages) if s.kind is Kind.TANGENT}
        copied = tangents.intersection(problem.gradients)
        held = replace(
            problem,
            in_flight=1,
            storages=tuple(
                replace(s, held=True) if g in tangents else s
                for g, s in enumerate(problem.storages)
            ),
            copied_bytes=problem.copied_bytes + sum(problem.storages[g].size_bytes for g in copied),
        )
        live = simulate(held, self.plan.schedule).live_bytes
        return max(live[len(self.plan.schedule.forward) + 1 :])

    def check_backward(self, more_bytes: int, *, keeps_graph: bool) -> None:
        """A backward is about to run, while others hold so much that its plan does not know of.

        Raises:
            InfeasibleBudgetError: It keeps its graph, which would pass the budget.
            OverBudgetError: What others hold would take it over the budget.
        """
        if not keeps_graph and not more_bytes:
            return
        peak_bytes = self.retained_peak_bytes if keeps_graph else self.peaks_bytes[1]
        peak_bytes += more_bytes
        if peak_bytes <= self.plan.budget_bytes:
            return
        if keeps_graph:
            raise InfeasibleBudgetError(
                f"backward(retain_graph=True) keeps every saved value until it ends: that takes "
                f"{peak_bytes:,} bytes, more than the budget of {self.plan.budget_bytes:,} bytes. "
                f"Raise the budget to {peak_bytes:,} bytes, or let the backward free the graph.",
                self.plan.budget_bytes,
                peak_bytes,
            )
        raise OverBudgetError(
            f"{more_bytes:,} bytes are held as this backward starts that its plan does not know "
            "of: gradients that are there since its forward (of another backward in between, or of "
            "an earlier one through the same graph), and forwards that wait. With them it would "
            f"hold {peak_bytes:,} bytes, above the budget of {self.plan.budget_bytes:,} bytes. "
            f"Raise the budget to {peak_bytes:,} bytes, say gradients='held', or free those "
            "gradients first.",
            peak_bytes,
            self.plan.budget_bytes,
        )

    def check_entry(self, held_bytes: int) -> None:
        """A backward is about to run on a device that holds so many bytes.

        The allocator may hand out blocks larger than asked for, by up to ``UNSPLIT_BYTES`` each.

        Raises:
            OverBudgetError: The device holds more than the plan knows of, and with that the rest of
                the backward would pass the budget.
        """
        simulation = self.plan.simulation
        more_bytes = held_bytes - simulation.entry_bytes
        sizes = [self.plan.problem.storages[g].size_bytes for g in simulation.saved]
        slack_bytes = UNSPLIT_BYTES * sum(size_bytes > UNSPLIT_BYTES for size_bytes in sizes)
        rest_bytes = max(simulation.live_bytes[len(self.plan.schedule.forward) :])
        if more_bytes <= slack_bytes or rest_bytes + more_bytes <= self.plan.budget_bytes:
            return
        raise OverBudgetError(
            f"the device holds {held_bytes:,} bytes as the backward starts, and the plan knows of "
            f"{simulation.entry_bytes:,}: with the other {more_bytes:,} bytes the backward would "
            f"pass the budget of {self.plan.budget_bytes:,} bytes. Say reserve={more_bytes}, or "
            "free what others hold.",
            held_bytes,
            self.plan.budget_bytes,
        )

    @property
    def report(self) -> GraphReport:
        """Its report, made once."""
        if self._report is None:
            problem = self.plan.problem
            floor_bytes = self.find_floor_bytes or (lambda: floor_plan(problem).peak_bytes)
            self._report = graph_report(
                self.plan,
                baseline_peak_bytes=baseline_peak_bytes(problem),
                find_floor_bytes=floor_bytes,
                trace_s=self.trace_s,
                profile_s=self.profile_s,
                notes=self.notes,
                differentiated=self.differentiated,
            )
        return self._report

    def report_with(self, existing_bytes: int) -> GraphReport:
        """Its report for a call that found gradients; a plan that has room for them still runs."""
        report, more_bytes = self.report, existing_bytes - self.piece.existing_bytes
        if more_bytes <= 0:
            return report
        return replace(
            report,
            resident_bytes=report.resident_bytes + more_bytes,
            baseline_peak_bytes=report.baseline_peak_bytes + more_bytes,
            predicted_peak_bytes=report.predicted_peak_bytes + more_bytes,
            entry_bytes=report.entry_bytes + more_bytes,
            find_floor_bytes=lambda: report.floor_bytes + more_bytes,
        )
