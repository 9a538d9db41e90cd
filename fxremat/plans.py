"""A plan: a schedule with what the simulator says of it and what the solver could prove.

Also the registry's types: every solver is ``(problem, budget_bytes, *, time_limit_s) -> Solution``.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fxremat.budget import format_bytes
from fxremat.problem import RematProblem
from fxremat.simulate import Schedule, Simulation, simulate


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solver answers.

    Attributes:
        schedule: What it proposes; None when it found nothing within the budget.
        lower_bound_ns: No plan of ``bound_class`` recomputes for less; 0 proves nothing. [ns]
        bound_class: The plans that the bound speaks of; "" with a bound of 0.
        message: How it ended, for people.
        solver: Name of the solver whose schedule it is, where several were asked.
    """

    schedule: Schedule | None
    lower_bound_ns: int = 0
    bound_class: str = ""
    message: str = ""
    solver: str = ""


class Solver(Protocol):
    """Chooses what to save: a pure function of its arguments."""

    def __call__(
        self, problem: RematProblem, budget_bytes: int, *, time_limit_s: float
    ) -> Solution:
        """Answer with the cheapest schedule found whose simulated peak is within the budget."""


class TimelinePoint(NamedTuple):
    """What is held while one step runs.

    Attributes:
        phase: "forward", "boundary", "backward" or "end".
        name: The operation; a replay bears the name of its operation and ``_replay``.
        live_bytes: Held meanwhile, resident bytes included. [bytes]
    """

    phase: str
    name: str
    live_bytes: int


@dataclass(frozen=True, repr=False)
class Plan:
    """A schedule that was simulated.

    Attributes:
        problem: The step it is for.
        schedule: What runs.
        simulation: What the simulator found.
        budget_bytes: What was asked, resident bytes included. [bytes]
        lower_bound_ns: Proven bound on ``recompute_ns`` for every plan of ``bound_class``. [ns]
        bound_class: The plans that the bound speaks of.
        solver: Name of the solver.
        solve_s: Time to solve. [s]
    """

    problem: RematProblem
    schedule: Schedule
    simulation: Simulation
    budget_bytes: int
    lower_bound_ns: int = 0
    bound_class: str = ""
    solver: str = ""
    solve_s: float = 0.0

    def __repr__(self) -> str:
        """One line; ``fxremat plan`` prints tables."""
        share = self.recompute_ns / self.problem.step_ns if self.problem.step_ns else 0.0
        return (
            f"Plan({self.problem.name!r}: peak {format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.budget_bytes)}, {len(self.saved)} values saved in "
            f"{format_bytes(self.saved_bytes)}, recompute {share:.1%} of the step, {self.solver})"
        )

    @property
    def peak_bytes(self) -> int:
        """Predicted peak, resident bytes included. [bytes]"""
        return self.simulation.peak_bytes

    @property
    def saved_bytes(self) -> int:
        """Kept from forward to backward, once per storage, without resident ones. [bytes]"""
        return self.simulation.saved_bytes

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of the saved values, in graph order."""
        return tuple(self.problem.storages[g].name for g in self.simulation.saved)

    @property
    def recompute_ns(self) -> int:
        """Cost of the plan's step less that of the unrewritten one. [ns]"""
        return self.simulation.recompute_ns

    @property
    def gap(self) -> float:
        """What may still be won, as a share of the unrewritten step."""
        if self.problem.step_ns == 0:
            return 0.0
        return (self.recompute_ns - self.lower_bound_ns) / self.problem.step_ns

    def timeline(self) -> list[TimelinePoint]:
        """Bytes held while each step runs, in order."""
        operations = self.problem.operations
        names = [("forward", operations[i].name) for i in self.schedule.forward]
        names.append(("boundary", ""))
        for step in self.schedule.backward:
            name = operations[step.operation].name
            names.append(("backward", name if step.replay < 0 else f"{name}_replay"))
        names.append(("end", ""))
        live = self.simulation.live_bytes
        return [TimelinePoint(*label, level) for label, level in zip(names, live, strict=True)]


def make_plan(
    problem: RematProblem,
    budget_bytes: int,
    solution: Solution,
    *,
    solver: str = "",
    solve_s: float = 0.0,
) -> Plan:
    """Simulate what a solver proposed.

    Args:
        problem: The step.
        budget_bytes: What was asked. [bytes]
        solution: The solver's answer, with a schedule.
        solver: Its name.
        solve_s: How long it took. [s]

    Returns:
        The plan; whether it is within the budget is for the caller to check.
    """
    if solution.schedule is None:
        raise ValueError("there is no schedule to make a plan of")
    simulation = simulate(problem, solution.schedule)
    return Plan(
        problem=problem,
        schedule=solution.schedule,
        simulation=simulation,
        budget_bytes=budget_bytes,
        lower_bound_ns=min(solution.lower_bound_ns, simulation.recompute_ns),
        bound_class=solution.bound_class,
        solver=solver,
        solve_s=solve_s,
    )
