"""The least peak: the plan below which fxremat says that a budget cannot be met.

First descend on the peak from several starts. Then ask ``within``, as ``refine`` does, for that
peak and for one byte less, with the integer program and all, until it finds nothing lower: so a
budget of the floor gives a plan of exactly that peak, and one byte less is refused, in this process
and in any other.
"""

from dataclasses import replace
from functools import lru_cache

from fxremat.problem import RematProblem
from fxremat.solvers.needs import Same
from fxremat.solvers.search import Clock, Goal, Judged, Search
from fxremat.solvers.within import starts, within

FLOOR_LIMIT_S = 120.0  # of its search; the same for all who ask, so that all get the same floor
_EFFORT = 12_000
_LAST = 12  # how often to ask for one byte less
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


def known(core: RematProblem, search: Search) -> Judged | None:
    """The floor's choice if it has been found already."""
    saved = _FLOORS.get(bytes_only(core))
    return None if saved is None else search.judge(saved)


def least(
    core: RematProblem, search: Search, clock: Clock, *, ceiling_bytes: int | None = None
) -> Judged:
    """The choice with the least peak; found once for each step, whatever it is priced at.

    Args:
        core: The step without resident bytes.
        search: Its search.
        clock: The safety net.
        ceiling_bytes: A peak that others reach; ``within`` is asked for less than that too. [bytes]

    Returns:
        The choice and what the simulator says of it.
    """
    plain = bytes_only(core)
    if plain not in _FLOORS:
        if len(_FLOORS) >= 64:
            _FLOORS.pop(next(iter(_FLOORS)))
        if search.few:
            found = min(search.few, key=_peak)
        else:
            start = search.judge(_find(Search(plain), clock).saved)
            found = _settle(search, start, clock)
        _FLOORS[plain] = found.saved
    found = search.judge(_FLOORS[plain])
    if ceiling_bytes is not None and ceiling_bytes < found.peak_bytes:
        below = within(search, ceiling_bytes - 1, clock, polish=False)
        if below is not None:
            found = _settle(search, _sink(search, below, lowest_bytes(search), clock), clock)
            _FLOORS[plain] = found.saved
    return found


def _settle(search: Search, best: Judged, clock: Clock) -> Judged:
    """Ask what ``refine`` asks at this peak and one byte below, until neither finds less."""
    for _ in range(_LAST):
        if clock.up():
            break
        below = within(search, best.peak_bytes - 1, clock, polish=False)
        if below is None:
            at = within(search, best.peak_bytes, clock)
            below = at if at is not None and at.peak_bytes < best.peak_bytes else None
        if below is None:
            break
        best = _sink(search, below, lowest_bytes(search), clock)
    return best


def lowest_bytes(search: Search) -> int:
    """What the step holds at its highest place whatever is saved. [bytes]"""
    needs = search.screen.needs
    return max(max(needs.fixed_bytes), max(needs.forward_bytes, default=0))


def _find(search: Search, clock: Clock) -> Judged:
    """Descend on the highest peak from the two lowest starts, and from the better end once more."""
    low = lowest_bytes(search)
    highest = Goal(0, summed=False)
    sunk = [
        search.improve(start, highest, effort=_EFFORT, clock=clock)
        for start in sorted(starts(search), key=_peak)[:2]
    ]
    return _sink(search, min(sunk, key=_peak), low, clock)


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
