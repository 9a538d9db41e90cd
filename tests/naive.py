"""Every schedule with at most one replay of each operation: plainly right, and slow."""

from collections.abc import Iterator
from itertools import chain, combinations

from fxremat.problem import RematProblem
from fxremat.schedule import running_forward
from fxremat.simulate import Schedule, Step, simulate


def schedules(problem: RematProblem) -> Iterator[Schedule]:
    """All of them, useless replays and all.

    Args:
        problem: A problem with very few operations.
    """
    first = problem.num_forward
    backwards: list[tuple[Step, ...]] = [
        tuple(Step(index) for index in range(first, len(problem.operations)))
    ]
    for operation in range(first):
        ways = [way for way, r in enumerate(problem.replays) if r.operation == operation]
        replays = [
            Step(operation, way, keeps)
            for way in ways
            for keeps in subsets(problem.replays[way].creates)
        ]
        backwards += [
            (*steps[:place], replay, *steps[place:])
            for steps in backwards
            for replay in replays
            for place in range(len(steps) + 1)
        ]
    for steps in backwards:
        yield Schedule(running_forward(problem, steps), steps)


def subsets(values: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All but the empty one."""
    return chain.from_iterable(combinations(values, n) for n in range(1, len(values) + 1))


def pairs(problem: RematProblem) -> set[tuple[int, int]]:
    """Peak and extra time of each schedule that reads nothing before it is made."""
    found: set[tuple[int, int]] = set()
    for schedule in schedules(problem):
        try:
            simulation = simulate(problem, schedule)
        except ValueError:
            continue
        found.add((simulation.peak_bytes, simulation.recompute_ns))
    return found
