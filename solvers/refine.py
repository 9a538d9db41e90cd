"""Relax, simulate, tighten, search: the default solver, ``"ilp"`` in the registry.

A coarse model comes first, and when what it finds is close to the bound, that is the answer. If
not, a fine one follows; but on a large problem whose budget is below what saving block inputs
holds, its linear programs take too long, and more search follows instead. Next to the least peak
the search starts from there.
"""

import math

from fxremat.plans import Solution
from fxremat.problem import RematProblem
from fxremat.solvers.bound import BOUND_CLASS, bound_ns, highest
from fxremat.solvers.floor import ASKED, core_of, leads_to, least
from fxremat.solvers.search import Clock, Judged, Search
from fxremat.solvers.small import optimum, solution_of
from fxremat.solvers.within import COARSE, SMALL, around, close_to, starts, within


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
    lean = not any(start.peak_bytes <= core_bytes for start in starts(search))
    lowest = None
    if lean and not leads_to(core, search, core_bytes, clock):
        lowest = least(core, search, clock)
        if lowest.peak_bytes > core_bytes:
            peak_bytes = lowest.peak_bytes + problem.resident_bytes
            return Solution(None, message=f"the least peak is {peak_bytes:,} bytes")
    return _search(search, core_bytes, clock, lean=lean, lowest=lowest)


def _search(
    search: Search, budget_bytes: int, clock: Clock, *, lean: bool, lowest: Judged | None
) -> Solution:
    """Plan for a budget that is not below the least peak."""
    large = len(search.screen.columns) > ASKED
    if lowest is not None and large:
        found = around(search, lowest, budget_bytes, clock)
        return _proven(search, found, _bound_ns(search, found, budget_bytes, clock))
    rough, bound = _coarse(search, budget_bytes, clock) if lowest is None else (None, None)
    close_ns = -math.inf if bound is None else close_to(search.problem, bound)
    if rough is not None and rough.recompute_ns <= close_ns:
        return _proven(search, rough, bound)
    if rough is not None and lean and large:
        return _proven(search, around(search, rough, budget_bytes, clock), bound)
    best = within(search, budget_bytes, clock, known=rough, close_ns=close_ns)
    if best is None:  # the model and its search found nothing so low
        lowest = lowest or least(search.problem, search, clock)
        best = around(search, lowest, budget_bytes, clock)
    return _proven(search, best, _bound_ns(search, best, budget_bytes, clock), bound)


def _coarse(search: Search, budget_bytes: int, clock: Clock) -> tuple[Judged | None, int | None]:
    """What the coarse model finds where there is room, and a bound. [ns]"""
    if len(search.screen.columns) <= SMALL:
        return None, None
    found = within(search, budget_bytes, clock, thorough=False, grain=COARSE)
    return found, None if found is None else _bound_ns(search, found, budget_bytes, clock)


def _bound_ns(search: Search, found: Judged, budget_bytes: int, clock: Clock) -> int | None:
    """A bound from cuts where a choice holds most; none when the time is up. [ns]"""
    if clock.up():
        return None
    cuts = highest(found.live_bytes)
    return bound_ns(search.problem, budget_bytes, cuts, time_limit_s=clock.left_s())


def _proven(search: Search, found: Judged, *bounds: int | None) -> Solution:
    """A choice as a solution, with the better one of some bounds."""
    schedule = search.schedule(found.saved)
    known = [bound for bound in bounds if bound is not None]
    if not known:
        return Solution(schedule, message="no bound")
    return Solution(schedule, min(max(known), found.recompute_ns), BOUND_CLASS, "searched")
