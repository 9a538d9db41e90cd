"""Relax, simulate, tighten, search: the default solver, ``"ilp"`` in the registry."""

from fxremat.plans import Solution
from fxremat.problem import RematProblem
from fxremat.solvers.bound import BOUND_CLASS, bound_ns, highest
from fxremat.solvers.floor import core_of, is_roomy, least
from fxremat.solvers.search import Clock, Goal
from fxremat.solvers.small import optimum, solution_of
from fxremat.solvers.within import within


def refine(problem: RematProblem, budget_bytes: int, *, time_limit_s: float) -> Solution:
    """Find the cheapest schedule within a budget.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        time_limit_s: A safety net: the best plan so far comes back. Up to it the answer depends on
            problem and budget alone. [s]

    Returns:
        The schedule with a proven bound, or none when not even the least peak is within the budget.
    """
    clock = Clock(time_limit_s)
    core, search = core_of(problem)
    core_bytes = budget_bytes - problem.resident_bytes
    whole = optimum(core, core_bytes)
    if not whole.given_up:
        return solution_of(whole)
    lowest = None if is_roomy(search, core_bytes) else least(core, search, clock)
    if lowest is not None and lowest.peak_bytes > core_bytes:
        peak_bytes = lowest.peak_bytes + problem.resident_bytes
        return Solution(None, message=f"the least peak is {peak_bytes:,} bytes")
    found = within(search, core_bytes, clock)
    if found is None:  # the model and its search found nothing so low
        lowest = lowest or least(core, search, clock)
        found = search.improve(lowest, Goal(core_bytes), effort=4000, clock=clock)
    schedule = search.schedule(found.saved)
    cuts = highest(found.live_bytes)
    lower_bound_ns = None
    if not clock.up():
        lower_bound_ns = bound_ns(core, core_bytes, cuts, time_limit_s=clock.left_s())
    if lower_bound_ns is None:
        return Solution(schedule, message="no bound")
    return Solution(schedule, min(lower_bound_ns, found.recompute_ns), BOUND_CLASS, "searched")
