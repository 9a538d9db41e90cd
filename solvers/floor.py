"""The least peak: the plan below which fxremat says that a budget cannot be met.

It is a descent on the peak, and where that is quick, the integer program is asked for less until it
finds nothing. A budget is compared with it before anything else is tried, so what lies below is
refused, and what does not gets a plan, in this process and in any other; but where a start or the
beginning of the descent is within the budget already, the rest of it need not be known.
"""

import threading
from dataclasses import replace
from functools import lru_cache

from fxremat.problem import RematProblem
from fxremat.solvers.needs import Same
from fxremat.solvers.search import Clock, Goal, Judged, Search
from fxremat.solvers.within import starts, within

FLOOR_LIMIT_S = 120.0  # of its search; the same for all who ask, so that all get the same floor
_EFFORT = 12_000
ASKED = 160  # values that can be saved; up to so many the integer program is asked too
_LAST = 12  # how often
_SHARE = 4  # part of the way down to try at once
_ROUNDS, _PAYS = 2, 0.01  # rounds of the descent at most, and what one must bring
_HIGHEST = Goal(0, summed=False)


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


class _Descent:
    """The search for the least peak of one step; it goes no further than what is asked for."""

    def __init__(self, core: RematProblem) -> None:
        self.search = Search(bytes_only(core))
        self.clock = Clock(0)
        self._begin()
        self._lock = threading.Lock()

    def _begin(self) -> None:
        self.best = starts(self.search)[1]
        self._way = self.search.descend(self.best, _HIGHEST, effort=_EFFORT, clock=self.clock)
        self._cut_short = False

    def reaches(self, budget_bytes: int, clock: Clock) -> bool:
        """Does the first way down lead to a budget? [bytes]"""
        with self._lock:
            if self._cut_short:  # by the time limit of an earlier caller
                self._begin()
            self.clock.end = clock.end
            while self.best.peak_bytes > budget_bytes and not clock.up():
                below = next(self._way, None)
                if below is None:
                    break
                self.best = below
            self._cut_short = clock.up()
            return self.best.peak_bytes <= budget_bytes

    def least(self, clock: Clock) -> Judged:
        """Go down to the end, and while the problem is not large ask the integer program too."""
        self.reaches(-1, clock)
        best = self._sink(self.best, clock)
        for _ in range(_LAST if len(self.search.screen.columns) <= ASKED else 0):
            target = best.peak_bytes - 1
            below = None if clock.up() else within(self.search, target, clock, thorough=False)
            if below is None:
                break
            best = self._sink(below, clock)
        return best

    def _sink(self, best: Judged, clock: Clock) -> Judged:
        """Towards a target below the peak, then on the highest peak, for as long as that pays."""
        low_bytes = lowest_bytes(self.search)
        for _ in range(_ROUNDS):
            before = best.peak_bytes
            for goal in (Goal(before - max(1, (before - low_bytes) // _SHARE)), _HIGHEST):
                if goal.budget_bytes < low_bytes and goal.summed:
                    continue
                found = self.search.improve(best, goal, effort=_EFFORT, clock=clock)
                best = min(best, found, key=_peak)
            if clock.up() or before - best.peak_bytes <= _PAYS * before:
                break
        return best


_FLOORS: dict[RematProblem, frozenset[int]] = {}


@lru_cache(maxsize=8)
def _descent(key: Same) -> _Descent:
    return _Descent(key.problem)


def least(core: RematProblem, search: Search, clock: Clock) -> Judged:
    """The choice with the least peak; found once for each step, whatever it is priced at.

    Args:
        core: The step without resident bytes.
        search: Its search.
        clock: The safety net; what was found when it struck is not kept.

    Returns:
        The choice and what the simulator says of it.
    """
    if search.few:
        return min(search.few, key=_peak)
    plain = bytes_only(core)
    if plain in _FLOORS:
        return search.judge(_FLOORS[plain])
    found = search.judge(_descent(Same(core)).least(clock).saved)
    if not clock.up():
        if len(_FLOORS) >= 64:
            _FLOORS.pop(next(iter(_FLOORS)))
        _FLOORS[plain] = found.saved
    return found


def leads_to(core: RematProblem, search: Search, budget_bytes: int, clock: Clock) -> bool:
    """Does the beginning of the search for the least peak reach a budget already?

    Args:
        core: The step without resident bytes.
        search: Its search.
        budget_bytes: The budget. [bytes]
        clock: The safety net.
    """
    return not search.few and _descent(Same(core)).reaches(budget_bytes, clock)


def lowest_bytes(search: Search) -> int:
    """What the step holds at its highest place whatever is saved. [bytes]"""
    needs = search.screen.needs
    return max(max(needs.fixed_bytes), max(needs.forward_bytes, default=0))


def _peak(judged: Judged) -> tuple[int, int]:
    return judged.peak_bytes, judged.recompute_ns
