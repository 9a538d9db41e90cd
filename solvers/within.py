"""The cheapest plan within a budget that the integer program and the search find together.

Solve the residency model, judge its answer by the simulator, and search from there. Where the
simulator holds more than the model said, the model is tightened at those positions and solved again.
The other starts (everything saved, the inputs of blocks, nothing saved) see to it that a plan comes
back where the model has none.
"""

from collections.abc import Iterable

from fxremat.solvers.block import block_choice
from fxremat.solvers.ilp import Residency, Selection
from fxremat.solvers.search import Clock, Goal, Judged, Search
from fxremat.solvers.stages import cut

_STAGES, _REACH = 48, 4
_NODES = 20
_EFFORT = 12_000  # choices that one descent may price


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

    found = [descend(judged) for judged in _modelled(search, budget_bytes, clock)]
    if not any(judged.peak_bytes <= budget_bytes for judged in found):
        found += [descend(judged) for judged in sorted(seeds, key=key)[:2]]
    best = min([*found, *seeds], key=key)
    return best if best.peak_bytes <= budget_bytes else None


def _modelled(search: Search, budget_bytes: int, clock: Clock) -> list[Judged]:
    """Answers of the model: one for the budget, one more after tightening."""
    problem = search.problem
    stages = cut(problem, search.screen.needs, _STAGES)
    model = Residency(problem, stages, budget_bytes, reach=_REACH)
    answers: list[Judged] = []
    excess: dict[int, int] = {}
    for _ in range(3):
        saved = _round(model, clock)
        if saved is None or clock.up():
            break
        judged = search.judge(saved)
        if judged in answers:
            break
        answers.append(judged)
        if judged.peak_bytes <= budget_bytes:
            break
        for index, size_bytes in enumerate(search.excess_bytes(judged).tolist()):
            if size_bytes:
                excess[index - 1] = max(excess.get(index - 1, 0), size_bytes)
        model.restrict(budget_bytes, excess)
    return answers


def _round(model: Residency, clock: Clock) -> frozenset[int] | None:
    """Solve the relaxation, keep what is whole in it, and let branch and bound do the rest."""
    relaxed = model.relax(time_limit_s=clock.left_s())
    if relaxed is None:
        return None
    whole = {g: v > 0.5 for g, v in relaxed.fractions.items() if min(v, 1.0 - v) < 1e-6}
    model.fix(whole)
    found: Selection | None = model.solve(
        time_limit_s=clock.left_s(), node_limit=_NODES, relative_gap=2e-3
    )
    model.fix({})
    if found is not None:
        return found.saved
    return frozenset(g for g, v in relaxed.fractions.items() if v > 0.5)
