"""Solve, simulate, tighten, polish: the default solver, ``"ilp"`` in the registry."""

from fxremat.plans import Solution
from fxremat.problem import RematProblem
from fxremat.solvers.bound import BOUND_CLASS, bound_ns
from fxremat.solvers.floor import FLOOR_LIMIT_S, known, least, search_for
from fxremat.solvers.greedy import greedy_choices
from fxremat.solvers.search import Clock, Goal, Judged
from fxremat.solvers.within import within


def refine(problem: RematProblem, budget_bytes: int, *, time_limit_s: float) -> Solution:
    """Find the cheapest schedule within a budget.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        time_limit_s: A safety net: the best plan so far comes back. Up to it the answer depends on
            problem and budget alone. [s]

    Returns:
        The schedule with a proven bound, or none when not even the floor is within the budget.
    """
    clock = Clock(time_limit_s)
    search = search_for(problem)
    lowest = known(problem)
    found: Judged | None = None
    if lowest is None or lowest.peak_bytes <= budget_bytes:
        cheap = [] if lowest is None else [lowest]
        cheap += [search.judge(saved) for saved in greedy_choices(problem, budget_bytes)]
        found = within(search, budget_bytes, clock, cheap)
    if found is None:
        lowest = lowest or least(problem, Clock(FLOOR_LIMIT_S))
        if lowest.peak_bytes > budget_bytes:
            return Solution(None, message=f"the least peak is {lowest.peak_bytes:,} bytes")
        found = search.improve(lowest, Goal(budget_bytes), effort=4000, clock=clock)
    lower_bound_ns = bound_ns(problem, budget_bytes, time_limit_s=max(1.0, clock.left_s()))
    if lower_bound_ns is None:
        return Solution(search.schedule(found.saved), message="no bound")
    lower_bound_ns = min(lower_bound_ns, found.recompute_ns)
    return Solution(search.schedule(found.saved), lower_bound_ns, BOUND_CLASS, "searched")
