"""Plans beyond one replay, for ``auto``: the cheapest nested schedule within a budget.

Nested replays come from ``rotor``, which prices blocks of any shape, and from ``revolve``, which is
exact on equal steps. A schedule that replays too much is left out, since its graph would be too
long to run: the least peak, and so the floor, is that of the others.
"""

from collections.abc import Iterator
from functools import lru_cache

from fxremat.plans import Solution
from fxremat.problem import RematProblem
from fxremat.schedule import tidy
from fxremat.simulate import Schedule, Simulation, simulate
from fxremat.solvers.bound import ANY_REPLAYS, bound_ns
from fxremat.solvers.chain import find_chain
from fxremat.solvers.floor import bytes_only
from fxremat.solvers.needs import Same
from fxremat.solvers.revolve import revolve_schedule
from fxremat.solvers.rotor import rotor_lowest, rotor_schedule
from fxremat.solvers.search import NO_HURRY, Clock, OutOfTimeError

MOST_FORWARDS = 8  # replays of a schedule at most, in forwards
_KEPT = 64  # problems whose lowest schedule is remembered
_BLOCKS = 3  # a chain of fewer has nothing to nest


def worth_running(problem: RematProblem, schedule: Schedule) -> bool:
    """Is its backward short enough for a graph?"""
    replays = len(schedule.backward) - len(problem.backward)
    return replays <= MOST_FORWARDS * problem.num_forward


_Judged = tuple[Simulation, Schedule]


_LOWEST: dict[RematProblem, Schedule | None] = {}


def _lowest_of(plain: RematProblem, clock: Clock) -> Schedule | None:
    if plain not in _LOWEST:
        found: Schedule | None = None
        if len(find_chain(plain)) >= _BLOCKS:
            long = rotor_lowest(plain, lambda schedule: worth_running(plain, schedule), clock)
            best = min(_judged(plain, long), key=lambda pair: pair[0].peak_bytes, default=None)
            found = None if best is None else best[1]
        if len(_LOWEST) >= _KEPT:
            _LOWEST.pop(next(iter(_LOWEST)))
        _LOWEST[plain] = found
    return _LOWEST[plain]


class _Asked(Same):
    """A problem whose lowest schedule is asked for; the clock is no part of the key."""

    def __init__(self, problem: RematProblem, clock: Clock) -> None:
        super().__init__(problem)
        self.clock = clock


@lru_cache(maxsize=8)
def _lowest(key: _Asked) -> _Judged | None:
    schedule = _lowest_of(bytes_only(key.problem), key.clock)
    return None if schedule is None else (simulate(key.problem, schedule), schedule)


def lowest(problem: RematProblem, clock: Clock = NO_HURRY) -> Schedule | None:
    """The nested schedule with the least peak, of those worth running, whatever they cost.

    Args:
        problem: The step.
        clock: When to give up.

    Returns:
        The schedule; None where the forward is no chain of blocks, or the time was too short.
    """
    try:
        found = _lowest(_Asked(problem, clock))
    except OutOfTimeError:
        return None
    return None if found is None else found[1]


def nested(problem: RematProblem, budget_bytes: int, clock: Clock = NO_HURRY) -> Schedule | None:
    """The cheapest nested schedule within a budget, of those worth running.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        clock: When to give up.

    Returns:
        The schedule; None exactly where the budget is below the peak of ``lowest``, or where the
        forward is no chain of blocks.

    Raises:
        OutOfTimeError: The clock has struck.
    """
    least = _lowest(_Asked(problem, clock))
    if least is None or least[0].peak_bytes > budget_bytes:
        return None
    proposed = (
        rotor_schedule(problem, budget_bytes, clock),
        revolve_schedule(problem, budget_bytes),
    )
    judged = [least, *_judged(problem, (s for s in proposed if s is not None))]
    fitting = [pair for pair in judged if pair[0].peak_bytes <= budget_bytes]
    return min(fitting, key=lambda pair: (pair[0].recompute_ns, pair[0].peak_bytes))[1]


def _judged(problem: RematProblem, schedules: Iterator[Schedule]) -> Iterator[_Judged]:
    """Tidied schedules that are worth running, with what the simulator says of them."""
    for schedule in schedules:
        if worth_running(problem, schedule):
            tidied = tidy(problem, schedule.backward)
            yield simulate(problem, tidied), tidied


def beyond(problem: RematProblem, budget_bytes: int, *, time_limit_s: float) -> Solution:
    """Nested replays with a bound that holds whatever is replayed, and how often.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        time_limit_s: A safety net. [s]

    Returns:
        The schedule, if there is one within the budget.
    """
    clock = Clock(time_limit_s)
    try:
        schedule = nested(problem, budget_bytes, clock)
    except OutOfTimeError:
        return Solution(None, message="the time given is too short for nested replays")
    if schedule is None:
        return Solution(None, message="no nested replays are within the budget")
    bound = None
    if not clock.up():
        bound = bound_ns(problem, budget_bytes, (), time_limit_s=clock.left_s())
    if bound is None:
        return Solution(schedule, message="nested replays")
    return Solution(schedule, bound, ANY_REPLAYS, "nested replays")
