"""The least peak: the plan below which fxremat says that a budget cannot be met.

First descend on the peak from several starts, then halve the distance to what the backward holds in
any case with the integer program, and last ask for one byte less until nothing is found. That last
question is the one which ``refine`` asks at a budget of one byte below the floor, so both agree.
"""

from dataclasses import replace
from functools import lru_cache

from fxremat.problem import RematProblem
from fxremat.simulate import Schedule
from fxremat.solvers.search import Clock, Goal, Judged, Search
from fxremat.solvers.within import modelled, starts, within

FLOOR_LIMIT_S = 120.0  # of its search; the same for all who ask, so that all get the same floor
_EFFORT = 12_000
_HALVINGS = 3
_LAST = 12  # how often to ask for one byte less
_SHARES = (2, 8, 32)  # parts of the way down to try at once


class _Key:
    """A problem as a key: the same object only."""

    def __init__(self, problem: RematProblem) -> None:
        self.problem = problem

    def __hash__(self) -> int:
        return id(self.problem)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.problem is self.problem


@lru_cache(maxsize=8)
def _search_for(key: _Key) -> Search:
    return Search(key.problem)


def search_for(problem: RematProblem) -> Search:
    """The search of a problem; what the simulator said of a choice is asked once."""
    return _search_for(_Key(problem))


def bytes_only(problem: RematProblem) -> RematProblem:
    """The problem with every call at the same cost, which is all that the least peak depends on.

    So a floor that was found once holds for the same step priced anew.
    """
    return replace(
        problem,
        operations=tuple(replace(o, cost_ns=1, source="", module="") for o in problem.operations),
        replays=tuple(replace(r, cost_ns=1) for r in problem.replays),
        costs="",
        name="",
    )


_FLOORS: dict[RematProblem, frozenset[int]] = {}


def known(problem: RematProblem) -> Judged | None:
    """The floor's choice if it has been found already."""
    saved = _FLOORS.get(bytes_only(problem))
    return None if saved is None else search_for(problem).judge(saved)


def least(problem: RematProblem, clock: Clock) -> Judged:
    """The choice with the least peak; found once for each step, whatever it is priced at.

    Args:
        problem: The step.
        clock: The safety net.

    Returns:
        The choice and what the simulator says of it.
    """
    plain = bytes_only(problem)
    if plain not in _FLOORS:
        if len(_FLOORS) >= 64:
            _FLOORS.pop(next(iter(_FLOORS)))
        _FLOORS[plain] = _find(Search(plain), clock).saved
    return search_for(problem).judge(_FLOORS[plain])


def _find(search: Search, clock: Clock) -> Judged:
    """Descend, bisect with the model, and ask for one byte less until there is nothing."""
    low = max(
        max(search.screen.needs.fixed_bytes), max(search.screen.needs.forward_bytes, default=0)
    )
    highest = Goal(0, summed=False)
    sunk = [
        search.improve(start, highest, effort=_EFFORT, clock=clock)
        for start in sorted(starts(search), key=_peak)[:2]
    ]
    best = _sink(search, min(sunk, key=_peak), low, clock)
    for _ in range(_HALVINGS):
        middle = (low + best.peak_bytes) // 2
        if clock.up() or middle <= low:
            break
        found = modelled(search, middle, clock)
        if found is None:
            low = middle
        else:
            best = _sink(search, found, low, clock)
    for _ in range(_LAST):
        found = None if clock.up() else within(search, best.peak_bytes - 1, clock, polish=False)
        if found is None:
            break
        best = _sink(search, found, low, clock)
    return best


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


def floor(problem: RematProblem, *, time_limit_s: float) -> Schedule:
    """Find the schedule with the least peak that fxremat can plan.

    Args:
        problem: The step.
        time_limit_s: A safety net; the best so far comes back. [s]

    Returns:
        The schedule.
    """
    found = least(problem, Clock(time_limit_s))
    return search_for(problem).schedule(found.saved)
