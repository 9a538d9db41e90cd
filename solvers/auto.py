"""What ``solver="auto"`` does: one replay of each operation where that is enough, else several.

The integer program and its search (``refine``) plan with at most one replay, and small problems are
searched whole. Where they find nothing within the budget, or a plan with room above its bound,
nested replays (``beyond``) are tried too, and the cheaper plan is taken. The floor is the lower one
of both kinds.
"""

from dataclasses import replace

from fxremat.plans import Solution
from fxremat.problem import RematProblem
from fxremat.simulate import Schedule, simulate
from fxremat.solvers.beyond import beyond, lowest
from fxremat.solvers.floor import FLOOR_LIMIT_S, core_of, least
from fxremat.solvers.refine import refine
from fxremat.solvers.save_all import save_all
from fxremat.solvers.search import Clock
from fxremat.solvers.small import optimum

_CLOSE_STEP = 0.01  # share of the step that a plan may be above its bound and is left alone


def auto(problem: RematProblem, budget_bytes: int, *, time_limit_s: float) -> Solution:
    """Find the cheapest schedule within a budget, with as many replays as it takes.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        time_limit_s: A safety net: the best plan so far comes back. [s]

    Returns:
        The schedule with a bound, and the name of the solver that found it; none when not even the
        floor is within the budget.
    """
    clock = Clock(time_limit_s)
    everything = save_all(problem, budget_bytes, time_limit_s=time_limit_s)
    if everything.schedule is not None:
        return replace(everything, bound_class="every plan", solver="save_all")
    once = refine(problem, budget_bytes, time_limit_s=clock.left_s())
    name = once.solver or "ilp"
    if once.schedule is not None and (clock.up() or (name == "ilp" and _close(problem, once))):
        return replace(once, solver=name)
    core, _ = core_of(problem)
    core_bytes = budget_bytes - problem.resident_bytes
    often = beyond(core, core_bytes, time_limit_s=clock.left_s())
    found = [replace(once, solver=name), replace(often, solver="nested")]
    return min(found, key=lambda solution: _cost_ns(problem, solution))


def _cost_ns(problem: RematProblem, solution: Solution) -> float:
    """Extra time of what was found; infinite for nothing. [ns]"""
    if solution.schedule is None:
        return float("inf")
    return simulate(problem, solution.schedule).recompute_ns


def _close(problem: RematProblem, solution: Solution) -> bool:
    """Is it so near to its bound that no more is tried?"""
    room_ns = _cost_ns(problem, solution) - solution.lower_bound_ns
    return bool(solution.bound_class) and room_ns <= _CLOSE_STEP * problem.step_ns


def floor(problem: RematProblem, *, time_limit_s: float = FLOOR_LIMIT_S) -> Schedule:
    """Find the schedule with the least peak that fxremat can plan.

    Args:
        problem: The step.
        time_limit_s: A safety net; the best so far comes back. [s]

    Returns:
        The schedule.
    """
    core, search = core_of(problem)
    clock = Clock(time_limit_s)
    whole = optimum(core, None).schedule
    once = whole or search.schedule(least(core, search, clock).saved)
    often = lowest(core, clock)
    found = [once] if often is None else [once, often]
    return min(found, key=lambda schedule: simulate(core, schedule).peak_bytes)
