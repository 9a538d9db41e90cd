"""The exhaustive solver against plain enumeration, and the other solvers against it."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from fxremat.planning import save_all_peak_bytes
from fxremat.plans import make_plan
from fxremat.problem import Kind, RematProblem
from fxremat.solvers import SOLVERS
from fxremat.solvers.bound import BOUND_CLASS
from fxremat.solvers.exhaustive import best_schedule, exhaustive
from tests.naive import pairs
from tests.problems import random_problem, transformer

SHARES = (0, 20, 40, 60, 80)  # of the way from the least peak to that of saving everything
LIMIT_S = 60.0


def least_bytes(problem: RematProblem) -> int:
    """The least peak of all schedules with one replay per operation."""
    simulation = best_schedule(problem, None, time_limit_s=LIMIT_S).simulation
    assert simulation is not None
    return simulation.peak_bytes


def optimum_ns(problem: RematProblem, budget_bytes: int) -> int | None:
    """The least time within a budget; None where nothing fits."""
    found = best_schedule(problem, budget_bytes, time_limit_s=LIMIT_S)
    assert not found.given_up
    return None if found.simulation is None else found.simulation.recompute_ns


def optima(problem: RematProblem, shares: tuple[int, ...] = SHARES) -> Iterator[tuple[int, int]]:
    """Budgets from the least peak up, and the optimum of each."""
    low, high = least_bytes(problem), save_all_peak_bytes(problem)
    for share in shares:
        budget_bytes = low + (high - low) * share // 100
        best_ns = optimum_ns(problem, budget_bytes)
        assert best_ns is not None
        yield budget_bytes, best_ns


def plain(seed: int, max_operations: int) -> RematProblem:
    """A random problem."""
    return random_problem(seed, max_operations)


def odd(seed: int, max_operations: int) -> RematProblem:
    """One with what those lack: updates, copied gradients, a held tangent, more in flight."""
    problem = random_problem(seed, max_operations)
    first, second = (operation.creates[0] for operation in problem.operations[:2])
    return replace(
        problem,
        storages=tuple(replace(s, held=s.kind is Kind.TANGENT) for s in problem.storages),
        updates=(first,),
        gradients=(*problem.gradients, second),
        copied_bytes=197,
        in_flight=1 + seed % 3,
    )


def agree_with_enumeration(problem: RematProblem) -> None:
    """At every peak that a schedule has, and one byte below."""
    found = pairs(problem)
    assert least_bytes(problem) == min(found)[0]
    for peak_bytes in sorted({peak for peak, _ in found}):
        for budget_bytes in (peak_bytes, peak_bytes - 1):
            fitting = [cost for peak, cost in found if peak <= budget_bytes]
            assert optimum_ns(problem, budget_bytes) == min(fitting, default=None), budget_bytes


@pytest.mark.parametrize("make", [plain, odd])
def test_it_finds_what_plain_enumeration_finds(make: Callable[[int, int], RematProblem]) -> None:
    for seed in range(20):
        agree_with_enumeration(make(seed, 3))


@pytest.mark.slow
@pytest.mark.parametrize("make", [plain, odd])
def test_it_finds_what_plain_enumeration_finds_of_five_operations(
    make: Callable[[int, int], RematProblem],
) -> None:
    problems = (make(seed, 5) for seed in range(100))
    tried = [problem for problem in problems if len(problem.replays) <= 4]
    assert any(problem.num_forward == 5 for problem in tried)
    for problem in tried:
        agree_with_enumeration(problem)


def test_its_answer_is_its_own_bound() -> None:
    problem = random_problem(4, 10)
    (budget_bytes, best_ns), *_ = optima(problem)
    solution = exhaustive(problem, budget_bytes, time_limit_s=LIMIT_S)
    plan = make_plan(problem, budget_bytes, solution)
    assert plan.peak_bytes == budget_bytes
    assert plan.recompute_ns == plan.lower_bound_ns == best_ns
    assert plan.bound_class == BOUND_CLASS
    assert solution == exhaustive(problem, budget_bytes, time_limit_s=LIMIT_S)
    below = exhaustive(problem, budget_bytes - 1, time_limit_s=LIMIT_S)
    assert below.schedule is None
    assert "no schedule" in below.message
    assert not below.bound_class


def test_it_gives_up_in_words() -> None:
    large = transformer(1, tokens=16, width=8, context=8, vocabulary=16)
    assert "can be replayed" in exhaustive(large, 1 << 40, time_limit_s=LIMIT_S).message
    problem = random_problem(29, 10)
    budget_bytes = least_bytes(problem)
    late = exhaustive(problem, budget_bytes, time_limit_s=0.0)
    assert late.schedule is None
    assert "time limit" in late.message
    early = best_schedule(problem, budget_bytes, time_limit_s=LIMIT_S, node_limit=10)
    assert early.schedule is None
    assert "more than 10" in early.given_up


def hold_to_the_contract(problem: RematProblem, shares: tuple[int, ...] = SHARES) -> None:
    """Peak, optimum and bound of all solvers."""
    for budget_bytes, best_ns in optima(problem, shares):
        for name, solver in SOLVERS.items():
            solution = solver(problem, budget_bytes, time_limit_s=LIMIT_S)
            if solution.bound_class == BOUND_CLASS:
                assert solution.lower_bound_ns <= best_ns, name
            else:
                assert not solution.bound_class, name
            if solution.schedule is None:
                assert solution.message, name
                continue
            plan = make_plan(problem, budget_bytes, solution)
            assert plan.peak_bytes <= budget_bytes, name
            assert plan.recompute_ns >= best_ns, name


def test_all_solvers_keep_to_the_optimum_and_no_bound_is_above_it() -> None:
    for seed in range(40):
        hold_to_the_contract(random_problem(seed, 10), (20, 60))


@pytest.mark.slow
def test_all_solvers_keep_to_the_optimum_of_many_problems() -> None:
    for seed in range(1000):
        hold_to_the_contract(random_problem(seed, 10))


@pytest.mark.parametrize("name", ["block", "greedy", "sqrt", "knapsack", "exhaustive"])
def test_a_solver_returns_the_same_twice_and_fits_or_says_why(name: str) -> None:
    for seed in range(10):
        problem = random_problem(seed, 10)
        high = save_all_peak_bytes(problem)
        for share in (50, 80, 100):
            solution = SOLVERS[name](problem, high * share // 100, time_limit_s=LIMIT_S)
            assert solution == SOLVERS[name](problem, high * share // 100, time_limit_s=LIMIT_S)
            assert solution.message
            assert (solution.schedule is None) <= (share < 100 or name in ("block", "sqrt"))
