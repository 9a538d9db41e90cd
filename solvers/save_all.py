"""Save everything that the backward reads: the unrewritten step, judged like any other."""

from fxremat.plans import Solution
from fxremat.problem import RematProblem
from fxremat.solvers.needs import find_needs
from fxremat.solvers.single import single


def save_all(problem: RematProblem, budget_bytes: int, *, time_limit_s: float) -> Solution:
    """Recompute nothing.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        time_limit_s: Not needed. [s]

    Returns:
        The step as it is, if that is within the budget.
    """
    del time_limit_s
    return single(problem, budget_bytes, find_needs(problem).candidates, "everything saved")
