"""The least peak: the plan below which fxremat says that a budget cannot be met.

It is a descent on the peak from two starts, and where that is quick, the integer program is asked
for less until it finds nothing. A budget that no start is within is compared with it before
anything else is tried, so what lies below is refused, and what does not gets a plan, in this
process and in any other.
"""

from dataclasses import replace
from functools import lru_cache

from fxremat.problem import RematProblem
from fxremat.solvers.needs import Same
from fxremat.solvers.search import Clock, Goal, Judged, Search
from fxremat.solvers.within import starts, within

FLOOR_LIMIT_S = 120.0  # of its search; the same for all who ask, so that all get the same floor
_EFFORT = 12_000
_ASKED = 160  # values that can be saved; up to so many the integer program is asked too
_LAST = 12  # how often
_SHARES = (2, 8, 32)  # parts of the way down to try at once


@lru_cache(maxsize=8)
def _core(key: Same) -> tuple[RematProblem, Search]:
    core = replace(key.problem, resident_bytes=0)
    return core, Search(core)


def core_of(problem: RematProblem) -> tuple[RematProblem, Search]:
    """The problem without its resident bytes, on which no choice depends, and its search.

    So the same step gets the same plans whatever stays on the device meanwhile. What the simulator
    said of a choice is asked once.
    """
    return _core(Same(problem))


def bytes_only(problem: RematProblem) -> RematProblem:
    """The problem with every call at the same cost, which is all that the least peak depends on.

    So a floor that was found once holds for the same step priced anew.
    """
    return replace(
        problem,
        operations=tuple(replace(o, cost_ns=1, source="", module="") for o in problem.operations),
        replays=tuple(replace(r, cost_ns=1) for r in problem.replays),
        unrewritten_peak_bytes=0,
        costs="",
        name="",
    )


_FLOORS: dict[RematProblem, frozenset[int]] = {}


def least(core: RematProblem, search: Search, clock: Clock) -> Judged:
    """The choice with the least peak; found once for each step, whatever it is priced at.

    Args:
        core: The step without resident bytes.
        search: Its search.
        clock: The safety net; what was found when it struck is not kept.

    Returns:
        The choice and what the simulator says of it.
    """
    plain = bytes_only(core)
    if plain in _FLOORS:
        return search.judge(_FLOORS[plain])
    if search.few:
        found = min(search.few, key=_peak)
    else:
        found = search.judge(_find(Search(plain), clock).saved)
    if not clock.up():
        if len(_FLOORS) >= 64:
            _FLOORS.pop(next(iter(_FLOORS)))
        _FLOORS[plain] = found.saved
    return found


def is_roomy(search: Search, budget_bytes: int) -> bool:
    """Is the budget above the least peak for certain, without a search for it?

    Args:
        search: Of the problem.
        budget_bytes: The budget. [bytes]
    """
    return any(start.peak_bytes <= budget_bytes for start in starts(search))


def lowest_bytes(search: Search) -> int:
    """What the step holds at its highest place whatever is saved. [bytes]"""
    needs = search.screen.needs
    return max(max(needs.fixed_bytes), max(needs.forward_bytes, default=0))


def _find(search: Search, clock: Clock) -> Judged:
    """Descend, and while the problem is not large ask the integer program for one byte less."""
    best = _descend(search, clock)
    for _ in range(_LAST if len(search.screen.columns) <= _ASKED else 0):
        below = None if clock.up() else within(search, best.peak_bytes - 1, clock, thorough=False)
        if below is None:
            break
        best = _sink(search, below, lowest_bytes(search), clock)
    return best


def _descend(search: Search, clock: Clock) -> Judged:
    """Descend on the highest peak from two starts, and from the better end once more."""
    highest = Goal(0, summed=False)
    _, block, nothing = starts(search)
    sunk = [search.improve(s, highest, effort=_EFFORT, clock=clock) for s in (block, nothing)]
    return _sink(search, min(sunk, key=_peak), lowest_bytes(search), clock)


def _peak(judged: Judged) -> tuple[int, int]:
    return judged.peak_bytes, judged.recompute_ns


def _sink(search: Search, best: Judged, low_bytes: int, clock: Clock) -> Judged:
    """Descend towards nearer and nearer targets below the peak, then on the highest peak."""
    for share in _SHARES:
        target = best.peak_bytes - max(1, (best.peak_bytes - low_bytes) // share)
        if target < low_bytes or clock.up():
            break
        found = search.improve(best, Goal(target), effort=_EFFORT, clock=clock)
        best = min(best, found, key=_peak)
    return search.improve(best, Goal(0, summed=False), effort=_EFFORT, clock=clock)
