"""Every choice of what to save, tried one after the other: the oracle for small problems."""

from itertools import combinations

from fxremat.problem import RematProblem
from fxremat.schedule import expand
from fxremat.simulate import simulate
from fxremat.solvers.needs import find_needs


def exhaustive(problem: RematProblem) -> list[tuple[int, int]]:
    """Peak and extra time of every saved set that ``expand`` makes a schedule of.

    Args:
        problem: A problem with few candidates.

    Returns:
        The pairs that no other one beats in both, by peak.
    """
    needs = find_needs(problem)
    free = [g for g in needs.candidates if g in problem.replays_of and g not in needs.kept]
    found: list[tuple[int, int]] = []
    for number in range(len(free) + 1):
        for saved in combinations(free, number):
            simulation = simulate(problem, expand(problem, needs.kept | set(saved)))
            found.append((simulation.peak_bytes, simulation.recompute_ns))
    best: list[tuple[int, int]] = []
    for pair in sorted(found):
        if not best or pair[1] < best[-1][1]:
            best.append(pair)
    return best


def optimum(pairs: list[tuple[int, int]], budget_bytes: int) -> int | None:
    """The least extra time within a budget [ns]; None when nothing fits."""
    return min((cost_ns for peak, cost_ns in pairs if peak <= budget_bytes), default=None)
