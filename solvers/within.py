"""The cheapest plan within a budget that the integer program and the search find together.

Relax the residency model, round the answer by diving, judge it by the simulator, and search from
there. Where the simulator holds more than the model said, the model is tightened at those positions
and asked again. A coarse and a fine cut of the backward are asked in turn: the fine one overestimates
less. Equal layers make branch and bound visit the same plan in many disguises, while a dive ends after
a few linear programs and the search repairs what rounding broke; so only small problems are
branched on. The other starts (everything saved, the inputs of blocks, nothing saved) see to it that
a plan comes back where the model has none.
"""

from collections.abc import Iterable
from functools import lru_cache

from fxremat.solvers.block import block_choice
from fxremat.solvers.ilp import Residency
from fxremat.solvers.search import Clock, Goal, Judged, Search
from fxremat.solvers.stages import cut

_CUTS = ((96, 8),)  # stages, and how many of them a replay has one by one
_DIVES = 4  # linear programs in one dive
_NODES = 200
_EFFORT = 12_000  # choices that one descent may price
_SMALL = 64  # candidates up to which every start is searched from and the model branched on


def starts(search: Search) -> tuple[Judged, ...]:
    """Choices to begin with, without a model."""
    problem = search.problem
    return (
        search.judge(search.screen.needs.candidates),
        search.judge(block_choice(problem)),
        search.judge(()),
    )


def within(
    search: Search, budget_bytes: int, clock: Clock, known: Iterable[Judged] = ()
) -> Judged | None:
    """Find the cheapest choice within a budget.

    Args:
        search: Of the problem.
        budget_bytes: The budget, resident bytes included. [bytes]
        clock: The safety net; effort is counted in nodes and choices.
        known: More choices to begin with.

    Returns:
        The best choice found, or None when none is within the budget.
    """
    seeds = [*starts(search), *known]
    if seeds[0].peak_bytes <= budget_bytes:
        return seeds[0]
    goal = Goal(budget_bytes)

    def key(judged: Judged) -> tuple[int, int, int]:
        return judged.key(goal)

    def descend(judged: Judged) -> Judged:
        return search.improve(judged, goal, effort=_EFFORT, clock=clock)

    small = len(search.screen.columns) <= _SMALL
    found: list[Judged] = []
    for number, reach in _CUTS[: 1 if small else None]:
        found += [descend(judged) for judged in _modelled(search, number, reach, goal, clock)]
    if small or not any(judged.peak_bytes <= budget_bytes for judged in found):
        found += [descend(judged) for judged in sorted(seeds, key=key)[: 9 if small else 2]]
    found += search.all_choices(goal)
    best = min([*found, *seeds], key=key)
    return best if best.peak_bytes <= budget_bytes else None


@lru_cache(maxsize=8)
def _model(search: Search, number: int, reach: int) -> Residency:
    """The model of a problem; it is built once, since only the budget differs."""
    high_bytes = search.judge(search.screen.needs.candidates).peak_bytes
    stages = cut(search.problem, search.screen.needs, number)
    return Residency(search.problem, stages, high_bytes, reach=reach)


def _modelled(search: Search, number: int, reach: int, goal: Goal, clock: Clock) -> list[Judged]:
    """Answers of one model: for the budget, and once more after tightening."""
    model = _model(search, number, reach)
    answers: list[Judged] = []
    excess: dict[int, int] = {}
    for _ in range(2):
        model.restrict(goal.budget_bytes, excess)
        saved = _branch(model, clock) if len(model.s) <= _SMALL else _dive(model, clock)
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
    return answers


def _branch(model: Residency, clock: Clock) -> frozenset[int] | None:
    """Branch and bound."""
    found = model.solve(time_limit_s=clock.left_s(), node_limit=_NODES)
    return None if found is None else found.saved


def _dive(model: Residency, clock: Clock) -> frozenset[int] | None:
    """Solve the relaxation, fix what is whole and half of what is nearly so, and repeat."""
    chosen: frozenset[int] | None = None
    for _ in range(_DIVES):
        relaxed = model.relax(time_limit_s=clock.left_s())
        if relaxed is None:
            break
        chosen = frozenset(g for g, v in relaxed.fractions.items() if v > 0.5) | model.held
        order = sorted(relaxed.fractions.items(), key=lambda pair: min(pair[1], 1 - pair[1]))
        whole = sum(min(v, 1 - v) < 1e-6 for _, v in order)
        if whole == len(order) or clock.up():
            break
        number = whole + (len(order) - whole + 1) // 2
        model.fix({g: v > 0.5 for g, v in order[:number]})
    model.fix({})
    return chosen
