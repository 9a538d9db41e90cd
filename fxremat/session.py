"""What one optimised module or function knows: its options, its graphs, which of them ran last."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fxremat.budget import format_bytes
from fxremat.errors import FxrematError, InfeasibleBudgetError, OverBudgetError
from fxremat.options import Options
from fxremat.planning import baseline_peak_bytes, floor_plan
from fxremat.plans import Plan
from fxremat.problem import Kind
from fxremat.reporting import GraphReport, RematReport, graph_report, remat_report
from fxremat.simulate import simulate


@dataclass(frozen=True, slots=True)
class Piece:
    """A graph as one of several that a call runs, where graph breaks are accepted.

    Attributes:
        frame: Dynamo's number of the code that the graph comes from.
        others_bytes: What other pieces of the call were assumed to hold; part of resident. [bytes]
        gradient_bytes: Gradients of its leaf inputs, there once it has been run back. [bytes]
        existing_bytes: Gradients that it was planned to find; part of resident. [bytes]
    """

    frame: int = -1
    others_bytes: int = 0
    gradient_bytes: int = 0
    existing_bytes: int = 0


UNSPLIT_BYTES = 1 << 20  # c10/cuda/CUDACachingAllocator: a rest up to this stays with its block


@dataclass
class GraphRecord:
    """One captured graph with the plan that runs it."""

    plan: Plan
    trace_s: float
    profile_s: float
    notes: tuple[str, ...]
    piece: Piece = Piece()
    differentiated: bool = True
    _report: GraphReport | None = None

    @cached_property
    def held_bytes(self) -> int:
        """Held for this graph between its forward and its backward. [bytes]"""
        problem = self.plan.problem
        tangents_bytes = sum(s.size_bytes for s in problem.storages if s.kind is Kind.TANGENT)
        return self.plan.simulation.entry_bytes - problem.resident_bytes - tangents_bytes

    @cached_property
    def retained_peak_bytes(self) -> int:
        """Peak of a backward that keeps what was saved, resident bytes included. [bytes]"""
        return simulate(self.plan.problem, self.plan.schedule, retain_graph=True).peak_bytes

    def check_retained(self) -> None:
        """A backward with ``retain_graph=True`` is about to run.

        Raises:
            InfeasibleBudgetError: It would pass the budget.
        """
        if self.retained_peak_bytes > self.plan.budget_bytes:
            raise InfeasibleBudgetError(
                f"backward(retain_graph=True) keeps every saved value until it ends: that takes "
                f"{self.retained_peak_bytes:,} bytes, more than the budget of "
                f"{self.plan.budget_bytes:,} bytes. Raise the budget to "
                f"{self.retained_peak_bytes:,} "
                "bytes, or let the backward free the graph.",
                self.plan.budget_bytes,
                self.retained_peak_bytes,
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
            self._report = graph_report(
                self.plan,
                baseline_peak_bytes=baseline_peak_bytes(problem),
                find_floor_bytes=lambda: floor_plan(problem).peak_bytes,
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


@dataclass
class Session:
    """The state behind one optimised module or function.

    Attributes:
        options: What was asked for.
        name: What was optimised, for people.
        graphs: Every graph captured, in order.
        ran: The graphs that the last call ran, in order.
        told: Whether ``begin`` says where a call starts; ``torch.compile`` does not.
        on_inputs: Told the names and values of a graph's inputs before it first runs.
        started_s: When the trace in progress began. [s]
        existing_bytes: Gradients that the last call found. [bytes]
        alone: Nobody else's tensors are on the device, so what it holds can be compared.
    """

    options: Options
    name: str = ""
    graphs: list[GraphRecord] = field(default_factory=list)
    ran: list[GraphRecord] = field(default_factory=list)
    on_inputs: Callable[[Sequence[tuple[str, Any]]], None] = lambda found: None
    started_s: float = 0.0
    told: bool = False
    turned: bool = False  # a backward has begun since the last forward
    existing_bytes: int = 0
    alone: bool = True
    here: threading.local = field(default_factory=threading.local)  # this thread's call

    @property
    def idle(self) -> bool:
        """Has no planned graph run since this thread's call began?"""
        return bool(getattr(self.here, "idle", False))

    def begin(self, existing_bytes: int) -> None:
        """A call starts, and finds gradients of so many bytes."""
        self.ran = []
        self.here.idle = True
        self.existing_bytes = existing_bytes
        self.told = True
        self.started_s = time.perf_counter()

    def turn(self) -> None:
        """A backward starts."""
        self.turned = True

    def earlier(self, frame: int) -> list[GraphRecord]:
        """The pieces of the call in progress that have run when code of a frame comes next.

        Where nobody tells, a call starts after a backward, or when a frame comes again.
        """
        if not self.told and (self.turned or any(r.piece.frame == frame for r in self.ran)):
            self.ran = []
        self.turned = False
        return self.ran

    def mark(self, record: GraphRecord) -> None:
        """A graph starts to run.

        Raises:
            InfeasibleBudgetError: It would take the pieces of this call over the budget together.
            OverBudgetError: Gradients exist that the plan took for freed, and there is no room.
        """
        more_bytes = self.existing_bytes - record.piece.existing_bytes
        if record.differentiated and more_bytes > 0:
            _check_gradients(record.plan, more_bytes)
        ran = [*self.earlier(record.piece.frame), record]
        held_bytes, gradient_bytes = 0, sum(r.piece.gradient_bytes for r in ran)
        for each in ran if len(ran) > 1 else ():
            gradient_bytes -= each.piece.gradient_bytes  # those of later pieces, run back before it
            more_bytes = held_bytes + gradient_bytes - each.piece.others_bytes
            if each.differentiated:
                _check_piece(each.plan, each.plan.peak_bytes + more_bytes)
            held_bytes += each.held_bytes
        self.ran = ran
        self.here.idle = False

    def only_plan(self) -> Plan:
        """The plan of the last call, which ran one graph.

        Raises:
            FxrematError: It ran several, or none.
        """
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
        if not self.ran:
            raise FxrematError(
                f"{self.name or 'this callable'} has not run a planned graph yet: plans are "
                "made in "
                "the first call. Call it once, then ask for the report."
            )
        ran = [record.report_with(self.existing_bytes) for record in self.ran]
        return remat_report(ran, [record.report for record in self.graphs])


def _check_gradients(plan: Plan, more_bytes: int) -> None:
    peak_bytes = plan.peak_bytes + more_bytes
    if peak_bytes > plan.budget_bytes:
        raise OverBudgetError(
            f"the step begins with {more_bytes:,} bytes of gradients that gradients='freed' left "
            f"out: with them its peak would be {peak_bytes:,} bytes, above the budget of "
            f"{plan.budget_bytes:,} bytes. Free them (zero_grad(set_to_none=True)), or say "
            "gradients='auto'.",
            peak_bytes,
            plan.budget_bytes,
        )


def _check_piece(plan: Plan, peak_bytes: int) -> None:
    if peak_bytes > plan.budget_bytes:
        raise InfeasibleBudgetError(
            f"the pieces between the graph breaks of {plan.problem.name} hold {peak_bytes:,} bytes "
            f"together, more than the budget of {plan.budget_bytes:,} bytes. Raise the budget to "
            f"{peak_bytes:,} bytes, or remove the graph breaks: one graph needs less.",
            plan.budget_bytes,
            peak_bytes,
        )


def tangent_note(name: str, size_bytes: int) -> str:
    """The hint about an output whose gradient costs memory even when nobody uses it."""
    return (
        f"output {name} ({format_bytes(size_bytes)}) has a tangent: the backward holds a "
        "gradient of its size, "
        "of zeros where the loss does not use it. Name what backward goes through with "
        "differentiate=."
    )
