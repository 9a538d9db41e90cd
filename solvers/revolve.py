"""Classical schedules for chains of steps: binomial checkpointing and recursive halving.

Both treat every block alike: they count *calls* (blocks gone through, the first sweep included)
and *slots* (frontiers kept at once), which are neither seconds nor bytes. On a graph the blocks are
those of ``chain``; of the numbers of slots the solver takes the greatest whose simulated peak is
within the budget.

Binomial: Griewank and Walther, "Algorithm 799: revolve" (https://doi.org/10.1145/347837.347846).
With c free slots, n steps are cut where T(n, c) = min_m m + T(n - m, c - 1) + T(m, c) is least.
Halving: keep the frontier in the middle, do the later half, then the earlier one.
"""

from functools import lru_cache
from math import comb

from fxremat.plans import Solution
from fxremat.problem import RematProblem
from fxremat.simulate import Schedule, simulate
from fxremat.solvers.chain import find_chain
from fxremat.solvers.nested import Choice, Run, unroll

MANY = 1 << 30


@lru_cache(maxsize=1 << 16)
def binomial_calls(steps: int, slots: int) -> int:
    """Least number of calls for the backward of some steps.

    Args:
        steps: How many.
        slots: States kept at once, the one before the first step included.

    Returns:
        Calls, the first sweep included; the last step's is not needed. (Griewank and Walther's
        formula: r n - C(c + r, r - 1) for the repetition number r with n <= C(c + r, r).)
    """
    if steps <= 1:
        return 0
    if slots <= 1:
        return steps * (steps - 1) // 2
    repeats = next(r for r in range(steps + 1) if comb(slots + r, r) >= steps)
    return repeats * steps - comb(slots + repeats, repeats - 1)


def binomial_cut(steps: int, slots: int) -> int:
    """How far to go before the next state is kept; ``steps - 1`` keeps nothing on the way."""
    if slots <= 1:
        return steps - 1

    def calls(ahead: int) -> int:
        return ahead + binomial_calls(steps - ahead, slots - 1) + binomial_calls(ahead, slots)

    return min(range(1, steps), key=lambda ahead: (calls(ahead), ahead))


def _binomial(run: Run) -> Choice:
    ahead = binomial_cut(run.end - run.start + 1, run.level)
    return Choice(run.start + ahead, run.level - 1, run.level)


def _halving(run: Run) -> Choice:
    """The middle of the run; ``level`` is not used."""
    return Choice(run.start + (run.end - run.start + 1) // 2, 0)


def halving_counts(steps: int) -> tuple[int, int]:
    """Calls and slots of recursive halving, the state before the first step not counted."""
    if steps <= 1:
        return 0, 0
    ahead = steps // 2
    later_calls, later_slots = halving_counts(steps - ahead)
    earlier_calls, earlier_slots = halving_counts(ahead)
    return ahead + later_calls + earlier_calls, max(1 + later_slots, earlier_slots)


def revolve(problem: RematProblem, budget_bytes: int, *, time_limit_s: float) -> Solution:
    """Binomial checkpointing over the blocks of a graph.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        time_limit_s: Not needed. [s]

    Returns:
        The schedule with the most slots whose peak is within the budget.
    """
    del time_limit_s
    schedule = revolve_schedule(problem, budget_bytes)
    if schedule is None:
        return Solution(None, message="one slot for frontiers is too many")
    return Solution(schedule, message="binomial checkpointing")


def revolve_schedule(problem: RematProblem, budget_bytes: int) -> Schedule | None:
    """Binomial checkpointing with the most slots for frontiers whose peak is within a budget."""
    chain = find_chain(problem)
    low, high, best = 1, len(chain), None
    while low <= high:
        slots = (low + high) // 2
        schedule = unroll(problem, chain, _binomial, slots)
        if simulate(problem, schedule).peak_bytes <= budget_bytes:
            best, low = schedule, slots + 1
        else:
            high = slots - 1
    return best


def halving(problem: RematProblem, budget_bytes: int, *, time_limit_s: float) -> Solution:
    """Recursive halving over the blocks of a graph.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        time_limit_s: Not needed. [s]

    Returns:
        Its schedule, if it is within the budget.
    """
    del time_limit_s
    chain = find_chain(problem)
    schedule = unroll(problem, chain, _halving, 0)
    if simulate(problem, schedule).peak_bytes > budget_bytes:
        return Solution(None, message="recursive halving has one plan, which is larger")
    return Solution(schedule, message=f"{len(chain)} blocks halved")
