"""The plan that keeps the least from forward to backward.

For a piece of a call of which the rest is not known yet: what it keeps stays on the device while
the rest runs. A workspace at the turn from forward to backward stands for that rest; the more of it
fits, the less is kept.
"""

from collections.abc import Iterable
from dataclasses import replace

from fxremat.plans import Solution
from fxremat.problem import Operation, RematProblem
from fxremat.schedule import expand
from fxremat.simulate import Schedule, Step, simulate
from fxremat.solvers.block import block_choice
from fxremat.solvers.floor import core_of
from fxremat.solvers.greedy import greedy_choices
from fxremat.solvers.search import Clock
from fxremat.solvers.within import within

_HALVINGS = 2  # of the way between what must be kept and what a cheap choice keeps


def lean(problem: RematProblem, budget_bytes: int, *, time_limit_s: float) -> Solution:
    """Find a schedule within a budget that keeps little.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        time_limit_s: A safety net. [s]

    Returns:
        The schedule, without a bound on its time; none where the search found none.
    """
    clock = Clock(time_limit_s)
    nothing = expand(problem, problem.outputs if problem.outputs_held else ())
    if simulate(problem, nothing).peak_bytes <= budget_bytes:
        return Solution(nothing, message="keeps nothing that can be made again")
    schedules = list(_schedules(problem, budget_bytes, clock))
    fitting = [s for s in schedules if simulate(problem, s).peak_bytes <= budget_bytes]
    if not fitting:
        return Solution(None, message="none was found")
    best = min(fitting, key=lambda s: kept_bytes(problem, s))
    low_bytes = kept_bytes(problem, nothing)
    for _ in range(_HALVINGS):
        middle_bytes = (low_bytes + kept_bytes(problem, best)) // 2
        found = _keeping(problem, middle_bytes, budget_bytes, clock)
        if found is None or clock.up():
            low_bytes = middle_bytes
        else:
            best = found
    return Solution(best, message="keeps little")


def kept_bytes(problem: RematProblem, schedule: Schedule) -> int:
    """What a schedule holds when its backward starts, with all that is held then. [bytes]"""
    return simulate(problem, schedule).entry_bytes


def _schedules(problem: RematProblem, budget_bytes: int, clock: Clock) -> Iterable[Schedule]:
    """Schedules to begin with."""
    yield expand(problem, block_choice(problem))
    for choice in greedy_choices(problem, budget_bytes):
        yield expand(problem, choice)
    found = _within(problem, budget_bytes, clock)
    if found is not None:
        yield found


def _keeping(problem: RematProblem, kept: int, budget_bytes: int, clock: Clock) -> Schedule | None:
    """A schedule within a budget that keeps at most so much; None where none was found."""
    found = _within(_with_turn(problem, budget_bytes - kept), budget_bytes, clock)
    if found is None:
        return None
    number = problem.num_forward
    backward = tuple(
        step if step.operation < number else Step(step.operation - 1)
        for step in found.backward
        if step.operation != number
    )
    schedule = Schedule(found.forward, backward)
    simulation = simulate(problem, schedule)
    fits = simulation.peak_bytes <= budget_bytes and simulation.entry_bytes <= kept
    return schedule if fits else None


def _within(problem: RematProblem, budget_bytes: int, clock: Clock) -> Schedule | None:
    _, search = core_of(problem)
    found = within(search, budget_bytes - problem.resident_bytes, clock, thorough=False)
    return None if found is None else search.schedule(found.saved)


def _with_turn(problem: RematProblem, workspace_bytes: int) -> RematProblem:
    """The problem with so much held by others between forward and backward."""
    turn = Operation("turn", "the rest of the call", (), (), 0, workspace_bytes)
    number = problem.num_forward

    def moved(index: int) -> int:
        return index + 1 if index >= number else index

    return replace(
        problem,
        operations=(*problem.forward, turn, *problem.backward),
        storages=tuple(
            s if s.producer < number else replace(s, producer=moved(s.producer))
            for s in problem.storages
        ),
    )
