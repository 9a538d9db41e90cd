"""Small problems are searched whole: ``ilp`` and ``auto`` then return the optimum of their class.

``ilp`` replays a value just before its first reader. ``exhaustive`` looks at every place, and in
problems of this size it is the faster of the two. It counts what it looks at, not seconds: whether
it gives up depends on problem and budget alone.
"""

from functools import lru_cache

from fxremat.plans import Solution
from fxremat.problem import RematProblem
from fxremat.solvers.bound import BOUND_CLASS
from fxremat.solvers.exhaustive import Found, best_schedule
from fxremat.solvers.needs import Same

_OPERATIONS = 24  # that can be replayed
_NODES = 40_000  # a second or two
_LIMIT_S = 120.0  # a safety net


@lru_cache(maxsize=256)
def _optimum(key: Same, budget_bytes: int | None) -> Found:
    return best_schedule(
        key.problem,
        budget_bytes,
        time_limit_s=_LIMIT_S,
        node_limit=_NODES,
        most_operations=_OPERATIONS,
    )


def optimum(problem: RematProblem, budget_bytes: int | None) -> Found:
    """The best schedule with one replay of each operation, if the problem is small.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included; None asks for the least peak. [bytes]

    Returns:
        What the search found; ``given_up`` where the problem is too large for it.
    """
    return _optimum(Same(problem), budget_bytes)


def solution_of(found: Found) -> Solution:
    """A finished search as a solution: the optimum is its own bound."""
    if found.schedule is None or found.simulation is None:
        return Solution(None, message="no schedule with one replay per operation is so small")
    optimum_ns = found.simulation.recompute_ns
    return Solution(found.schedule, optimum_ns, BOUND_CLASS, "optimal", solver="exhaustive")
