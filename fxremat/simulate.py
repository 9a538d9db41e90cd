"""The referee: exact liveness of one schedule, as torch's allocator will see it.

The rule is that of boxed fx code: a storage lives from the operation that makes it to the last
operation that reads any view of it, and is freed after that operation has run. While an operation
runs, its inputs, its outputs and its workspace are held together.

A schedule may make a storage more than once. A read takes the newest copy made before it; a copy
lives until its last read. What is *saved* is therefore a result, not a choice: the storages of
which the backward reads the copy that the forward made.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import NamedTuple

from fxremat.problem import Kind, Operation, RematProblem, Replay


class Step(NamedTuple):
    """One thing that the backward runs.

    Attributes:
        operation: Index of the operation.
        replay: Index into ``problem.replays``; -1 for a backward operation itself.
        keeps: For a replay, the storages it makes for later reads; its other results die at once.
    """

    operation: int
    replay: int = -1
    keeps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """What runs, in order.

    Attributes:
        forward: Indices of the forward operations that run.
        backward: Backward operations and replays.
    """

    forward: tuple[int, ...]
    backward: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a schedule holds and costs.

    Attributes:
        live_bytes: Bytes held while each step runs: the forward's steps, the moment between forward
            and backward, the backward's steps, the moment after; resident bytes included. [bytes]
        peak_bytes: The greatest of them. [bytes]
        peak_at: Index into ``live_bytes`` of the first peak.
        entry_bytes: Held when the backward starts: resident, saved, held outputs, tangents. [bytes]
        end_bytes: Held when the backward has ended: resident, gradients, held outputs. [bytes]
        saved: Storages kept from forward to backward, in order.
        saved_bytes: Their bytes. [bytes]
        recompute_ns: Cost of the schedule less that of the unrewritten step. [ns]
    """

    live_bytes: tuple[int, ...]
    peak_bytes: int
    peak_at: int
    entry_bytes: int
    end_bytes: int
    saved: tuple[int, ...]
    saved_bytes: int
    recompute_ns: int


class _Copies:
    """Every copy of a storage that a schedule makes: born at a time, read last at a time.

    Times only grow, so a read just notes its time; who holds a copy longer is noted at the end.
    """

    def __init__(self, problem: RematProblem) -> None:
        self.problem = problem
        self.storage: list[int] = []
        self.born: list[int] = []
        self.last: list[int] = []
        self.newest = [-1] * len(problem.storages)  # storage -> its newest copy

    def read(self, reads: Iterable[int], time: int) -> None:
        """A step reads storages: the newest copy of each lives at least until then."""
        newest, last = self.newest, self.last
        for g in reads:
            copy = newest[g]
            if copy < 0:
                name = self.problem.storages[g].name
                raise ValueError(f"step {time} reads {name!r}, of which no copy exists")
            last[copy] = time

    def make(self, creates: Iterable[int], time: int) -> None:
        """New copies of storages; later reads take them."""
        for g in creates:
            self.newest[g] = len(self.last)
            self.storage.append(g)
            self.born.append(time)
            self.last.append(time)

    def hold(self, copies: Iterable[int], time: int) -> None:
        """Somebody outside keeps copies until then."""
        for copy in copies:
            self.last[copy] = max(self.last[copy], time)


def simulate(
    problem: RematProblem, schedule: Schedule, *, retain_graph: bool = False
) -> Simulation:
    """Run a schedule on paper.

    Args:
        problem: The step.
        schedule: What runs; every read must find a copy made before it.
        retain_graph: Autograd keeps what was saved until after the backward.

    Returns:
        Peak, timeline, saved storages and extra cost.

    Raises:
        ValueError: A step reads a storage of which no copy exists.
    """
    copies, entry = _Copies(problem), len(schedule.forward)
    transient = [0] * (entry + len(schedule.backward) + 2)
    end = len(transient) - 1
    cost_ns = _run_forward(problem, schedule, copies, transient)
    made = len(copies.last)
    held = _hand_out(problem, copies, entry)
    cost_ns += _run_backward(problem, schedule, copies, transient)
    saved = [copy for copy in range(made) if copies.last[copy] > entry]
    copies.hold(held, end)
    _let_go(problem, copies, entry, end)
    if retain_graph:
        copies.hold(saved, end)
    crossing = tuple(sorted(copies.storage[copy] for copy in saved))
    return _account(problem, copies, transient, entry, crossing, cost_ns - problem.step_ns)


def what_runs(problem: RematProblem, step: Step) -> Operation | Replay:
    """The operation or the replay behind a step of the backward."""
    return problem.operations[step.operation] if step.replay < 0 else problem.replays[step.replay]


def _run_forward(
    problem: RematProblem, schedule: Schedule, copies: _Copies, transient: list[int]
) -> int:
    """The forward's steps; what they cost. [ns]"""
    cost_ns = 0
    for time, index in enumerate(schedule.forward):
        operation = problem.operations[index]
        transient[time] = operation.workspace_bytes
        cost_ns += operation.cost_ns
        copies.read(problem.operation_reads[index], time)
        copies.make(operation.creates, time)
    return cost_ns


def _hand_out(problem: RematProblem, copies: _Copies, entry: int) -> list[int]:
    """What the forward hands out lives to its end; the copies that the caller holds longer."""
    given = {
        g: copies.newest[g]
        for g in (*problem.updates, *problem.outputs)
        if problem.storages[g].kind is not Kind.PRIMAL
    }
    copies.read(given, entry - 1)
    return [given[g] for g in problem.outputs if g in given] if problem.outputs_held else []


def _run_backward(
    problem: RematProblem, schedule: Schedule, copies: _Copies, transient: list[int]
) -> int:
    """The backward's steps, from the tangents to the gradients; what they cost. [ns]"""
    storages, sizes = problem.storages, problem.sizes_bytes
    cost_ns, entry = 0, len(schedule.forward)
    copies.make((g for g, s in enumerate(storages) if s.kind is Kind.TANGENT), entry)
    for time, (index, replay, keeps) in enumerate(schedule.backward, start=entry + 1):
        if replay < 0:
            runs: Operation | Replay = problem.operations[index]
            copies.read(problem.operation_reads[index], time)
            copies.make(runs.creates, time)
            transient[time] = runs.workspace_bytes
        else:
            runs = problem.replays[replay]
            copies.read(problem.replay_reads[replay], time)
            copies.make(keeps, time)
            left = [g for g in runs.creates if g not in keeps and not storages[g].lazy]
            transient[time] = runs.workspace_bytes + sum(sizes[g] for g in left)
        cost_ns += runs.cost_ns
    end = len(transient) - 1
    copies.read((g for g in problem.gradients if storages[g].kind is not Kind.PRIMAL), end)
    transient[end] = problem.copied_bytes
    return cost_ns


def _let_go(problem: RematProblem, copies: _Copies, entry: int, end: int) -> None:
    """How long tangents live that nobody reads, and those that torch holds."""
    for g, storage in enumerate(problem.storages):
        if storage.kind is not Kind.TANGENT:
            continue
        copy = copies.newest[g]
        if storage.held:
            copies.hold((copy,), end)
        elif copies.last[copy] == entry:  # fx code frees an argument after its last use
            copies.hold((copy,), end - 1)


def _account(
    problem: RematProblem,
    copies: _Copies,
    transient: list[int],
    entry: int,
    saved: tuple[int, ...],
    recompute_ns: int,
) -> Simulation:
    """Add up the copies that are alive at each time."""
    storages, sizes, end = problem.storages, problem.sizes_bytes, len(transient) - 1
    change = [0] * (end + 2)
    flight_bytes = 0
    for g, born, last in zip(copies.storage, copies.born, copies.last, strict=True):
        if last == born and storages[g].lazy:
            continue
        change[born] += sizes[g]
        change[last + 1] -= sizes[g]
        if born < entry < last:
            flight_bytes += sizes[g]
    others_bytes = (problem.in_flight - 1) * flight_bytes
    change[0] += problem.resident_bytes + others_bytes
    change[entry + 1] += problem.beside_bytes(flight_bytes) - others_bytes
    live = tuple(map(add, accumulate(change[:-1]), transient))
    peak_bytes = max(live)
    return Simulation(
        live_bytes=live,
        peak_bytes=peak_bytes,
        peak_at=live.index(peak_bytes),
        entry_bytes=live[entry],
        end_bytes=live[end],
        saved=saved,
        saved_bytes=sum(sizes[g] for g in saved),
        recompute_ns=recompute_ns,
    )
