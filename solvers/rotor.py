"""Optimal nested replays over a heterogeneous chain: a dynamic programme over runs of blocks.

With T(s, e, m) the least time for the backward of blocks s .. e from the frontier before s, while
m bytes are there besides it, and go_{s,t} = advance_s + .. + advance_{t-1}:

    T(s, s, m) = replay_s                                               if phase s fits into m
    T(s, e, m) = min( min_{s<t<e} go_{s,t} + T(t, e, m - frontier_t) + T(s, t-1, m),
                      go_{s,e} + replay_e + T(s, e-1, m)                if phase e fits into m,
                      replay and advance of s + T(s+1, e, m - inside_s - frontier_{s+1}) )

Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains"
(https://arxiv.org/abs/1911.13214) has the recursion. Here the blocks come from any graph
(``chain``), each phase has bytes of its own to stay below, and the first run, which is the forward
itself, costs nothing more (``_Table.first``). Bytes are counted in units, rounded up; the simulator
decides afterwards which amount of memory is the greatest that holds.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fxremat.plans import Solution
from fxremat.problem import RematProblem
from fxremat.simulate import Schedule, simulate
from fxremat.solvers.chain import Chain, find_chain
from fxremat.solvers.chain_memory import memory_of
from fxremat.solvers.needs import Same
from fxremat.solvers.nested import Choice, Run, unroll
from fxremat.solvers.search import NO_HURRY, Clock, OutOfTimeError

_BESIDE = 3  # levels tried beside the one that was found

Times = npt.NDArray[np.float32]


class _Table:
    """The dynamic programme; rows are amounts of memory."""

    def __init__(self, problem: RematProblem, chain: Chain, clock: Clock) -> None:
        self.chain, self.memory = chain, memory_of(problem, chain)
        number, levels = len(chain), self.memory.levels
        self.ahead_ns = np.concatenate([[0], np.cumsum(chain.advance_ns)]).astype(np.float32)
        self.by_start = [np.full((number - s, levels), np.inf, np.float32) for s in range(number)]
        self.kept = [np.full((e + 1, levels), np.inf, np.float32) for e in range(number)]
        for length in range(1, number + 1):
            clock.check()
            for start in range(number - length + 1):
                end = start + length - 1
                row = (
                    self._alone(start, int(self.memory.own[start]))
                    if length == 1
                    else self._options(start, end).min(axis=0)
                )
                self.by_start[start][end - start] = row
                self.kept[end][start] = self._shifted(row, int(self.memory.frontier[start]))
        self.first = self._first()

    def _alone(self, block: int, needed: int) -> Times:
        """A run of one block, or the last of a run."""
        row = np.full(self.memory.levels, np.inf, np.float32)
        row[needed:] = self.chain.replay_ns[block]
        return row

    def _shifted(self, row: Times, units: int) -> Times:
        """The same with less memory."""
        if units == 0:
            return row
        shifted = np.full_like(row, np.inf)
        shifted[units:] = row[:-units]
        return shifted

    def _options(self, start: int, end: int) -> Times:
        """Times of all that may happen to a run: a row for each block to go to, then the inside."""
        times = np.empty((end - start + 1, self.memory.levels), np.float32)
        gone = times[:-1]
        gone[:-1] = self.kept[end][start + 1 : end]
        gone[-1] = self._alone(end, int(self.memory.passed[end]))
        gone += self.by_start[start][: end - start]
        gone += (self.ahead_ns[start + 1 : end + 1] - self.ahead_ns[start])[:, None]
        needed = np.maximum.accumulate(self.memory.way[end, start:end])
        gone[np.arange(self.memory.levels)[None, :] < needed[:, None]] = np.inf
        behind = self.by_start[start + 1][end - start - 1]
        times[-1] = self._shifted(behind, int(self.memory.inside[start]))
        times[-1] += np.float32(max(self.chain.advance_ns[start], self.chain.replay_ns[start]))
        return times

    def _first(self) -> list[Times]:
        """The run that is the forward itself, from each block on: its way costs nothing more."""
        last = len(self.chain) - 1
        found = [self._done(int(self.memory.own[last]))]
        for start in reversed(range(last)):
            found.append(self._first_options(start, found).min(axis=0))
        return found[::-1]

    def _done(self, needed: int) -> Times:
        """No time where the memory is enough."""
        levels = np.arange(self.memory.levels)
        return np.where(levels >= needed, np.float32(0), np.float32(np.inf))

    def _first_options(self, start: int, found: list[Times]) -> Times:
        """As ``_options``; ``found`` holds the first runs of the blocks behind, the last first."""
        last = len(self.chain) - 1
        rows = [
            self._shifted(found[last - t], int(self.memory.frontier[t]))
            + self.by_start[start][t - 1 - start]
            for t in range(start + 1, last)
        ]
        rows.append(self._done(self.memory.forward) + self.by_start[start][last - 1 - start])
        inside = self._shifted(found[last - start - 1], int(self.memory.inside[start]))
        return np.stack([*rows, inside])

    def levels(self) -> list[int]:
        """Amounts of memory that are enough for the whole chain."""
        return [int(level) for level in np.flatnonzero(np.isfinite(self.first[0]))]

    def choose(self, run: Run) -> Choice:
        """The best that may happen to a run."""
        if run.first:
            options = self._first_options(run.start, self.first[: run.start : -1])
        else:
            options = self._options(run.start, run.end)
        best = int(options[:, run.level].argmin())
        if best == run.end - run.start:
            return Choice(-1, run.level - int(self.memory.inside[run.start]))
        keep = run.start + 1 + best
        kept = int(self.memory.frontier[keep]) if keep < run.end else 0
        return Choice(keep, run.level - kept, run.level)


class _Asked(Same):
    """A problem whose table is asked for; the clock is no part of the key."""

    def __init__(self, problem: RematProblem, clock: Clock) -> None:
        super().__init__(problem)
        self.clock = clock


@lru_cache(maxsize=4)
def _table(key: _Asked) -> _Table:
    return _Table(key.problem, find_chain(key.problem), key.clock)


def rotor_schedule(
    problem: RematProblem, budget_bytes: int, clock: Clock = NO_HURRY
) -> Schedule | None:
    """The cheapest nested schedule within a budget.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        clock: When to give up.

    Returns:
        The schedule; None when none of them is within the budget.

    Raises:
        OutOfTimeError: The clock has struck.
    """
    table = _table(_Asked(problem, clock))
    levels = table.levels()
    found: dict[int, tuple[int, Schedule] | None] = {}

    def fits(index: int) -> bool:
        """Is there a schedule at this level within the budget? It is noted."""
        if index not in found:
            clock.check()
            found[index] = _cheapest(problem, table, levels[index], budget_bytes)
        return found[index] is not None

    low = _first_that(fits, len(levels), rising=False)
    for index in range(max(0, low - _BESIDE), min(len(levels), low + _BESIDE)):
        fits(index)
    best = min((pair for pair in found.values() if pair), key=lambda pair: pair[0], default=None)
    return None if best is None else best[1]


def rotor_lowest(
    problem: RematProblem, accept: Callable[[Schedule], bool], clock: Clock = NO_HURRY
) -> Iterator[Schedule]:
    """The lowest nested schedules of those that are accepted, which is asked of the long ones.

    Args:
        problem: The step.
        accept: Is a schedule short enough? The more memory, the shorter it is.
        clock: When to give up.

    Returns:
        Schedules of the lowest levels of memory, one of which has the least peak.

    Raises:
        OutOfTimeError: The clock has struck.
    """
    table = _table(_Asked(problem, clock))
    levels = table.levels()

    def short(index: int) -> bool:
        clock.check()
        return accept(unroll(problem, table.chain, table.choose, levels[index]))

    first = _first_that(short, len(levels), rising=True)
    for level in levels[first : first + _BESIDE]:
        for linger in (True, False):
            yield unroll(problem, table.chain, table.choose, level, linger=linger)


def _first_that(holds: Callable[[int], bool], number: int, *, rising: bool) -> int:
    """Index where a property begins (``rising``) or ceases to hold, by halving."""
    low, high = -1, number  # peaks grow with the level, but for a few steps back
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) == rising else (middle, high)
    return high


def _cheapest(
    problem: RematProblem, table: _Table, level: int, budget_bytes: int
) -> tuple[int, Schedule] | None:
    """Extra time [ns] and schedule at one level, if its peak is within the budget."""
    for linger in (True, False):
        schedule = unroll(problem, table.chain, table.choose, level, linger=linger)
        simulation = simulate(problem, schedule)
        if simulation.peak_bytes <= budget_bytes:
            return simulation.recompute_ns, schedule
    return None


def rotor(problem: RematProblem, budget_bytes: int, *, time_limit_s: float) -> Solution:
    """Replay over the chain of blocks, as often as it pays.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        time_limit_s: A safety net; a chain of 300 blocks takes some seconds for its table. [s]

    Returns:
        The schedule, without a bound; none where the time was too short.
    """
    try:
        schedule = rotor_schedule(problem, budget_bytes, Clock(time_limit_s))
    except OutOfTimeError:
        return Solution(None, message="the time given is too short for nested replays")
    return Solution(schedule, message="nested replays over a chain of blocks")
