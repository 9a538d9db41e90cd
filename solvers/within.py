"""The cheapest plan within a budget that the integer program and the search find together.

Relax the residency model, round the answer by diving, judge it by the simulator, and search from
there. Where the simulator holds more than the model said, the model is tightened at those positions
and asked again. Equal layers make branch and bound visit the same plan in many disguises, while a
dive ends after a few linear programs and the search repairs what rounding broke; so only small
problems are branched on. Where the result stays well above the relaxation, the search starts again
from disturbed copies of the best choice. The other starts (everything saved, the inputs of blocks,
nothing saved) see to it that a plan comes back where the model has none.
"""

import math
import random
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from fxremat.problem import RematProblem
from fxremat.solvers.block import block_choice
from fxremat.solvers.greedy import greedy_choices
from fxremat.solvers.ilp import Residency
from fxremat.solvers.search import Clock, Goal, Judged, Search
from fxremat.solvers.stages import cut


class Grain(NamedTuple):
    """How finely the model cuts the backward.

    Attributes:
        stages: How many there are.
        reach: How many of them a replay has one by one.
        dives: Linear programs in one dive.
        asked: How often the model is asked, each time tightened by what the simulator says.
    """

    stages: int
    reach: int
    dives: int
    asked: int


COARSE = Grain(32, 4, 2, 1)  # in a third of the time; its plans are as good where there is room
FINE = Grain(96, 8, 4, 2)
_NODES = 200
_KICKS = (12, 4, 12)  # values that each new start flips
_CLOSE = 0.01  # share of the relaxed time that a plan may be above it and is left alone
_CLOSE_STEP = 0.004  # or share of the step
_KICK_EFFORT = 4000
_EFFORT = 12_000  # choices that one descent may price
SMALL = 64  # candidates up to which every start is searched from and the model branched on


def starts(search: Search) -> tuple[Judged, ...]:
    """Choices to begin with, without a model."""
    problem = search.problem
    return (
        search.judge(search.screen.needs.candidates),
        search.judge(block_choice(problem)),
        search.judge(()),
    )


def within(
    search: Search,
    budget_bytes: int,
    clock: Clock,
    *,
    thorough: bool = True,
    grain: Grain = FINE,
    known: Judged | None = None,
    close_ns: float = -math.inf,
) -> Judged | None:
    """Find the cheapest choice within a budget.

    Args:
        search: Of the problem.
        budget_bytes: The budget, resident bytes included. [bytes]
        clock: The safety net; effort is counted in nodes and choices.
        thorough: Spend more effort on its cost once a choice is found.
        grain: Of the model.
        known: A choice found before.
        close_ns: A time so low that no more effort is spent on it. [ns]

    Returns:
        The best choice found, or None when none is within the budget.
    """
    goal = Goal(budget_bytes)

    def key(judged: Judged) -> tuple[int, int, int]:
        return judged.key(goal)

    if search.few:
        best = min(search.few, key=key)
        return best if best.peak_bytes <= budget_bytes else None
    seeds = starts(search)
    if seeds[0].peak_bytes <= budget_bytes:
        return seeds[0]
    seeds += tuple(search.judge(saved) for saved in greedy_choices(search.problem, budget_bytes))
    small = len(search.screen.columns) <= SMALL
    answers, relaxed_ns = _answers(search, goal, clock, grain)
    found = _descend(search, answers, goal, clock)
    if small or not any(judged.peak_bytes <= budget_bytes for judged in found):
        nearest = sorted(seeds, key=key)
        found += _descend(search, nearest if small else nearest[:2], goal, clock)
    best = min([*found, *seeds, *([known] if known else ())], key=key)
    if best.peak_bytes > budget_bytes:
        return None
    if thorough and best.recompute_ns > max(close_ns, close_to(search.problem, relaxed_ns)):
        best = _kicked(search, best, goal, clock)
    return best


def around(search: Search, start: Judged, budget_bytes: int, clock: Clock) -> Judged:
    """Search from a choice that is within the budget, without the model.

    Next to the least peak that finds in a few seconds what the model, whose rows are then hardest
    to meet, takes several times as long for.

    Args:
        search: Of the problem.
        start: The choice.
        budget_bytes: The budget. [bytes]
        clock: The safety net.

    Returns:
        The best choice found.
    """
    goal = Goal(budget_bytes)
    found = search.improve(start, goal, effort=_EFFORT, clock=clock)
    return _kicked(search, found, goal, clock)


def _descend(search: Search, judged: Iterable[Judged], goal: Goal, clock: Clock) -> list[Judged]:
    """The best choice below each of some."""
    return [search.improve(start, goal, effort=_EFFORT, clock=clock) for start in judged]


def close_to(problem: RematProblem, lower_ns: float) -> float:
    """A time so near to a bound or a relaxation that no more effort is spent on it.

    Args:
        problem: The step.
        lower_ns: The bound; minus infinity without one. [ns]

    Returns:
        The time. [ns]
    """
    if lower_ns == -math.inf:
        return lower_ns
    return lower_ns + max(_CLOSE * abs(lower_ns), _CLOSE_STEP * problem.step_ns)


def _kicked(search: Search, best: Judged, goal: Goal, clock: Clock) -> Judged:
    """Search again from copies of the best choice with a few values flipped."""
    free = [g for g in search.screen.columns if g not in search.kept]
    draw = random.Random(0)
    for number in _KICKS:
        if clock.up():
            break
        flipped = frozenset(draw.sample(free, min(number, len(free) // 2)))
        start = search.judge(best.saved ^ flipped)
        found = search.improve(start, goal, effort=_KICK_EFFORT, clock=clock)
        best = min(best, found, key=lambda judged: judged.key(goal))
    return best


@lru_cache(maxsize=8)
def _model(search: Search, grain: Grain) -> Residency:
    """The model of a problem; it is built once, since only the budget differs."""
    high_bytes = search.judge(search.screen.needs.candidates).peak_bytes
    stages = cut(search.problem, search.screen.needs, grain.stages)
    return Residency(search.problem, stages, high_bytes, reach=grain.reach)


def _answers(search: Search, goal: Goal, clock: Clock, grain: Grain) -> tuple[list[Judged], float]:
    """The model's answers, for the budget and once more after tightening; its relaxed time [ns]."""
    answers: list[Judged] = []
    excess: dict[int, int] = {}
    relaxed_ns = -math.inf
    if clock.up():
        return answers, relaxed_ns
    model = _model(search, grain)
    small = len(model.s) <= SMALL
    for _ in range(grain.asked):
        model.restrict(goal.budget_bytes, excess)
        saved, recompute_ns = _branch(model, clock) if small else _dive(model, clock, grain.dives)
        relaxed_ns = recompute_ns if not answers else relaxed_ns
        if saved is None or clock.up():
            break
        judged = search.judge(saved)
        if judged in answers:
            break
        answers.append(judged)
        if judged.peak_bytes <= goal.budget_bytes:
            break
        for index, size_bytes in enumerate(search.excess_bytes(judged).tolist()):
            if size_bytes:
                excess[index - 1] = max(excess.get(index - 1, 0), size_bytes)
    return answers, relaxed_ns


def _branch(model: Residency, clock: Clock) -> tuple[frozenset[int] | None, float]:
    """Branch and bound: what it saves, and its time. [ns]"""
    found = model.solve(time_limit_s=clock.left_s(), node_limit=_NODES)
    return (None, -math.inf) if found is None else (found.saved, found.recompute_ns)


def _dive(model: Residency, clock: Clock, dives: int) -> tuple[frozenset[int] | None, float]:
    """Solve the relaxation, fix what is whole and half of the rest, and repeat.

    Returns:
        What the last relaxation saves, rounded, and the time of the first. [ns]
    """
    chosen: frozenset[int] | None = None
    recompute_ns = -math.inf
    for _ in range(dives):
        relaxed = model.relax(time_limit_s=clock.left_s())
        if relaxed is None:
            break
        if chosen is None:
            recompute_ns = relaxed.recompute_ns
        chosen = frozenset(g for g, v in relaxed.fractions.items() if v > 0.5) | model.held
        order = sorted(relaxed.fractions.items(), key=lambda pair: min(pair[1], 1 - pair[1]))
        whole = sum(min(v, 1 - v) < 1e-6 for _, v in order)
        if whole == len(order) or clock.up():
            break
        number = whole + (len(order) - whole + 1) // 2
        model.fix({g: v > 0.5 for g, v in order[:number]})
    model.fix({})
    return chosen, recompute_ns
