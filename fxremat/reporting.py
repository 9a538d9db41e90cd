"""What fxremat planned for the step that ran: numbers for programs, tables for people."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fxremat.budget import format_bytes
from fxremat.decisions import Decision, decisions
from fxremat.plans import Plan
from fxremat.tables import DECISION_HEADERS, decision_rows, format_cost, table


@dataclass(frozen=True)
class GraphReport:
    """What was planned for one captured graph at one shape.

    Attributes:
        name: What was captured, for people.
        budget_bytes: What was asked, resident bytes included. [bytes]
        resident_bytes: Parameters, buffers, inputs, existing gradients, reserve. [bytes]
        baseline_peak_bytes: Predicted peak with everything saved, with resident. [bytes]
        predicted_peak_bytes: Predicted peak of the plan that runs, with resident. [bytes]
        entry_bytes: Assumed to be held when the backward starts, with resident. [bytes]
        saved_bytes: Kept from forward to backward, once per storage, without resident. [bytes]
        step_ns: Cost of the unrewritten step. [ns]
        recompute_ns: Extra cost of the plan. [ns]
        lower_bound_ns: Proven bound on ``recompute_ns`` for every plan of ``bound_class``. [ns]
        bound_class: The plans that the bound speaks of.
        gap: ``(recompute_ns - lower_bound_ns) / step_ns``.
        solver: Name of the solver.
        solve_s: Time to solve. [s]
        trace_s: Time to trace. [s]
        profile_s: Time to measure costs. [s]
        decisions: What happens to each value, in graph order.
        notes: Hints, a sentence each.
        costs: Where the costs come from; with "uniform", ``*_ns`` count calls.
        device: The device that the bytes are of.
        differentiated: False: nothing was to differentiate, so there was nothing to plan.
        find_floor_bytes: Finds ``floor_bytes``; called at most once.
    """

    name: str
    budget_bytes: int
    resident_bytes: int
    baseline_peak_bytes: int
    predicted_peak_bytes: int
    entry_bytes: int
    saved_bytes: int
    step_ns: int
    recompute_ns: int
    lower_bound_ns: int
    bound_class: str
    gap: float
    solver: str
    solve_s: float
    trace_s: float
    profile_s: float
    decisions: tuple[Decision, ...] = field(repr=False)
    notes: tuple[str, ...]
    costs: str
    device: str
    differentiated: bool
    find_floor_bytes: Callable[[], int] = field(repr=False, compare=False)

    @cached_property
    def floor_bytes(self) -> int:
        """Least peak that fxremat can plan here, with resident; found on first use. [bytes]"""
        return self.find_floor_bytes()

    @property
    def known_floor_bytes(self) -> int | None:
        """The floor if it has been found already. [bytes]"""
        return self.__dict__.get("floor_bytes")

    def __str__(self) -> str:
        """Tables for people."""
        return "\n\n".join(_sections(self))


@dataclass(frozen=True)
class RematReport(GraphReport):
    """What was planned for the last call that ran; its fields cover all graphs of that call.

    Attributes:
        graphs: The same for each captured graph and shape, in order of capture.
    """

    graphs: tuple[GraphReport, ...]

    @property
    def known_floor_bytes(self) -> int | None:
        """The floor if it has been found already, here or for every graph. [bytes]"""
        found: int | None = self.__dict__.get("floor_bytes")
        if found is None and len(self.graphs) == 1:
            return self.graphs[0].known_floor_bytes
        return found

    def __str__(self) -> str:
        """Tables for people; one row for each graph where there are several."""
        sections = list(_sections(self))
        if len(self.graphs) > 1:
            rows = [
                (
                    graph.name,
                    *_in_bytes(graph),
                    format_cost(graph.recompute_ns, graph.costs),
                    graph.solver,
                )
                for graph in self.graphs
            ]
            headers = ("graph", "baseline peak", "predicted peak", "saved", "extra", "solver")
            sections.append("Graphs and shapes\n" + table(rows, headers))
        return "\n\n".join(sections)


def graph_report(
    plan: Plan,
    *,
    baseline_peak_bytes: int,
    find_floor_bytes: Callable[[], int],
    trace_s: float = 0.0,
    profile_s: float = 0.0,
    notes: tuple[str, ...] = (),
    differentiated: bool = True,
) -> GraphReport:
    """The report of one graph.

    Args:
        plan: The plan that runs.
        baseline_peak_bytes: Predicted peak with everything saved, with resident. [bytes]
        find_floor_bytes: Finds the floor; called when somebody asks for it.
        trace_s: Time to trace. [s]
        profile_s: Time to measure costs. [s]
        notes: Hints, a sentence each.
        differentiated: False when the graph has no backward.
    """
    problem, simulation = plan.problem, plan.simulation
    return GraphReport(
        name=problem.name,
        budget_bytes=plan.budget_bytes,
        resident_bytes=problem.resident_bytes,
        baseline_peak_bytes=baseline_peak_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        entry_bytes=simulation.entry_bytes,
        saved_bytes=plan.saved_bytes,
        step_ns=problem.step_ns,
        recompute_ns=plan.recompute_ns,
        lower_bound_ns=plan.lower_bound_ns,
        bound_class=plan.bound_class,
        gap=plan.gap,
        solver=plan.solver,
        solve_s=plan.solve_s,
        trace_s=trace_s,
        profile_s=profile_s,
        decisions=decisions(plan),
        notes=notes,
        costs=problem.costs,
        device=problem.device,
        differentiated=differentiated,
        find_floor_bytes=find_floor_bytes,
    )


def remat_report(ran: Sequence[GraphReport], graphs: Iterable[GraphReport] = ()) -> RematReport:
    """The report of one call.

    Args:
        ran: The graphs that the last call ran, in order: one, unless graph breaks were accepted.
        graphs: All that were captured, at every shape; ``ran`` by default.

    Returns:
        The report: the greatest of the peaks, the sum of times, costs and saved bytes.
    """
    first = ran[0]
    step_ns = sum(graph.step_ns for graph in ran)
    recompute_ns = sum(graph.recompute_ns for graph in ran)
    lower_bound_ns = sum(graph.lower_bound_ns for graph in ran)
    return RematReport(
        name=first.name,
        budget_bytes=first.budget_bytes,
        resident_bytes=max(graph.resident_bytes for graph in ran),
        baseline_peak_bytes=max(graph.baseline_peak_bytes for graph in ran),
        predicted_peak_bytes=max(graph.predicted_peak_bytes for graph in ran),
        entry_bytes=max(graph.entry_bytes for graph in ran),
        saved_bytes=sum(graph.saved_bytes for graph in ran),
        step_ns=step_ns,
        recompute_ns=recompute_ns,
        lower_bound_ns=lower_bound_ns,
        bound_class=", ".join(_once(graph.bound_class for graph in ran)),
        gap=(recompute_ns - lower_bound_ns) / step_ns if step_ns else 0.0,
        solver=", ".join(_once(graph.solver for graph in ran)),
        solve_s=sum(graph.solve_s for graph in ran),
        trace_s=sum(graph.trace_s for graph in ran),
        profile_s=sum(graph.profile_s for graph in ran),
        decisions=tuple(row for graph in ran for row in graph.decisions),
        notes=_once(note for graph in ran for note in graph.notes),
        costs=first.costs,
        device=first.device,
        differentiated=any(graph.differentiated for graph in ran),
        find_floor_bytes=lambda: max(graph.floor_bytes for graph in ran),
        graphs=tuple(graphs) or tuple(ran),
    )


def _sections(report: GraphReport) -> Iterable[str]:
    """The parts of a report, from what matters most."""
    title = f"fxremat: {report.name or 'step'} on {report.device}"
    if not report.differentiated:
        yield (
            f"{title}\nNothing to differentiate: no backward, so nothing to save or recompute. "
            "The forward runs as it is, and the budget does not bind it."
        )
        yield table(_byte_rows(report)[:2])
    else:
        yield f"{title}\n" + table(_byte_rows(report))
        rows = decision_rows(report.decisions, report.costs)
        if rows:
            yield "Recomputed in the backward\n" + table(rows, DECISION_HEADERS)
        else:
            yield "Nothing is recomputed."
        yield table(_cost_rows(report))
    if report.notes:
        yield "\n".join(f"Note: {note}" for note in report.notes)


def _byte_rows(report: GraphReport) -> list[tuple[str, str, str]]:
    floor = report.known_floor_bytes
    found = [
        ("budget", report.budget_bytes),
        ("resident", report.resident_bytes),
        ("baseline peak", report.baseline_peak_bytes),
        ("predicted peak", report.predicted_peak_bytes),
        ("floor", floor),
        ("at backward entry", report.entry_bytes),
        ("saved for the backward", report.saved_bytes),
    ]
    return [
        (name, "report.floor_bytes finds it", "")
        if size_bytes is None
        else (name, format_bytes(size_bytes), format_bytes(size_bytes, exact=True))
        for name, size_bytes in found
    ]


def _cost_rows(report: GraphReport) -> list[tuple[str, str]]:
    def cost(cost_ns: int) -> str:
        share = f", {cost_ns / report.step_ns:.1%} of the step" if report.step_ns else ""
        return format_cost(cost_ns, report.costs) + share

    bound = "none proven"
    if report.bound_class:
        bound = f"{format_cost(report.lower_bound_ns, report.costs)} ({report.bound_class})"
    return [
        ("step as it was", f"{format_cost(report.step_ns, report.costs)} ({report.costs} costs)"),
        ("extra", cost(report.recompute_ns)),
        ("lower bound", bound),
        ("gap", f"{report.gap:.1%} of the step"),
        ("solver", f"{report.solver}, {report.solve_s:.2f} s"),
        ("traced, profiled", f"{report.trace_s:.2f} s, {report.profile_s:.2f} s"),
    ]


def _in_bytes(graph: GraphReport) -> tuple[str, str, str]:
    return (
        format_bytes(graph.baseline_peak_bytes),
        format_bytes(graph.predicted_peak_bytes),
        format_bytes(graph.saved_bytes),
    )


def _once(texts: Iterable[str]) -> tuple[str, ...]:
    """Each text once, in order, without empty ones."""
    return tuple(dict.fromkeys(text for text in texts if text))
