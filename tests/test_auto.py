"""What ``solver="auto"`` chooses: one replay of each operation, or nested ones."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxremat
from fxremat.errors import InfeasibleBudgetError
from fxremat.plans import Solution, make_plan
from fxremat.problem import RematProblem
from fxremat.schedule import expand
from fxremat.simulate import simulate
from fxremat.solvers.auto import auto, floor
from fxremat.solvers.beyond import MOST_FORWARDS, beyond, lowest, nested
from fxremat.solvers.bound import ANY_REPLAYS, BOUND_CLASS, bound_ns
from fxremat.solvers.chain import find_chain
from fxremat.solvers.floor import _FLOORS, core_of, least
from fxremat.solvers.nested import unroll
from fxremat.solvers.revolve import _binomial
from fxremat.solvers.search import Clock
from tests.chains import calls_of, chain_of_steps
from tests.exhaustive import exhaustive
from tests.problems import random_problem, transformer
from tests.steps import QUICK

LIMIT_S = 60.0


@pytest.mark.parametrize(
    ("steps", "slots", "calls"),
    [(10, 3, 15), (25, 3, 65), (50, 5, 122), (100, 5, 316), (100, 10, 222)],
)
def test_equal_steps_are_replayed_as_seldom_as_by_the_binomial_optimum(
    steps: int, slots: int, calls: int
) -> None:
    problem = chain_of_steps(steps)
    binomial = unroll(problem, find_chain(problem), _binomial, slots)
    budget_bytes = simulate(problem, binomial).peak_bytes
    solution = auto(problem, budget_bytes, time_limit_s=LIMIT_S)
    assert solution.schedule is not None
    assert simulate(problem, solution.schedule).peak_bytes <= budget_bytes
    assert calls_of(solution.schedule) == calls


@pytest.fixture(scope="module")
def layers() -> RematProblem:
    return transformer(3, tokens=256, width=64, context=64, vocabulary=512, resident_bytes=1 << 20)


def test_the_floor_is_the_lower_one_of_both_kinds(layers: RematProblem) -> None:
    for problem in (layers, chain_of_steps(20)):
        core, search = core_of(problem)
        once = least(core, search, Clock(LIMIT_S)).peak_bytes + problem.resident_bytes
        often = lowest(problem)
        assert often is not None
        peaks = [once, simulate(problem, often).peak_bytes]
        floor_bytes = simulate(problem, floor(problem)).peak_bytes
        assert floor_bytes == min(peaks)
        assert fxremat.plan(problem, floor_bytes).peak_bytes <= floor_bytes
        with pytest.raises(InfeasibleBudgetError, match=f"{floor_bytes:,}"):
            fxremat.plan(problem, floor_bytes - 1)


def test_several_replays_are_taken_below_what_one_can_do() -> None:
    problem = chain_of_steps(30)
    core, search = core_of(problem)
    once = least(core, search, Clock(LIMIT_S)).peak_bytes
    plan = fxremat.plan(problem, once - 1)
    assert plan.solver == "nested"
    assert plan.bound_class == ANY_REPLAYS
    assert plan.lower_bound_ns <= plan.recompute_ns
    replayed = Counter(step.operation for step in plan.schedule.backward if step.replay >= 0)
    assert max(replayed.values()) > 1
    with pytest.raises(InfeasibleBudgetError):
        fxremat.plan(problem, once - 1, solver="block")


def test_whether_the_floor_is_known_changes_no_plan() -> None:
    for problem in (chain_of_steps(12), random_problem(6), random_problem(11)):
        again = replace(problem, name="as in another process")
        low = simulate(problem, floor(problem)).peak_bytes
        _FLOORS.clear()
        high = simulate(problem, expand(problem, problem.candidates)).peak_bytes
        budgets = [low + eighths * (high - low) // 8 for eighths in range(8)]
        before = [auto(problem, budget, time_limit_s=LIMIT_S).schedule for budget in budgets]
        floor(again)
        assert before == [auto(again, budget, time_limit_s=LIMIT_S).schedule for budget in budgets]


def test_one_replay_is_taken_where_it_is_cheap(layers: RematProblem) -> None:
    high = simulate(layers, expand(layers, layers.candidates)).peak_bytes
    plan = fxremat.plan(layers, int(0.8 * high))
    assert (plan.solver, plan.bound_class) == ("ilp", BOUND_CLASS)
    assert fxremat.plan(layers, high).solver == "save_all"


def test_nothing_nested_is_cheaper_than_what_auto_takes(layers: RematProblem) -> None:
    for problem in (layers, chain_of_steps(20)):
        high = simulate(problem, expand(problem, problem.candidates)).peak_bytes
        low = simulate(problem, floor(problem)).peak_bytes
        for tenths in range(0, 10, 4):
            budget_bytes = low + tenths * (high - low) // 10
            chosen = fxremat.plan(problem, budget_bytes)
            other = nested(problem, budget_bytes)
            if other is not None:
                assert chosen.recompute_ns <= max(
                    simulate(problem, other).recompute_ns,
                    chosen.lower_bound_ns + problem.step_ns // 100,
                )


def test_a_nested_schedule_is_short_enough_for_a_graph() -> None:
    problem = chain_of_steps(200)
    schedule = lowest(problem)
    assert schedule is not None
    replays = sum(step.replay >= 0 for step in schedule.backward)
    assert len(problem.forward) < replays <= MOST_FORWARDS * len(problem.forward)
    peak_bytes = simulate(problem, schedule).peak_bytes
    assert nested(problem, peak_bytes - 1) is None
    assert nested(problem, peak_bytes) is not None


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_for_any_replays_is_below_every_optimum(seed: int) -> None:
    problem = random_problem(seed)
    for budget_bytes, cost_ns in exhaustive(problem):
        found = bound_ns(problem, budget_bytes, (), time_limit_s=LIMIT_S)
        assert found is not None
        assert found <= cost_ns


def test_a_graph_that_is_no_chain_has_no_nested_plan() -> None:
    problem = random_problem(3, 4)
    if len(find_chain(problem)) < 3:
        assert lowest(problem) is None
        assert beyond(problem, 1 << 40, time_limit_s=1.0).schedule is None


class Deep(nn.Module):
    """Residual blocks with dropout; much wider in the batch than in the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8))
            for _ in range(12)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_the_floor_is_run_for_real() -> None:
    torch._dynamo.reset()
    model, x = Deep(), torch.randn(2048, 8)
    problem = fxremat.capture(model, (x,), **QUICK)
    block = fxremat.plan(problem, "1GiB", solver="block")
    least_plan = make_plan(problem, 1 << 40, Solution(floor(problem)))
    own_bytes = block.peak_bytes - problem.resident_bytes
    assert least_plan.peak_bytes - problem.resident_bytes < own_bytes // 2
    check = fxremat.verify(model, (x,), budget=least_plan.peak_bytes, steps=2, repeats=1, **QUICK)
    check.raise_if_broken()
    assert check.measured_peak_bytes == check.predicted_peak_bytes


def test_a_search_that_was_cut_off_is_not_taken_for_the_floor() -> None:
    problem = transformer(2, tokens=256, width=64, context=64, vocabulary=128)
    with pytest.raises(InfeasibleBudgetError, match="in the time given") as cut:
        fxremat.plan(problem, problem.resident_bytes + 1, time_limit_s=1e-3)
    with pytest.raises(InfeasibleBudgetError) as whole:
        fxremat.plan(problem, problem.resident_bytes + 1)
    assert "in the time given" not in str(whole.value)
    assert whole.value.floor_bytes <= cut.value.floor_bytes
    assert fxremat.plan(problem, whole.value.floor_bytes).peak_bytes <= whole.value.floor_bytes


def test_a_plan_comes_back_however_little_time_there_is() -> None:
    problem = transformer(2, tokens=256, width=64, context=64, vocabulary=64, resident_bytes=0)
    high = simulate(problem, expand(problem, problem.candidates)).peak_bytes
    plan = fxremat.plan(problem, int(0.9 * high), time_limit_s=1e-3)
    assert plan.peak_bytes <= int(0.9 * high)
    again = fxremat.plan(problem, int(0.9 * high))
    assert again.lower_bound_ns <= again.recompute_ns <= plan.recompute_ns


def test_nested_replays_end_when_the_time_is_up() -> None:
    """A chain so long that its table takes seconds; nothing half done is remembered."""
    problem = chain_of_steps(80)
    found = fxremat.SOLVERS["sqrt"](problem, 1 << 40, time_limit_s=LIMIT_S).schedule
    assert found is not None
    peak_bytes = simulate(problem, found).peak_bytes
    with pytest.raises(InfeasibleBudgetError, match="in the time given"):
        fxremat.plan(problem, peak_bytes, solver="rotor", time_limit_s=1e-3)
    assert beyond(problem, peak_bytes, time_limit_s=1e-3).schedule is None
    assert beyond(problem, peak_bytes, time_limit_s=LIMIT_S).schedule is not None
