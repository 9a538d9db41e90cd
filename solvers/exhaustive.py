"""The true optimum of a small problem: what the other solvers are measured against.

The space is that of ``BOUND_CLASS``: the backward operations in the given order, and between them
at most one replay of each forward operation, of any variant and at any place, needed yet or not;
any values saved; forward operations that nothing needs do not run.

The backward is built from its end. An *ending* is its last steps. What it reads and does not make,
its *wanted* values, is all that the steps before it must supply, so an ending is described by the
position before which it stands, the operations that it replays, and the wanted values. Endings are
lengthened best first, by one backward operation or one replay. One that reaches the entry of the
backward saves what it still wants, and is then judged by the simulator.

What is left out cannot be better, by these lemmas. Each changes a schedule of the space so that its
cost and the bytes held during any of its steps do not grow.

1. *A replay that makes nothing wanted is dropped.* Nobody reads its results; what it reads is read
   less, so it lives shorter, and forward operations only cease to run.
2. *A replay keeps all the wanted values that it makes, and no others.* If it did not keep one, an
   older copy would be alive before, while and after it runs, and its own would come on top.
3. *What the caller holds is not kept by a replay.* Its first copy lives to the end in any case.
4. *Of two endings of one description, one that is neither dearer nor higher will do.* Whatever can
   stand before one can stand before the other, saves the same and runs the same forward. How high
   an ending is matters only against the budget, unless several forwards are in flight: what they
   hold is added to it later.
5. *Bounds.* A wanted value that no replay is left to make is the forward's copy. So it is saved,
   its operation runs, and it is held by all steps before the ending and in every other forward in
   flight. Costs are not negative.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from fxremat.errors import SolverError
from fxremat.plans import Solution
from fxremat.problem import Kind, RematProblem, Replay
from fxremat.schedule import running_forward
from fxremat.simulate import Schedule, Simulation, Step, simulate
from fxremat.solvers.bound import BOUND_CLASS
from fxremat.solvers.search import Clock

_OPERATIONS = 14  # that can be replayed, unless the caller says more
_NODES = 3_000_000  # endings that one search may look at

_State = tuple[int, int, int]  # position, operations replayed and wanted values as sets of bits


class _Ending(NamedTuple):
    """The last steps of a backward: ``step`` and then those of ``rest``."""

    state: _State
    replays_ns: int
    peak_bytes: int
    step: Step | None = None
    rest: "_Ending | None" = None

    def steps(self) -> Iterator[Step]:
        """In the order in which they run."""
        ending: _Ending | None = self
        while ending is not None:
            if ending.step is not None:
                yield ending.step
            ending = ending.rest


@dataclass(frozen=True, slots=True)
class Found:
    """How a search ended.

    Attributes:
        schedule: The best of the space; None when there is none or the search was given up.
        simulation: What the simulator says of it.
        given_up: Why, in words; empty when the search was finished.
    """

    schedule: Schedule | None = None
    simulation: Simulation | None = None
    given_up: str = ""


def _bits(numbers: Iterable[int]) -> int:
    """A set as bits."""
    return sum(1 << number for number in set(numbers))


class _Space:
    """The tables of one problem, and how endings are lengthened."""

    def __init__(self, problem: RematProblem) -> None:
        self.problem = problem
        storages, first = problem.storages, problem.num_forward
        held = set(problem.outputs) if problem.outputs_held else set()
        self.free = _bits(
            g
            for g, s in enumerate(storages)
            if s.kind is Kind.VALUE and s.producer < first and g not in held
        )
        self.held = _bits(g for g in held if storages[g].kind is Kind.VALUE)
        self.lazy = _bits(g for g, s in enumerate(storages) if s.lazy)
        self.number = len(problem.operations) - first
        self.reads = [_bits(o.reads) & self.free for o in problem.backward]
        self.gradients = _bits(problem.gradients) & self.free
        self.replays = [(_bits(r.reads) & self.free, _bits(r.creates)) for r in problem.replays]
        self.size_bytes = lru_cache(maxsize=None)(self._size_bytes)
        self.remakes = lru_cache(maxsize=None)(self._remakes)
        self.forward_ns = lru_cache(maxsize=None)(self._forward_ns)
        self._measure()

    def _size_bytes(self, values: int) -> int:
        sizes = (s.size_bytes for g, s in enumerate(self.problem.storages) if values >> g & 1)
        return sum(sizes)

    def _remakes(self, used: int) -> int:
        """Values that replays of other operations than these can make."""
        left = (g for r in self.problem.replays if not used >> r.operation & 1 for g in r.creates)
        return _bits(left)

    def _forward_ns(self, values: int) -> int:
        """Time of a forward that makes these, less that of the whole forward. [ns]"""
        wanted = values | _bits((*self.problem.outputs, *self.problem.updates))
        skipped_ns = 0
        for operation in reversed(self.problem.forward):
            if operation.must_run or wanted & _bits(operation.creates):
                wanted |= _bits(operation.reads)
            else:
                skipped_ns += operation.cost_ns
        return -skipped_ns

    def _measure(self) -> None:
        """Ask the simulator what is held besides wanted values.

        A replay of nothing stands before each backward operation, and at the end, to tell what is
        held there.
        """
        probe = Replay(0, "nothing", (), (), 0)
        alone = replace(self.problem, in_flight=1, replays=(probe,) if self.problem.replays else ())
        first, steps = self.problem.num_forward, [Step(0, 0)] if alone.replays else []
        backward = [s for i in range(self.number) for s in (*steps, Step(first + i))]
        everything = Schedule(tuple(range(first)), (*backward, *steps))
        live = list(simulate(alone, everything).live_bytes)
        wanted = self.gradients
        self.end_bytes = live.pop() - self.size_bytes(wanted)
        self.gap_bytes, self.run_bytes = [0] * (self.number + 1), [0] * self.number
        for position in range(self.number, -1, -1):
            if position < self.number:
                wanted |= self.reads[position]
                self.run_bytes[position] = live.pop() - self.size_bytes(wanted)
            if steps:
                # Before its first reader, a value is wanted as well: it was saved.
                self.gap_bytes[position] = live.pop() - self.size_bytes(wanted)
        self.before_bytes = [live.pop() - self.size_bytes(wanted)]  # the highest before a position
        for run_bytes in self.run_bytes:
            self.before_bytes.append(max(self.before_bytes[-1], run_bytes))

    def end(self) -> _Ending:
        """The ending without steps."""
        peak_bytes = self.end_bytes + self.size_bytes(self.gradients)
        return _Ending((self.number, 0, self.gradients), 0, peak_bytes)

    def longer(self, ending: _Ending) -> Iterator[_Ending]:
        """All endings with one step more."""
        position, used, wanted = ending.state
        if position:
            before = wanted | self.reads[position - 1]
            live_bytes = self.run_bytes[position - 1] + self.size_bytes(before)
            yield _Ending(
                (position - 1, used, before),
                ending.replays_ns,
                max(ending.peak_bytes, live_bytes),
                Step(self.problem.num_forward + position - 1),
                ending,
            )
        for way, replay in enumerate(self.problem.replays):
            reads, creates = self.replays[way]
            kept = creates & wanted
            if not kept or used >> replay.operation & 1:
                continue
            others = wanted & ~kept
            live_bytes = self.gap_bytes[position] + replay.workspace_bytes
            live_bytes += self.size_bytes(wanted) + self.size_bytes(reads & ~others)
            live_bytes += self.size_bytes(creates & ~kept & ~self.lazy)
            keeps = tuple(g for g in replay.creates if kept >> g & 1)
            yield _Ending(
                (position, used | 1 << replay.operation, others | reads),
                ending.replays_ns + replay.cost_ns,
                max(ending.peak_bytes, live_bytes),
                Step(replay.operation, way, keeps),
                ending,
            )

    def bound_ns(self, ending: _Ending) -> int:
        """No schedule with this ending costs less: lemma 5. [ns]"""
        _, used, wanted = ending.state
        return ending.replays_ns + self.forward_ns(wanted & ~self.remakes(used))

    def bound_bytes(self, ending: _Ending) -> int:
        """No schedule with this ending holds less at its peak: lemma 5. [bytes]"""
        position, used, wanted = ending.state
        forced = wanted & ~self.remakes(used)
        peak_bytes = self.before_bytes[position] + self.size_bytes(forced)
        flight_bytes = self.size_bytes(forced | self.held)
        peak_bytes += (self.problem.in_flight - 1) * flight_bytes
        return max(peak_bytes, ending.peak_bytes + self.problem.beside_bytes(flight_bytes))

    def judge(self, ending: _Ending) -> tuple[Schedule, Simulation]:
        """The schedule of an ending that stands at the entry, and what the simulator says."""
        backward = tuple(ending.steps())
        schedule = Schedule(running_forward(self.problem, backward), backward)
        simulation = simulate(self.problem, schedule)
        after_bytes = max(simulation.live_bytes[len(schedule.forward) + 1 :])
        saved = ending.state[2] | self.held
        expected = ending.peak_bytes + self.problem.beside_bytes(self.size_bytes(saved))
        if after_bytes != expected:
            raise SolverError(
                f"the search reckoned {expected:,} bytes for the backward of "
                f"{self.problem.name!r} and the simulator {after_bytes:,}; please report this."
            )
        return schedule, simulation


class _Best:
    """The search: by time within a budget, or by peak where there is none."""

    def __init__(self, problem: RematProblem, budget_bytes: int | None) -> None:
        self.space = _Space(problem)
        self.budget_bytes = budget_bytes
        self.known: dict[_State, list[tuple[int, int]]] = {}
        self.heap: list[tuple[int, int, int, _Ending, Found | None]] = []
        self.pushed = 0

    def _push(self, ending: _Ending) -> None:
        """Remember an ending, unless it is too high or one that is known will do: lemma 4."""
        peak_bytes = self.space.bound_bytes(ending)
        if self.budget_bytes is not None and peak_bytes > self.budget_bytes:
            return
        rank = peak_bytes if self.budget_bytes is None else self.space.bound_ns(ending)
        time_ns, high_bytes = ending.replays_ns, ending.peak_bytes
        if self.budget_bytes is None:
            time_ns = 0
        elif self.space.problem.in_flight == 1:
            high_bytes = 0
        known = self.known.setdefault(ending.state, [])
        if any(t <= time_ns and b <= high_bytes for t, b in known):
            return
        known[:] = [(t, b) for t, b in known if t < time_ns or b < high_bytes]
        known.append((time_ns, high_bytes))
        self._add(rank, ending)

    def _add(self, rank: int, ending: _Ending, found: Found | None = None) -> None:
        """The least rank comes first; of equal ones the longest ending."""
        self.pushed += 1
        heapq.heappush(self.heap, (rank, ending.state[0], self.pushed, ending, found))

    def _finish(self, ending: _Ending) -> None:
        """Let the simulator judge, and rank the schedule by what it says."""
        schedule, simulation = self.space.judge(ending)
        if self.budget_bytes is None:
            self._add(simulation.peak_bytes, ending, Found(schedule, simulation))
        elif simulation.peak_bytes <= self.budget_bytes:
            self._add(simulation.recompute_ns, ending, Found(schedule, simulation))

    def run(self, clock: Clock, node_limit: int) -> Found:
        """The first schedule to come out of the heap is the best: ranks are bounds."""
        self._push(self.space.end())
        while self.pushed < node_limit:
            if not self.heap:
                return Found()
            *_, ending, found = heapq.heappop(self.heap)
            if found is not None:
                return found
            if clock.up():
                return Found(given_up="the time limit has passed")
            if ending.state[0] == 0:
                self._finish(ending)
            for longer in self.space.longer(ending):
                self._push(longer)
        return Found(given_up=f"more than {node_limit:,} parts of schedules to look at")


def best_schedule(
    problem: RematProblem,
    budget_bytes: int | None,
    *,
    time_limit_s: float,
    node_limit: int = _NODES,
    most_operations: int = _OPERATIONS,
) -> Found:
    """Search the whole space.

    Args:
        problem: The step; a small one.
        budget_bytes: The budget, resident bytes included; None asks for the least peak. [bytes]
        time_limit_s: When to give up. [s]
        node_limit: How many endings to look at before giving up.
        most_operations: Where more can be replayed, no search is begun.

    Returns:
        The best schedule there is, or why there is none.
    """
    number = len({replay.operation for replay in problem.replays})
    if number > most_operations:
        words = f"{number} operations can be replayed, more than {most_operations}"
        return Found(given_up=words)
    return _Best(problem, budget_bytes).run(Clock(time_limit_s), node_limit)


def exhaustive(problem: RematProblem, budget_bytes: int, *, time_limit_s: float) -> Solution:
    """Find the cheapest schedule of the space, and prove it.

    Args:
        problem: The step; a small one.
        budget_bytes: The budget, resident bytes included. [bytes]
        time_limit_s: When to give up; nothing comes back then. [s]

    Returns:
        The optimum, which is its own bound; none where no schedule of the space is within the
        budget, or the problem is too large: the message says which.
    """
    found = best_schedule(problem, budget_bytes, time_limit_s=time_limit_s)
    if found.given_up:
        return Solution(None, message=f"too large for exhaustive search: {found.given_up}")
    if found.schedule is None or found.simulation is None:
        return Solution(None, message="no schedule with one replay per operation is so small")
    optimum_ns = found.simulation.recompute_ns
    return Solution(found.schedule, optimum_ns, BOUND_CLASS, "optimal")
