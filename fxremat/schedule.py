"""From a choice of what to save to a schedule: replays stand just before they are needed."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from fxremat.problem import Kind, RematProblem
from fxremat.simulate import Schedule, Step, what_runs


class Phase(NamedTuple):
    """A part of the backward, at the beginning of which replayed values are let go.

    Attributes:
        start: Its first position; 0 is the first operation of the backward.
        carried: Replayed values that outlive the beginning.
    """

    start: int
    carried: frozenset[int]


def expand(
    problem: RematProblem,
    saved: Collection[int],
    replays: Collection[int] = (),
    phases: Sequence[Phase] = (),
) -> Schedule:
    """Make the schedule in which every value that is not saved is replayed on demand.

    Args:
        problem: The step.
        saved: Storages to keep from forward to backward. A storage without a replay is kept anyway.
        replays: Indices of the replays to prefer where a storage has several; where none of them
            makes it, the first of ``problem.replays_of`` does.
        phases: In order. In each of them an operation is replayed at most once, and once more in a
            later one that needs what was let go; without any, once in all.

    Returns:
        The schedule. Forward operations whose results nothing reads do not run in it.
    """
    keep, preferred = set(saved), set(replays)
    live: set[int] = set()  # replayed by now
    stops: dict[int, list[frozenset[int]]] = {}
    for phase in phases:
        stops.setdefault(phase.start, []).append(phase.carried)
    steps: list[Step] = []

    def missing(g: int) -> bool:
        storage = problem.storages[g]
        made_in_forward = storage.kind is Kind.VALUE and storage.producer < problem.num_forward
        return made_in_forward and g not in keep and g not in live and g in problem.replays_of

    def choose(g: int) -> int:
        ways = problem.replays_of[g]
        return next((way for way in ways if way in preferred), ways[0])

    def require(wanted: tuple[int, ...]) -> None:
        """Replay what is missing, inputs first; a loop: chains outgrow Python's stack."""
        stack = [g for g in reversed(wanted) if missing(g)]
        while stack:
            g = stack[-1]
            if not missing(g):
                stack.pop()
                continue
            way = choose(g)
            replay = problem.replays[way]
            below = [u for u in reversed(replay.reads) if missing(u)]
            if below:
                stack.extend(below)
                continue
            keeps = tuple(h for h in replay.creates if missing(h))
            steps.append(Step(replay.operation, way, keeps))
            live.update(keeps)
            stack.pop()

    for index in range(problem.num_forward, len(problem.operations)):
        for outliving in stops.get(index - problem.num_forward, ()):
            live &= outliving
        require(problem.operations[index].reads)
        steps.append(Step(index))
    require(problem.gradients)
    return Schedule(forward=running_forward(problem, steps), backward=tuple(steps))


def running_forward(problem: RematProblem, backward: Collection[Step]) -> tuple[int, ...]:
    """The forward operations that must run before these backward steps.

    Args:
        problem: The step.
        backward: What the backward runs, in order.

    Returns:
        Indices, in order, of those that an output, the backward or another of them reads, and of
        those that run in any case.
    """
    wanted = {*problem.outputs, *problem.updates}
    made: set[int] = set()
    for step in backward:
        runs = what_runs(problem, step)
        wanted.update(g for g in runs.reads if g not in made)
        made.update(runs.creates if step.replay < 0 else step.keeps)
    wanted.update(g for g in problem.gradients if g not in made)
    running: list[int] = []
    for index in reversed(range(problem.num_forward)):
        operation = problem.operations[index]
        if operation.must_run or wanted.intersection(operation.creates):
            running.append(index)
            wanted.update(operation.reads)
    return tuple(reversed(running))
