"""One contract for all solvers, against the simulator and against every choice there is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxremat.plans import make_plan
from fxremat.problem import RematProblem
from fxremat.schedule import expand
from fxremat.simulate import simulate
from fxremat.solvers import SOLVERS
from fxremat.solvers.auto import auto, floor
from fxremat.solvers.block import block_choice, block_key
from fxremat.solvers.exhaustive import best_schedule
from fxremat.solvers.floor import core_of
from fxremat.solvers.needs import find_needs
from fxremat.solvers.search import Clock
from fxremat.solvers.within import within
from tests.exhaustive import exhaustive, optimum
from tests.problems import random_problem, transformer

SEEDS = st.integers(min_value=0, max_value=10_000)
MIB = 2**20


def small(seed: int) -> RematProblem:
    """A random problem with at most 8 values that can be saved or replayed."""
    for offset in range(1000):
        problem = random_problem(seed + 10_007 * offset)
        needs = find_needs(problem)
        if len([g for g in needs.candidates if g in problem.replays_of]) <= 8:
            return problem
    raise AssertionError("no small problem near this seed")


@pytest.mark.parametrize("name", SOLVERS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=SEEDS, percent=st.integers(min_value=0, max_value=110))
def test_contract(name: str, seed: int, percent: int) -> None:
    problem = small(seed)
    pairs = exhaustive(problem)
    low, high = pairs[0][0], pairs[-1][0]
    budget_bytes = low + (high - low) * percent // 100
    solution = SOLVERS[name](problem, budget_bytes, time_limit_s=20.0)
    best_ns = optimum(pairs, budget_bytes)
    assert best_ns is not None
    assert solution.lower_bound_ns <= best_ns or not solution.bound_class
    if solution.schedule is None:
        assert name != "ilp"
        assert solution.message
        return
    plan = make_plan(problem, budget_bytes, solution, solver=name)
    assert plan.peak_bytes <= budget_bytes
    # Small problems are searched whole, for schedules besides those that one choice makes.
    assert plan.recompute_ns >= best_ns or name in ("exhaustive", "ilp")
    assert plan.lower_bound_ns <= plan.recompute_ns


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_ilp_finds_the_optimum_of_small_problems(seed: int) -> None:
    problem = small(seed)
    core, search = core_of(problem)
    for budget_bytes, cost_ns in exhaustive(problem):
        best = best_schedule(problem, budget_bytes, time_limit_s=20.0).simulation
        solution = SOLVERS["ilp"](problem, budget_bytes, time_limit_s=20.0)
        assert solution.schedule is not None
        assert best is not None
        found_ns = simulate(problem, solution.schedule).recompute_ns
        assert found_ns == solution.lower_bound_ns == best.recompute_ns <= cost_ns
        choice = within(search, budget_bytes - problem.resident_bytes, Clock(20.0))
        assert choice is not None
        assert simulate(core, search.schedule(choice.saved)).recompute_ns == cost_ns


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_floor_is_the_least_peak_and_one_byte_less_is_refused(seed: int) -> None:
    problem = small(seed)
    peak_bytes = simulate(problem, floor(problem, time_limit_s=20.0)).peak_bytes
    assert peak_bytes <= exhaustive(problem)[0][0]
    assert auto(problem, peak_bytes, time_limit_s=20.0).schedule is not None
    assert auto(problem, peak_bytes - 1, time_limit_s=20.0).schedule is None
    assert SOLVERS["ilp"](problem, peak_bytes - 1, time_limit_s=20.0).schedule is None


@pytest.fixture(scope="module")
def chain() -> RematProblem:
    return transformer(3, tokens=256, width=64, context=64, vocabulary=512, resident_bytes=MIB)


def test_ilp_beats_the_heuristics_on_a_transformer(chain: RematProblem) -> None:
    needs = find_needs(chain)
    high = simulate(chain, expand(chain, needs.candidates)).peak_bytes
    low = simulate(chain, expand(chain, block_choice(chain))).peak_bytes
    assert low < high
    for share in (0.0, 0.5):
        budget_bytes = int(low + share * (high - low))
        plans = {
            name: make_plan(chain, budget_bytes, solution)
            for name, solver in SOLVERS.items()
            if (solution := solver(chain, budget_bytes, time_limit_s=20.0)).schedule
        }
        assert "ilp" in plans
        for name, plan in plans.items():
            assert plan.peak_bytes <= budget_bytes, name
            assert plans["ilp"].recompute_ns <= plan.recompute_ns, name
        assert plans["ilp"].recompute_ns < plans["block"].recompute_ns
        assert plans["ilp"].lower_bound_ns > 0


def test_the_same_problem_gives_the_same_schedule(chain: RematProblem) -> None:
    again = transformer(3, tokens=256, width=64, context=64, vocabulary=512, resident_bytes=MIB)
    assert again == chain
    high = simulate(chain, expand(chain, chain.candidates)).peak_bytes
    for name, solver in SOLVERS.items():
        first = solver(chain, int(0.7 * high), time_limit_s=60.0)
        assert first == solver(again, int(0.7 * high), time_limit_s=60.0), name


def test_floor_of_a_transformer(chain: RematProblem) -> None:
    peak_bytes = simulate(chain, floor(chain, time_limit_s=60.0)).peak_bytes
    assert peak_bytes <= simulate(chain, expand(chain, block_choice(chain))).peak_bytes
    assert auto(chain, peak_bytes, time_limit_s=60.0).schedule is not None
    assert auto(chain, peak_bytes - 1, time_limit_s=60.0).schedule is None


def test_block_keys() -> None:
    assert block_key("transformer.h.3.attn.c_proj") == "transformer.h.3"
    assert block_key("features.0") == "features.0"
    assert block_key("lm_head") == ""
