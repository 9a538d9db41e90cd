"""From a choice of what to save to a schedule: replays stand just before they are needed."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from fxremat.problem import RematProblem
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
    gone = _not_saved(problem, saved)
    ways = _ways(problem, replays)
    stops: dict[int, list[frozenset[int]]] = {}
    for phase in phases:
        stops.setdefault(phase.start, []).append(phase.carried)
    again = [g for g, missing in enumerate(gone) if missing] if stops else []
    steps: list[Step] = []
    for index in range(problem.num_forward, len(problem.operations)):
        for carried in stops.get(index - problem.num_forward, ()):
            for g in again:
                if g not in carried:
                    gone[g] = 1
        for g in problem.operation_reads[index]:
            if gone[g]:
                _replay(problem, g, gone, ways, steps)
        steps.append(Step(index))
    for g in problem.gradients:
        if gone[g]:
            _replay(problem, g, gone, ways, steps)
    return Schedule(forward=running_forward(problem, steps), backward=tuple(steps))


def _not_saved(problem: RematProblem, saved: Collection[int]) -> bytearray:
    """A flag for each storage: it is not there unless a replay makes it."""
    gone = bytearray(len(problem.storages))
    for g in problem.replays_of:
        gone[g] = problem.storages[g].producer < problem.num_forward
    for g in saved:
        gone[g] = 0
    return gone


def _ways(problem: RematProblem, replays: Collection[int]) -> dict[int, int]:
    """The replay that makes each storage: a preferred one, or else its first."""
    if not replays:
        return {g: ways[0] for g, ways in problem.replays_of.items()}
    preferred = set(replays)
    return {
        g: next((way for way in ways if way in preferred), ways[0])
        for g, ways in problem.replays_of.items()
    }


def _replay(
    problem: RematProblem, wanted: int, gone: bytearray, ways: dict[int, int], steps: list[Step]
) -> None:
    """Replay what makes a storage, and before that its inputs, in the order of the forward.

    Inputs first would do too, but follow a chain to its beginning before anything is freed: what
    joins the chain on the way (the inputs of each step of a recurrence) would all be made at once.
    """
    needed = _needed(problem, wanted, gone, ways)
    if len(needed) > 1:
        needed.sort(key=lambda way: _place(problem, way))
    for way in needed:
        replay = problem.replays[way]
        keeps = tuple(h for h in replay.creates if gone[h])
        if keeps:
            steps.append(Step(replay.operation, way, keeps))
            for h in keeps:
                gone[h] = 0


def _needed(problem: RematProblem, wanted: int, gone: bytearray, ways: dict[int, int]) -> list[int]:
    """The replays that make a storage, inputs first; a loop: chains outgrow Python's stack."""
    needed: list[int] = []
    made: set[int] = set()
    stack = [wanted]
    while stack:
        g = stack[-1]
        if g in made:
            stack.pop()
            continue
        way = ways[g]
        below = [u for u in reversed(problem.replay_reads[way]) if gone[u] and u not in made]
        if below:
            stack += below
            continue
        needed.append(way)
        made.update(problem.replays[way].creates)
        stack.pop()
    return needed


def _place(problem: RematProblem, way: int) -> tuple[int, bool, int]:
    """Where a replay stands among others; one that reads what another of its own makes is later."""
    operation = problem.replays[way].operation
    made = problem.operations[operation].creates
    return operation, any(u in made for u in problem.replay_reads[way]), way


def running_forward(problem: RematProblem, backward: Collection[Step]) -> tuple[int, ...]:
    """The forward operations that must run before these backward steps.

    Args:
        problem: The step.
        backward: What the backward runs, in order.

    Returns:
        Indices, in order, of those that an output, the backward or another of them reads, and of
        those that run in any case.
    """
    wanted = _wanted(problem, backward)
    running: list[int] = []
    for index in reversed(range(problem.num_forward)):
        operation = problem.operations[index]
        if operation.must_run or any(wanted[g] for g in operation.creates):
            running.append(index)
            for g in problem.operation_reads[index]:
                wanted[g] = 1
    return tuple(reversed(running))


def tidy(problem: RematProblem, steps: Sequence[Step]) -> Schedule:
    """Let every replay keep just what later steps read, and drop those that nobody reads.

    Args:
        problem: The step.
        steps: A backward.

    Returns:
        The schedule, with the forward operations that it needs.
    """
    outside = set(problem.outputs) if problem.outputs_held else set()
    wanted = set(problem.gradients) - outside
    found: list[Step] = []
    for step in reversed(steps):
        runs = what_runs(problem, step)
        kept: tuple[int, ...] = ()
        if step.replay >= 0:
            kept = tuple(g for g in runs.creates if g in wanted)
            if not kept:
                continue
        wanted.difference_update(kept)
        wanted.update(g for g in runs.reads if g not in outside)
        found.append(Step(step.operation, step.replay, kept))
    backward = tuple(reversed(found))
    return Schedule(running_forward(problem, backward), backward)


def _wanted(problem: RematProblem, backward: Collection[Step]) -> bytearray:
    """A flag for each storage: an output, or read by the backward before the backward makes it."""
    wanted, made = bytearray(len(problem.storages)), bytearray(len(problem.storages))
    for g in (*problem.outputs, *problem.updates):
        wanted[g] = 1
    for index, replay, keeps in backward:
        reads = problem.operation_reads[index] if replay < 0 else problem.replay_reads[replay]
        for g in reads:
            if not made[g]:
                wanted[g] = 1
        for g in problem.operations[index].creates if replay < 0 else keeps:
            made[g] = 1
    for g in problem.gradients:
        if not made[g]:
            wanted[g] = 1
    return wanted
