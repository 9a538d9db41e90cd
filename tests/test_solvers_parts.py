"""The parts that the default solver is made of."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fxremat.plans import make_plan
from fxremat.problem import RematProblem
from fxremat.schedule import expand, running_forward
from fxremat.simulate import Schedule, Step, simulate
from fxremat.solvers import SOLVERS
from fxremat.solvers.bound import bound_ns, highest
from fxremat.solvers.ilp import Residency
from fxremat.solvers.needs import find_needs
from fxremat.solvers.screen import Screen
from fxremat.solvers.stages import cut
from tests.problems import random_problem, transformer

SEEDS = st.integers(min_value=0, max_value=10_000)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=SEEDS,
    draws=st.lists(st.integers(min_value=0, max_value=2**12 - 1), min_size=1, max_size=8),
)
def test_screen_prices_as_the_simulator_does(seed: int, draws: list[int]) -> None:
    """Costs are equal; peaks are below, by what chains of replays hold, and never above."""
    problem = random_problem(seed)
    screen = Screen(problem)
    choices = [
        frozenset(g for bit, g in enumerate(screen.columns) if draw >> bit & 1) for draw in draws
    ]
    prices = screen.price(screen.flags(choices))
    for column, choice in enumerate(choices):
        simulation = simulate(problem, expand(problem, choice | screen.needs.kept))
        assert prices.recompute_ns[column] == simulation.recompute_ns
        peak = max(prices.live_bytes[:, column].max(), prices.forward_bytes[column])
        assert peak <= simulation.peak_bytes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_what_the_backward_holds_of_its_own(seed: int) -> None:
    """With everything kept, fixed bytes and the kept values are all that is held."""
    problem = random_problem(seed)
    needs = find_needs(problem)
    everything = frozenset(needs.candidates) | needs.kept
    screen = Screen(problem)
    live = screen.price(screen.flags([everything])).live_bytes[:, 0]
    simulation = simulate(problem, expand(problem, everything))
    entry = len(simulation.live_bytes) - needs.num_positions - 2
    assert np.array_equal(live, simulation.live_bytes[entry:])
    assert all(fixed <= held for fixed, held in zip(needs.fixed_bytes, live[1:], strict=True))


def test_model_and_simulator_agree_on_a_transformer() -> None:
    """The model's time is the simulator's, and its bytes are above by less than two percent."""
    problem = transformer(3, tokens=256, width=64, context=64, vocabulary=512)
    needs = find_needs(problem)
    high = simulate(problem, expand(problem, needs.candidates)).peak_bytes
    budget_bytes = int(problem.resident_bytes + 0.6 * (high - problem.resident_bytes))
    model = Residency(problem, cut(problem, needs, 40), budget_bytes)
    selection = model.solve(time_limit_s=30.0)
    assert selection is not None
    simulation = simulate(problem, expand(problem, selection.saved, selection.replays))
    assert simulation.recompute_ns == selection.recompute_ns
    assert 0.95 * budget_bytes <= simulation.peak_bytes <= 1.02 * budget_bytes
    relaxed = model.relax(time_limit_s=30.0)
    assert relaxed is not None
    assert relaxed.recompute_ns <= selection.recompute_ns + 1


def test_a_model_without_room_says_so() -> None:
    problem = transformer(2, tokens=64, width=32, context=32, vocabulary=64)
    needs = find_needs(problem)
    model = Residency(problem, cut(problem, needs, 20), max(needs.fixed_bytes) - 1)
    assert model.solve(time_limit_s=10.0) is None
    assert model.relax(time_limit_s=10.0) is None


def test_bound_grows_as_the_budget_shrinks() -> None:
    problem = transformer(2, tokens=64, width=32, context=32, vocabulary=64, resident_bytes=0)
    high = simulate(problem, expand(problem, problem.candidates)).peak_bytes
    cuts = range(0, find_needs(problem).num_positions, 4)
    bounds = [
        bound_ns(problem, int(share * high), cuts, time_limit_s=10.0) for share in (1.0, 0.8, 0.6)
    ]
    assert bounds[0] is not None
    assert bounds[0] <= 0
    assert all(bound is not None for bound in bounds)
    assert bounds == sorted(bounds, key=lambda bound: bound or 0)
    assert bounds[-1] != bounds[0]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=SEEDS, draw=st.randoms(use_true_random=False))
def test_no_schedule_with_one_replay_per_operation_beats_the_bound(
    seed: int, draw: random.Random
) -> None:
    problem = random_problem(seed)
    schedule = replays_anywhere(problem, draw)
    simulation = simulate(problem, schedule)
    number = find_needs(problem).num_positions
    cuts = sorted(draw.sample(range(number + 1), draw.randint(0, number)))
    bound = bound_ns(problem, simulation.peak_bytes, cuts, time_limit_s=10.0)
    assert bound is not None
    assert bound <= simulation.recompute_ns


def replays_anywhere(problem: RematProblem, draw: random.Random) -> Schedule:
    """A schedule in which each operation is replayed at most once, needed or not."""
    steps: list[Step] = []
    left = list(range(len(problem.replays)))
    for index in range(problem.num_forward, len(problem.operations)):
        while left and draw.random() < 0.6:
            way = draw.choice(left)
            replay = problem.replays[way]
            left = [r for r in left if problem.replays[r].operation != replay.operation]
            steps.append(Step(replay.operation, way, replay.creates))
        steps.append(Step(index))
    return Schedule(running_forward(problem, steps), tuple(steps))


def test_the_bound_is_near_what_is_found_on_a_transformer() -> None:
    problem = transformer(3, tokens=256, width=64, context=64, vocabulary=512, resident_bytes=0)
    high = simulate(problem, expand(problem, problem.candidates)).peak_bytes
    solution = SOLVERS["ilp"](problem, int(0.6 * high), time_limit_s=60.0)
    plan = make_plan(problem, int(0.6 * high), solution)
    assert plan.lower_bound_ns > 0
    assert plan.gap < 0.01


def test_cuts_stand_where_most_is_held() -> None:
    live = np.array([9, 1, 8, 2, 7, 3], dtype=np.int64)  # the first is the entry
    assert highest(live, 2) == (1, 3)
    assert highest(np.arange(1000, dtype=np.int64), 2) == (982, 998)


def test_stages_cover_all_positions_once() -> None:
    problem = transformer(2, tokens=64, width=32, context=32, vocabulary=64)
    needs = find_needs(problem)
    for number in (1, 5, 1000):
        stages = cut(problem, needs, number, extra=(3, 7))
        assert {3, 7} <= set(stages.starts)
        of = stages.of()
        assert len(of) == needs.num_positions + 1
        assert list(of) == sorted(of)
        assert set(of) == set(range(len(stages)))
