"""Polish a schedule: replays at other places than just before their readers.

``expand`` either saves a value or replays it just before its first reader. A schedule may do more:
let go of a saved value between two readers and replay it for the later one, replay early while an
input is still there, or replace a saved value by the one that a replay makes beside another. Here
such changes are tried one by one, and the simulator judges each.

A schedule is its backward steps. What each replay keeps follows: the values that later steps read,
up to the next replay that makes them anew; a replay that nobody reads is dropped. Neither change
makes a schedule dearer or higher.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from fxremat.problem import RematProblem
from fxremat.schedule import running_forward
from fxremat.simulate import Schedule, Simulation, Step, simulate, what_runs
from fxremat.solvers.needs import find_needs

_EFFORT = 40_000  # steps that may be simulated, over all trials
_SHARES = (2, 4, 8, 16, 32, 1 << 62)  # parts of the way down to try at once, then one byte
_REPAIRS = 6  # changes that may follow the loss of a replay

_Steps = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class _Judged:
    """A schedule and what the simulator says of it.

    Attributes:
        schedule: The schedule, tidied.
        simulation: What it holds and costs.
        excess_bytes: What its steps hold above the budget, summed. [bytes]
    """

    schedule: Schedule
    simulation: Simulation
    excess_bytes: int

    @property
    def key(self) -> tuple[int, int, int]:
        """What is better is less: first within the budget, then cheap, then low."""
        return self.excess_bytes, self.simulation.recompute_ns, self.simulation.peak_bytes


def tidy(problem: RematProblem, steps: _Steps) -> Schedule:
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


class _Polish:
    """One run: the budget, and the effort left."""

    def __init__(self, problem: RematProblem, budget_bytes: int, effort: int) -> None:
        self.problem, self.budget_bytes, self.effort = problem, budget_bytes, effort
        self.ways: dict[int, list[int]] = {}
        for way, replay in enumerate(problem.replays):
            self.ways.setdefault(replay.operation, []).append(way)

    def judge(self, steps: _Steps) -> _Judged:
        """Tidy and simulate."""
        schedule = tidy(self.problem, steps)
        self.effort -= len(schedule.forward) + len(schedule.backward)
        simulation = simulate(self.problem, schedule)
        above = (live - self.budget_bytes for live in simulation.live_bytes)
        return _Judged(schedule, simulation, sum(bytes_ for bytes_ in above if bytes_ > 0))

    def run(self, best: _Judged) -> _Judged:
        """Go on while something helps."""
        while self.effort > 0:
            found = self.repair(best, None) if best.excess_bytes else self.cheaper(best)
            if found.key >= best.key:
                break
            best = found
        return best

    def cheaper(self, best: _Judged) -> _Judged:
        """Do without some replays, or with cheaper variants, and repair what that breaks."""
        for steps in self._losses(best.schedule.backward):
            found = self.judge(steps)
            if found.simulation.recompute_ns < best.simulation.recompute_ns:
                found = self.repair(found, best.simulation.recompute_ns - 1)
                if found.key < best.key:
                    return found
            if self.effort <= 0:
                break
        return best

    def repair(self, start: _Judged, limit_ns: int | None) -> _Judged:
        """Lower the excess, by what lowers it most and by what lowers it for the least time."""
        ends = (self._descend(start, limit_ns, thrifty) for thrifty in (True, False))
        return min(start, *ends, key=lambda judged: judged.key)

    def _descend(self, found: _Judged, limit_ns: int | None, thrifty: bool) -> _Judged:
        """Make the best change a few times, without passing a time. [ns]"""
        for _ in range(_REPAIRS):
            if not found.excess_bytes or self.effort <= 0:
                break
            best, best_price = found, math.inf
            for steps in self._changes(found):
                changed = self.judge(steps)
                won = found.excess_bytes - changed.excess_bytes
                extra_ns = changed.simulation.recompute_ns - found.simulation.recompute_ns
                if won <= 0 or (limit_ns and changed.simulation.recompute_ns > limit_ns):
                    continue
                price = max(0, extra_ns) / won if thrifty else -won
                if price < best_price:
                    best, best_price = changed, price
                if self.effort <= 0:
                    break
            if best is found:
                break
            found = best
        return found

    def _losses(self, steps: _Steps) -> Iterator[_Steps]:
        """Without each of the replays, the dearest first, with cheaper variants, without two."""
        replays = self.problem.replays
        places = [place for place, step in enumerate(steps) if step.replay >= 0]
        places.sort(key=lambda p: (-replays[steps[p].replay].cost_ns, p))
        for place in places:
            step = steps[place]
            yield _without(steps, place)
            for way in self.ways[step.operation]:
                if replays[way].cost_ns < replays[step.replay].cost_ns:
                    yield (*steps[:place], Step(step.operation, way), *steps[place + 1 :])
        for place, other in combinations(places, 2):
            yield _without(steps, place, other)

    def _changes(self, judged: _Judged) -> Iterator[_Steps]:
        """Other places and variants for each replay, and one replay more before each reader."""
        steps = judged.schedule.backward
        high = self._high(judged)
        readers = self._readers(steps)
        for place, step in enumerate(steps):
            if step.replay < 0:
                continue
            above = [p for p in high if p < place]
            places = {p for g in step.keeps for p in readers[g]}
            for to in sorted(places.union(above[-1:])):
                yield _moved(steps, place, place + 1, to)
            end = next(p for p in range(place, len(steps) + 1) if _ends(steps, p))
            if above and end > place + 1:  # with the replays that follow
                yield _moved(steps, place, end, above[-1])
            for way in self.ways[step.operation]:
                if way != step.replay:
                    yield (*steps[:place], Step(step.operation, way), *steps[place + 1 :])
        yield from self._splits(steps, high[0] if high else len(steps), readers)

    def _splits(self, steps: _Steps, first: int, readers: dict[int, list[int]]) -> Iterator[_Steps]:
        """One replay more, before each reader that stands behind the first place that is high.

        Alone, so that its inputs are held until then, and after replays of those that are not.
        """
        replayed = {step.operation for step in steps if step.replay >= 0}
        for way, replay in enumerate(self.problem.replays):
            if replay.operation not in replayed:
                places = {p for g in replay.creates for p in readers.get(g, ()) if p > first}
                for place in sorted(places):
                    one = (Step(replay.operation, way),)
                    yield (*steps[:place], *one, *steps[place:])
                    chain = self._chain(way, place, replayed, readers)
                    if chain != one:
                        yield (*steps[:place], *chain, *steps[place:])

    def _chain(
        self, way: int, place: int, replayed: set[int], readers: dict[int, list[int]]
    ) -> _Steps:
        """A replay and before it those of its inputs that nobody reads later, and so on."""
        replays = self.problem.replays
        ways = {replays[way].operation: way}
        stack = [way]
        while stack:
            for g in replays[stack.pop()].reads:
                if readers.get(g, [-1])[-1] >= place:
                    continue
                below = next(iter(self.problem.replays_of.get(g, ())), -1)
                if below >= 0 and replays[below].operation not in replayed | set(ways):
                    ways[replays[below].operation] = below
                    stack.append(below)
        return tuple(Step(operation, ways[operation]) for operation in sorted(ways))

    def _readers(self, steps: _Steps) -> dict[int, list[int]]:
        """Places that read each storage; the end of the backward is the last."""
        readers: dict[int, list[int]] = {}
        for place, step in enumerate(steps):
            for g in what_runs(self.problem, step).reads:
                readers.setdefault(g, []).append(place)
        for g in self.problem.gradients:
            readers.setdefault(g, []).append(len(steps))
        return readers

    def _high(self, judged: _Judged) -> list[int]:
        """Where a run of places above the budget begins; -1 for the forward and the entry."""
        entry = len(judged.schedule.forward)
        live = judged.simulation.live_bytes
        found: list[int] = []
        below = True
        for index, bytes_ in enumerate(live):
            if bytes_ > self.budget_bytes and below:
                found.append(max(index - entry - 1, -1))
            below = bytes_ <= self.budget_bytes
        return sorted(set(found))


def _ends(steps: _Steps, place: int) -> bool:
    """A run of replays ends before this place."""
    return place == len(steps) or steps[place].replay < 0


def _without(steps: _Steps, *places: int) -> _Steps:
    """The steps but those."""
    return tuple(step for place, step in enumerate(steps) if place not in places)


def _moved(steps: _Steps, start: int, stop: int, to: int) -> _Steps:
    """The steps from ``start`` to ``stop`` stand before the one at ``to`` instead."""
    run = steps[start:stop]
    if to >= stop:
        return (*steps[:start], *steps[stop:to], *run, *steps[to:])
    to = min(max(to, 0), start)
    return (*steps[:to], *run, *steps[to:start], *steps[stop:])


def polish(
    problem: RematProblem, schedule: Schedule, budget_bytes: int, *, effort: int = _EFFORT
) -> Schedule:
    """Make a schedule cheaper within a budget, or lower where it is above.

    Args:
        problem: The step.
        schedule: Any schedule of it with at most one replay of each operation.
        budget_bytes: The budget, resident bytes included. [bytes]
        effort: How many steps to simulate at most, over all trials; the result depends on it.

    Returns:
        A schedule that is no worse: first by what it holds above the budget, then by its time.
    """
    run = _Polish(problem, budget_bytes, effort)
    return run.run(run.judge(schedule.backward)).schedule


def sink(problem: RematProblem, schedule: Schedule, *, effort: int = _EFFORT) -> Schedule:
    """Lower the peak of a schedule as far as single changes do.

    Args:
        problem: The step.
        schedule: Any schedule of it with at most one replay of each operation.
        effort: How many steps to simulate at most, over all trials.

    Returns:
        A schedule whose peak is no higher.
    """
    needs = find_needs(problem)
    low_bytes = max(*needs.fixed_bytes, *needs.forward_bytes)  # held whatever is saved
    peak_bytes = simulate(problem, schedule).peak_bytes
    shares = list(_SHARES)
    while shares and effort > 0:
        target_bytes = peak_bytes - max(1, (peak_bytes - low_bytes) // shares[0])
        run = _Polish(problem, target_bytes, effort)
        lower = run.repair(run.judge(schedule.backward), None)
        effort = run.effort
        if lower.simulation.peak_bytes < peak_bytes:
            schedule, peak_bytes = lower.schedule, lower.simulation.peak_bytes
        else:
            shares.pop(0)
    return schedule
