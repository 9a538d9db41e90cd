"""Answer with one given choice, or with nothing when it does not fit."""

from collections.abc import Collection

from fxremat.plans import Solution
from fxremat.problem import RematProblem
from fxremat.schedule import expand
from fxremat.simulate import simulate
from fxremat.solvers.needs import find_needs


def single(
    problem: RematProblem, budget_bytes: int, saved: Collection[int], message: str
) -> Solution:
    """Simulate one choice.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        saved: Storages to keep, besides those that every plan keeps.
        message: What the choice is, for people.

    Returns:
        Its schedule, or none and how many bytes it would need.
    """
    schedule = expand(problem, find_needs(problem).kept | set(saved))
    peak_bytes = simulate(problem, schedule).peak_bytes
    if peak_bytes > budget_bytes:
        return Solution(None, message=f"{message}: needs {peak_bytes:,} bytes")
    return Solution(schedule, message=message)
