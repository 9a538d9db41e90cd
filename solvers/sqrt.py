"""Chen's schedule for chains: save about sqrt(n) values, evenly spread, and replay the rest.

Only values that every path through the forward passes are saved, so that each replayed segment
starts from one of them (https://arxiv.org/abs/1604.06174). Unlike there, segments are counted in
operations, not in bytes, and a graph with few such values is cut in fewer places.
"""

from fxremat.plans import Solution
from fxremat.problem import RematProblem
from fxremat.solvers.articulations import articulations, spread
from fxremat.solvers.single import single


def sqrt(problem: RematProblem, budget_bytes: int, *, time_limit_s: float) -> Solution:
    """Save as many values as the square root of the number of operations.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        time_limit_s: Not needed. [s]

    Returns:
        That plan, if it is within the budget.
    """
    del time_limit_s
    cuts = spread(problem)
    saved = [g for g in articulations(problem) if problem.storages[g].producer in cuts]
    return single(problem, budget_bytes, saved, f"{len(saved)} values saved, evenly spread")
