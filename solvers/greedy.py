"""Drop the values that take the most bytes for the least time, until the step fits.

What most hand-written selectors do: each value is priced on its own, as if its inputs were there.
The price of a chain of dropped values is thus underestimated, which is what the integer program
does better. Every step is judged by the simulator.
"""

from fxremat.plans import Solution
from fxremat.problem import RematProblem
from fxremat.schedule import expand
from fxremat.simulate import simulate
from fxremat.solvers.needs import find_needs


def drop_order(problem: RematProblem) -> tuple[int, ...]:
    """Candidates that can be replayed, those with the least own time per byte first."""
    needs = find_needs(problem)

    def price(g: int) -> tuple[float, int]:
        own_ns = min(problem.replays[way].cost_ns for way in problem.replays_of[g])
        return own_ns / max(1, problem.storages[g].size_bytes), g

    return tuple(sorted(set(needs.candidates) & set(problem.replays_of) - needs.kept, key=price))


def greedy_choices(problem: RematProblem, budget_bytes: int) -> list[frozenset[int]]:
    """A prefix of the order that fits, found by halving; none where the whole order does not fit.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]

    Returns:
        What to save, in a list of one or none.
    """
    order = drop_order(problem)
    everything = frozenset(find_needs(problem).candidates) | find_needs(problem).kept

    def fits(dropped: int) -> bool:
        schedule = expand(problem, everything - set(order[:dropped]))
        return simulate(problem, schedule).peak_bytes <= budget_bytes

    low, high = 0, len(order)
    if not fits(high):  # more drops hold more in chains of replays: look for any that fit
        high = next((n for n in range(high, 0, -max(1, high // 16)) if fits(n)), 0)
        if not high:
            return []
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return [everything - set(order[:high])]


def greedy(problem: RematProblem, budget_bytes: int, *, time_limit_s: float) -> Solution:
    """Drop by own time per byte until the step is within the budget.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        time_limit_s: Not needed; one simulation for each candidate. [s]

    Returns:
        The first plan on the way that fits.
    """
    del time_limit_s
    saved = set(find_needs(problem).candidates) | find_needs(problem).kept
    for dropped, g in enumerate((-1, *drop_order(problem))):
        saved.discard(g)
        schedule = expand(problem, saved)
        if simulate(problem, schedule).peak_bytes <= budget_bytes:
            return Solution(schedule, message=f"dropped {dropped} values")
    return Solution(None, message="no prefix of the order fits")
