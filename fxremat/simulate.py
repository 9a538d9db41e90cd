"""The referee: exact liveness of one schedule, as torch's allocator will see it.

The rule is that of boxed fx code: a storage lives from the operation that makes it to the last
operation that reads any view of it, and is freed after that operation has run. While an operation
runs, its inputs, its outputs and its workspace are held together.

A schedule may make a storage more than once. A read takes the newest copy made before it; a copy
lives until its last read. What is *saved* is therefore a result, not a choice: the storages of
which the backward reads the copy that the forward made.
"""

from dataclasses import dataclass
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
    """Every copy of a storage that a schedule makes: born at a time, read last at a time."""

    def __init__(self, problem: RematProblem, entry: int) -> None:
        self.problem = problem
        self.entry = entry
        self.storage: list[int] = []
        self.born: list[int] = []
        self.last: list[int] = []
        self.newest: dict[int, int] = {}
        self.saved: dict[int, int] = {}  # storage -> the copy that crosses into the backward

    def make(self, g: int, time: int) -> None:
        """A new copy of storage ``g``; later reads take it."""
        self.newest[g] = len(self.storage)
        self.storage.append(g)
        self.born.append(time)
        self.last.append(time)

    def read(self, g: int, time: int) -> None:
        """A step reads storage ``g``: its newest copy lives at least until then."""
        if self.problem.storages[g].kind is Kind.PRIMAL:
            return
        copy = self.hold(g, time)
        if self.born[copy] < self.entry < time:
            self.saved[g] = copy

    def hold(self, g: int, time: int) -> int:
        """Somebody outside keeps the newest copy of ``g`` until then."""
        if g not in self.newest:
            name = self.problem.storages[g].name
            raise ValueError(f"step {time} reads {name!r}, of which no copy exists")
        copy = self.newest[g]
        self.last[copy] = max(self.last[copy], time)
        return copy


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
    copies = _Copies(problem, entry=len(schedule.forward))
    transient = [0] * (len(schedule.forward) + len(schedule.backward) + 2)
    _run_forward(problem, schedule, copies, transient)
    _run_backward(problem, schedule, copies, transient)
    _let_go(problem, copies, end=len(transient) - 1, retain_graph=retain_graph)
    cost_ns = sum(problem.operations[index].cost_ns for index in schedule.forward)
    cost_ns += sum(what_runs(problem, step).cost_ns for step in schedule.backward)
    return _account(problem, copies, transient, cost_ns - problem.step_ns)


def what_runs(problem: RematProblem, step: Step) -> Operation | Replay:
    """The operation or the replay behind a step of the backward."""
    return problem.operations[step.operation] if step.replay < 0 else problem.replays[step.replay]


def _run_forward(
    problem: RematProblem, schedule: Schedule, copies: _Copies, transient: list[int]
) -> None:
    """The forward's steps; its outputs are held as long as the caller holds them."""
    for time, index in enumerate(schedule.forward):
        operation = problem.operations[index]
        transient[time] = operation.workspace_bytes
        for g in operation.reads:
            copies.read(g, time)
        for g in operation.creates:
            copies.make(g, time)
    for g in (*problem.updates, *problem.outputs):
        if problem.storages[g].kind is not Kind.PRIMAL:
            held = problem.outputs_held and g in problem.outputs
            copies.hold(g, len(transient) - 1 if held else copies.entry - 1)


def _run_backward(
    problem: RematProblem, schedule: Schedule, copies: _Copies, transient: list[int]
) -> None:
    """The backward's steps, from the tangents to the gradients."""
    storages = problem.storages
    for g, storage in enumerate(storages):
        if storage.kind is Kind.TANGENT:
            copies.make(g, copies.entry)
    for time, step in enumerate(schedule.backward, start=copies.entry + 1):
        runs = what_runs(problem, step)
        transient[time] = runs.workspace_bytes
        for g in runs.reads:
            copies.read(g, time)
        for g in runs.creates:
            if step.replay < 0 or g in step.keeps:
                copies.make(g, time)
            elif not storages[g].lazy:
                transient[time] += storages[g].size_bytes
    for g in problem.gradients:
        copies.read(g, len(transient) - 1)
    transient[-1] = problem.copied_bytes


def _let_go(problem: RematProblem, copies: _Copies, end: int, *, retain_graph: bool) -> None:
    """What outlives its last reader: unread tangents, those torch holds, kept graphs."""
    for g, copy in copies.newest.items():
        if problem.storages[g].kind is not Kind.TANGENT:
            continue
        if problem.storages[g].held:
            copies.hold(g, end)
        elif copies.last[copy] == copies.entry:  # fx code frees an argument after its last use
            copies.hold(g, end - 1)
    if retain_graph:
        for copy in copies.saved.values():
            copies.last[copy] = end


def _account(
    problem: RematProblem, copies: _Copies, transient: list[int], recompute_ns: int
) -> Simulation:
    """Add up the copies that are alive at each time."""
    storages, entry, end = problem.storages, copies.entry, len(transient) - 1
    change = [0] * (end + 2)
    flight_bytes = 0
    for g, born, last in zip(copies.storage, copies.born, copies.last, strict=True):
        if storages[g].lazy and last == born:
            continue
        change[born] += storages[g].size_bytes
        change[last + 1] -= storages[g].size_bytes
        if born < entry < last:
            flight_bytes += storages[g].size_bytes
    live: list[int] = []
    level = problem.resident_bytes + (problem.in_flight - 1) * flight_bytes
    change[entry + 1] += problem.beside_bytes(flight_bytes) - (problem.in_flight - 1) * flight_bytes
    for time in range(end + 1):
        level += change[time]
        live.append(level + transient[time])
    peak_bytes = max(live)
    saved = tuple(sorted(copies.saved))
    return Simulation(
        live_bytes=tuple(live),
        peak_bytes=peak_bytes,
        peak_at=live.index(peak_bytes),
        entry_bytes=live[entry],
        end_bytes=live[end],
        saved=saved,
        saved_bytes=sum(storages[g].size_bytes for g in saved),
        recompute_ns=recompute_ns,
    )
