"""Relax, simulate, tighten, search: the default solver, ``"ilp"`` in the registry.

A coarse model comes first, and when what it finds is close to the bound, that is the answer. If
not, a fine one follows; but on a very large problem, or a large one whose budget is below what
saving block inputs holds, its linear programs take too long, and more search follows instead. Next
to the least peak the search starts from there.
"""

import math

from fxremat.plans import Solution
from fxremat.problem import RematProblem
from fxremat.simulate import simulate
from fxremat.solvers.beyond import lowest as nested_lowest
from fxremat.solvers.bound import BOUND_CLASS, bound_ns, highest
from fxremat.solvers.floor import ASKED, core_of, leads_to, least
from fxremat.solvers.search import Clock, Judged, Search
from fxremat.solvers.small import optimum, solution_of
from fxremat.solvers.within import COARSE, SMALL, around, close_to, starts, within

_FINE_MOST = 1000  # values that can be saved; with more, there is no fine model
_CUTS, _FEW_CUTS = (2, 8), (1, 2)  # of bounds, and where there are more values than that


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
    if lean and not _reached(core, search, core_bytes, clock):
        lowest = least(core, search, clock)
        if lowest.peak_bytes > core_bytes:
            return _too_low(lowest.peak_bytes + problem.resident_bytes)
    return _search(search, core_bytes, clock, lean=lean, lowest=lowest)


def _too_low(peak_bytes: int) -> Solution:
    return Solution(None, message=f"the least peak is {peak_bytes:,} bytes")


def _reached(core: RematProblem, search: Search, budget_bytes: int, clock: Clock) -> bool:
    """Is the budget above the least peak of all plans, as far as is seen before it is searched for?

    On very large problems nested replays, which are quick to find, tell.
    """
    if len(search.screen.columns) > _FINE_MOST:
        found = nested_lowest(core, clock)
        if found is not None and simulate(core, found).peak_bytes <= budget_bytes:
            return True
    return leads_to(core, search, budget_bytes, clock)


def _search(
    search: Search, budget_bytes: int, clock: Clock, *, lean: bool, lowest: Judged | None
) -> Solution:
    """Plan for a budget that is not below the least peak."""
    large = len(search.screen.columns) > ASKED
    too_large = len(search.screen.columns) > _FINE_MOST
    if lowest is not None and large:
        found = around(search, lowest, budget_bytes, clock)
        return _proven(search, found, _bound_ns(search, found, budget_bytes, clock))
    rough, bound = _coarse(search, budget_bytes, clock) if lowest is None else (None, None)
    close_ns = -math.inf if bound is None else close_to(search.problem, bound)
    if rough is not None and rough.recompute_ns <= close_ns:
        return _proven(search, rough, bound)
    if rough is not None and ((lean and large) or too_large):
        return _proven(search, around(search, rough, budget_bytes, clock), bound)
    if too_large:
        return Solution(None, message="the model finds no plan with one replay per operation")
    best = within(search, budget_bytes, clock, known=rough, close_ns=close_ns)
    if best is None:  # the model and its search found nothing so low
        lowest = lowest or least(search.problem, search, clock)
        if lowest.peak_bytes > budget_bytes:
            return Solution(None, message="the search found no plan so low in the time given")
        best = around(search, lowest, budget_bytes, clock)
    return _proven(search, best, _bound_ns(search, best, budget_bytes, clock), bound)


def _coarse(search: Search, budget_bytes: int, clock: Clock) -> tuple[Judged | None, int | None]:
    """What the coarse model finds where there is room, and a bound. [ns]"""
    if len(search.screen.columns) <= SMALL:
        return None, None
    found = within(search, budget_bytes, clock, thorough=False, grain=COARSE)
    return found, None if found is None else _bound_ns(search, found, budget_bytes, clock)


def _bound_ns(search: Search, found: Judged, budget_bytes: int, clock: Clock) -> int | None:
    """A bound from cuts where a choice holds most; none when the time is up. [ns]

    Each cut makes the linear program harder, and one or two are often as good as eight: more are
    tried only where the choice is not close to the bound yet.
    """
    best: int | None = None
    for number in _FEW_CUTS if len(search.screen.columns) > _FINE_MOST else _CUTS:
        if clock.up():
            break
        cuts = highest(found.live_bytes, number)
        bound = bound_ns(search.problem, budget_bytes, cuts, time_limit_s=clock.left_s())
        best = max((b for b in (best, bound) if b is not None), default=None)
        if best is not None and found.recompute_ns <= close_to(search.problem, best):
            break
    return best


def _proven(search: Search, found: Judged, *bounds: int | None) -> Solution:
    """A choice as a solution, with the better one of some bounds."""
    schedule = search.schedule(found.saved)
    known = [bound for bound in bounds if bound is not None]
    if not known:
        return Solution(schedule, message="no bound")
    return Solution(schedule, min(max(known), found.recompute_ns), BOUND_CLASS, "searched")
