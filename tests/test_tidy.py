"""Schedules whose replays keep just what later steps read."""

from fxremat.schedule import tidy
from fxremat.simulate import simulate
from tests.naive import schedules
from tests.problems import random_problem


def test_tidying_makes_nothing_dearer_or_higher() -> None:
    for seed in range(8):
        problem = random_problem(seed, 3)
        for schedule in schedules(problem):
            before = simulate(problem, schedule)
            after = simulate(problem, tidy(problem, schedule.backward))
            assert after.peak_bytes <= before.peak_bytes
            assert after.recompute_ns <= before.recompute_ns
