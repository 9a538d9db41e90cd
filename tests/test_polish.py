"""Schedules with replays at other places than just before their readers."""

from collections.abc import Callable, Iterator

import pytest

from fxremat.planning import save_all_peak_bytes
from fxremat.problem import Kind, RematProblem
from fxremat.schedule import expand
from fxremat.simulate import Schedule, simulate
from fxremat.solvers.exhaustive import best_schedule
from fxremat.solvers.needs import find_needs
from fxremat.solvers.polish import polish, sink, tidy
from tests.exhaustive import exhaustive as just_in_time
from tests.naive import schedules
from tests.problems import Tape, random_problem

LIMIT_S = 60.0
MENDED = 0.9  # of the cases below; a change that lowers it makes the polish worse


def read_early_and_late() -> RematProblem:
    """A value that the backward reads first and last, with much in between."""
    tape = Tape()
    x = tape.given("x", 0)
    (a,) = tape.run("a", [x], [101], 7)
    (b,) = tape.run("b", [a], [103], 1000)
    (c,) = tape.run("c", [b], [5], 1000)
    tape.turn()
    (g,) = tape.run("g", [tape.given("tangent", 5, Kind.TANGENT), a], [11], 1)
    (h,) = tape.run("h", [g, b], [401], 1)
    (i,) = tape.run("i", [h, b], [13], 1)
    (j,) = tape.run("j", [i, a], [3], 1)
    return tape.problem([c], [j])


def replay_while_the_input_is_there() -> RematProblem:
    """A small value made from a large one that an early step reads anyway."""
    tape = Tape()
    x = tape.given("x", 0)
    (a,) = tape.run("a", [x], [211], 1000, replayable=False)
    (b,) = tape.run("b", [a], [103], 7)
    (c,) = tape.run("c", [b], [5], 1000)
    (d,) = tape.run("d", [x, c], [307], 1000)
    (e,) = tape.run("e", [d], [3], 1000)
    tape.turn()
    (g,) = tape.run("g", [tape.given("tangent", 5, Kind.TANGENT), d], [11], 1)
    (h,) = tape.run("h", [g, a], [13], 1)
    (i,) = tape.run("i", [h], [401], 1)
    (j,) = tape.run("j", [i, b], [3], 1)
    return tape.problem([e], [j])


def least(problem: RematProblem) -> int:
    """The least peak there is."""
    simulation = best_schedule(problem, None, time_limit_s=LIMIT_S).simulation
    assert simulation is not None
    return simulation.peak_bytes


def starts(problem: RematProblem) -> Iterator[Schedule]:
    """Some choices, replayed just in time."""
    needs = find_needs(problem)
    yield expand(problem, needs.candidates)
    yield expand(problem, needs.kept)
    yield expand(problem, needs.kept | set(needs.candidates[::2]))


@pytest.mark.parametrize("make", [read_early_and_late, replay_while_the_input_is_there])
def test_no_choice_is_as_good_as_a_polished_one(make: Callable[[], RematProblem]) -> None:
    problem = make()
    pairs = just_in_time(problem)
    best = best_schedule(problem, least(problem), time_limit_s=LIMIT_S).simulation
    assert best is not None
    assert all(pair[0] > best.peak_bytes or pair[1] > best.recompute_ns for pair in pairs)
    found = polish(problem, expand(problem, problem.candidates), best.peak_bytes)
    simulation = simulate(problem, found)
    assert simulation.peak_bytes == best.peak_bytes
    assert simulation.recompute_ns == best.recompute_ns
    lowest = simulate(problem, sink(problem, expand(problem, problem.candidates)))
    assert lowest.peak_bytes == best.peak_bytes


def test_tidying_makes_nothing_dearer_or_higher() -> None:
    for seed in range(8):
        problem = random_problem(seed, 3)
        for schedule in schedules(problem):
            before = simulate(problem, schedule)
            after = simulate(problem, tidy(problem, schedule.backward))
            assert after.peak_bytes <= before.peak_bytes
            assert after.recompute_ns <= before.recompute_ns


def test_polishing_within_the_budget_stays_there_and_is_never_dearer() -> None:
    for seed in range(10):
        problem = random_problem(seed, 8)
        for start in starts(problem):
            before = simulate(problem, start)
            low, high = find_needs(problem).fixed_bytes, before.peak_bytes
            for budget_bytes in (high, (max(low) + high) // 2):
                found = polish(problem, start, budget_bytes, effort=3000)
                after = simulate(problem, found)
                if before.peak_bytes <= budget_bytes:
                    assert after.peak_bytes <= budget_bytes
                    assert after.recompute_ns <= before.recompute_ns
                assert found == polish(problem, start, budget_bytes, effort=3000)
            assert simulate(problem, sink(problem, start, effort=3000)).peak_bytes <= high


def test_polishing_mends_most_of_what_choices_cannot_do() -> None:
    """Counted on problems where the cheapest choice is not the cheapest schedule."""
    mended: list[bool] = []
    for seed in (5, 67, 140, 186, 273, 524, 714):
        problem = random_problem(seed, 10)
        low, high = least(problem), save_all_peak_bytes(problem)
        for share in (0, 20, 40, 60, 80):
            budget_bytes = low + (high - low) * share // 100
            start = cheapest_choice(problem, budget_bytes)
            best = best_schedule(problem, budget_bytes, time_limit_s=LIMIT_S).simulation
            assert best is not None
            if start is None or simulate(problem, start).recompute_ns == best.recompute_ns:
                continue
            after = simulate(problem, polish(problem, start, budget_bytes))
            mended.append(after.recompute_ns == best.recompute_ns)
    assert len(mended) >= 8
    assert sum(mended) >= MENDED * len(mended)


def cheapest_choice(problem: RematProblem, budget_bytes: int) -> Schedule | None:
    """The best of what ``expand`` can say."""
    needs = find_needs(problem)
    free = [g for g in needs.candidates if g not in needs.kept]
    found: list[tuple[int, int, Schedule]] = []
    for number in range(1 << len(free)):
        chosen = {g for bit, g in enumerate(free) if number >> bit & 1}
        schedule = expand(problem, needs.kept | chosen)
        simulation = simulate(problem, schedule)
        if simulation.peak_bytes <= budget_bytes:
            found.append((simulation.recompute_ns, number, schedule))
    return min(found, key=lambda entry: entry[:2])[2] if found else None
