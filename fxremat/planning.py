"""Plans for problems: one budget, the whole frontier, and the floor. No torch."""

import logging
import time
from functools import lru_cache

from fxremat.budget import Budget, format_bytes, parse_budget
from fxremat.errors import InfeasibleBudgetError, OptionError, SolverError
from fxremat.plans import Plan, Solution, make_plan
from fxremat.problem import RematProblem
from fxremat.schedule import expand
from fxremat.simulate import simulate
from fxremat.solvers import SOLVERS
from fxremat.solvers.auto import auto, floor
from fxremat.solvers.floor import FLOOR_LIMIT_S
from fxremat.solvers.lean import lean

log = logging.getLogger("fxremat")

UNLIMITED = 1 << 62  # the budget where none is known yet, or nothing is planned


@lru_cache(maxsize=64)
def save_all_peak_bytes(problem: RematProblem) -> int:
    """Peak with everything saved that the backward reads, resident bytes included. [bytes]"""
    return simulate(problem, expand(problem, problem.candidates)).peak_bytes


def baseline_peak_bytes(problem: RematProblem) -> int:
    """Peak of AOTAutograd's default partition, with resident bytes. [bytes]"""
    return problem.unrewritten_peak_bytes or save_all_peak_bytes(problem)


_FLOORS: dict[RematProblem, Plan] = {}


def floor_plan(problem: RematProblem, *, time_limit_s: float = FLOOR_LIMIT_S) -> Plan:
    """The plan with the least peak that fxremat finds; kept, so that its budget returns it.

    Args:
        problem: The step.
        time_limit_s: A safety net; what was found when it struck is not kept. [s]

    Returns:
        The plan, with its own peak as budget.
    """
    if problem in _FLOORS:
        return _FLOORS[problem]
    start_s = time.perf_counter()
    schedule = floor(problem, time_limit_s=time_limit_s)
    solve_s = time.perf_counter() - start_s
    peak_bytes = simulate(problem, schedule).peak_bytes
    plan = make_plan(problem, peak_bytes, Solution(schedule), solver="floor", solve_s=solve_s)
    if solve_s < time_limit_s:
        if len(_FLOORS) >= 64:
            _FLOORS.pop(next(iter(_FLOORS)))
        _FLOORS[problem] = plan
    return plan


def make(
    problem: RematProblem,
    budget: int | str | Budget,
    *,
    solver: str = "auto",
    time_limit_s: float = 60.0,
) -> Plan:
    """Plan one step within a budget.

    Args:
        problem: The step.
        budget: Bytes as an ``int`` or text, or a percentage of the baseline peak; resident bytes
            are part of it.
        solver: A name in ``SOLVERS``, or "auto": one replay of each operation, several where that
            is cheaper or the only way.
        time_limit_s: For solving. [s]

    Returns:
        The plan; its simulated peak is within the budget.

    Raises:
        BudgetError: The budget cannot be read.
        OptionError: There is no such solver.
        InfeasibleBudgetError: Not even the floor fits, or this solver has no plan so small.
    """
    _check_problem(problem)
    budget_bytes = parse_budget(budget).resolve(baseline_peak_bytes(problem))
    _check_solver(solver)
    start_s = time.perf_counter()
    solve = auto if solver == "auto" else SOLVERS[solver]
    solution = solve(problem, budget_bytes, time_limit_s=time_limit_s)
    name = solution.solver if solver == "auto" else solver
    solve_s = time.perf_counter() - start_s
    if solution.schedule is None:
        cut = " in the time given (time_limit_s)" if solve_s >= time_limit_s else ""
        left_s = max(0.1, time_limit_s - solve_s)
        return _finish(_fall_back(problem, budget_bytes, solver, left_s, cut))
    plan = make_plan(problem, budget_bytes, solution, solver=name, solve_s=solve_s)
    if plan.peak_bytes > budget_bytes:
        raise SolverError(
            f"solver {name!r} returned a plan of {plan.peak_bytes:,} bytes for a budget of "
            f"{budget_bytes:,} bytes; please report this problem."
        )
    return _finish(plan)


def make_lean(
    problem: RematProblem, budget: Budget, *, solver: str = "auto", time_limit_s: float = 60.0
) -> Plan:
    """Plan a step that others share the budget with: it keeps little for its backward.

    Args:
        problem: The step; what others hold is resident.
        budget: Bytes; under a percentage, which is of something else, there is no limit yet.
        solver: As for ``make``, which is asked where no lean plan is found.
        time_limit_s: For solving. [s]

    Returns:
        The plan.

    Raises:
        InfeasibleBudgetError: As ``make`` does.
    """
    budget_bytes = budget.bytes_ if budget.bytes_ is not None else UNLIMITED
    _check_solver(solver)
    start_s = time.perf_counter()
    solution = lean(problem, budget_bytes, time_limit_s=time_limit_s)
    if solution.schedule is None:
        return make(problem, budget_bytes, solver=solver, time_limit_s=time_limit_s)
    solve_s = time.perf_counter() - start_s
    return _finish(make_plan(problem, budget_bytes, solution, solver="lean", solve_s=solve_s))


def _check_problem(problem: object) -> None:
    if not isinstance(problem, RematProblem):
        raise OptionError(
            f"a plan is made for a problem, not for {type(problem).__name__}: give what "
            "fxremat.capture(model, args) returned, or fxremat.load(path).",
            "problem",
            problem,
        )


def _check_solver(solver: str) -> None:
    known = ("auto", *SOLVERS)
    if solver not in known:
        raise OptionError(
            f"there is no solver {solver!r}; those that exist: {', '.join(known)}.",
            "solver",
            solver,
            known,
        )


def _fall_back(
    problem: RematProblem, budget_bytes: int, solver: str, left_s: float, cut: str
) -> Plan:
    """The floor's plan where it fits, or the error that names it."""
    least = floor_plan(problem, time_limit_s=left_s)
    if least.peak_bytes <= budget_bytes and solver in ("auto", "ilp"):
        solution = Solution(least.schedule)
        return make_plan(problem, budget_bytes, solution, solver="floor", solve_s=least.solve_s)
    if least.peak_bytes <= budget_bytes:
        raise InfeasibleBudgetError(
            f"solver {solver!r} has no plan within {budget_bytes:,} bytes{cut}; the least budget "
            f"that fxremat can plan here is {least.peak_bytes:,} bytes. Use solver='auto'.",
            budget_bytes,
            least.peak_bytes,
        )
    cut = "" if problem in _FLOORS else " in the time given (time_limit_s)"
    raise InfeasibleBudgetError(
        f"a budget of {budget_bytes:,} bytes ({format_bytes(budget_bytes)}) cannot be met{cut}: "
        "the least "
        f"that works is {least.peak_bytes:,} bytes ({format_bytes(least.peak_bytes)}), of which "
        f"{problem.resident_bytes:,} are resident (parameters, buffers, inputs, "
        f"existing gradients, reserve). "
        f"Raise the budget to {least.peak_bytes:,} bytes.",
        budget_bytes,
        least.peak_bytes,
    )


def _finish(plan: Plan) -> Plan:
    log.info(
        "plan for %s: budget %s, peak %s, baseline %s, recompute %.1f %% of the step, gap %.1f %%, "
        "solver %s, %.1f s",
        plan.problem.name or "a step",
        format_bytes(plan.budget_bytes),
        format_bytes(plan.peak_bytes),
        format_bytes(baseline_peak_bytes(plan.problem)),
        100 * plan.recompute_ns / max(1, plan.problem.step_ns),
        100 * plan.gap,
        plan.solver,
        plan.solve_s,
    )
    return plan


def frontier(problem: RematProblem, points: int = 16, *, time_limit_s: float = 60.0) -> list[Plan]:
    """Plans from the baseline down to the floor, at evenly spaced budgets.

    Args:
        problem: The step.
        points: How many; at least 2.
        time_limit_s: For each of them. [s]

    Returns:
        Plans, the greatest budget first. A plan found for a smaller budget that recomputes less
        than that of a greater one takes its place, so time never falls as the budget grows.
    """
    _check_problem(problem)
    if not isinstance(points, int) or points < 2:
        text = f"a frontier has a whole number of points, at least 2, not {points!r}."
        raise OptionError(text, "points", points)
    least = floor_plan(problem)
    top_bytes = baseline_peak_bytes(problem)
    span = top_bytes - least.peak_bytes
    budgets = [top_bytes - span * i // (points - 1) for i in range(points)]
    plans: list[Plan] = []
    best: Plan | None = None
    for budget_bytes in reversed(budgets):
        at_floor = budget_bytes == least.peak_bytes
        plan = least if at_floor else make(problem, budget_bytes, time_limit_s=time_limit_s)
        if best is not None and best.recompute_ns < plan.recompute_ns:
            plan = make_plan(problem, budget_bytes, Solution(best.schedule), solver=best.solver)
        best = plan
        plans.append(plan)
    return plans[::-1]
