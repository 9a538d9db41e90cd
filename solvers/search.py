"""Local search over what to save, judged by the simulator.

A *choice* is a set of saved storages; ``expand`` makes it a schedule and the simulator says what
that costs and holds. From a choice, ``Search`` tries to flip single values, to exchange one or two
saved values for others, and to slide a save along the graph (to the inputs of what made it, or to
what is made from it). ``Screen`` prices all neighbours at once; the promising ones go to the
simulator, and only what the simulator confirms is accepted. Effort is counted in choices priced,
not in seconds, so that a run repeats exactly; the clock is only a safety net.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

import numpy as np

from fxremat.problem import RematProblem
from fxremat.schedule import expand
from fxremat.simulate import Schedule, simulate
from fxremat.solvers.screen import Ints, Screen

_BATCH = 512
_SHORTLIST = 24  # values that double exchanges are made of
_FEW = 9  # values up to which every choice is judged
_VERIFY = 10  # neighbours that one round shows to the simulator


@dataclass(frozen=True, slots=True)
class Judged:
    """A choice and what the simulator says of it.

    Attributes:
        saved: Storages to keep; those that every plan keeps included.
        recompute_ns: Extra cost. [ns]
        peak_bytes: Its peak. [bytes]
        live_bytes: The most held at the entry, around each position, and at the end. [bytes]
        forward_bytes: Peak of the forward. [bytes]
    """

    saved: frozenset[int]
    recompute_ns: int
    peak_bytes: int
    live_bytes: Ints = field(compare=False, repr=False)
    forward_bytes: int

    def key(self, goal: "Goal") -> tuple[int, int, int]:
        """What is better is less: first within the budget, then cheap, then low."""
        above = max(0, self.peak_bytes - goal.budget_bytes)
        if above and goal.summed:
            above = int(np.maximum(self.live_bytes - goal.budget_bytes, 0).sum())
            above += max(0, self.forward_bytes - goal.budget_bytes)
        return above, self.recompute_ns, self.peak_bytes


@dataclass(frozen=True, slots=True)
class Goal:
    """What a search wants.

    Attributes:
        budget_bytes: The budget, resident bytes included. [bytes]
        summed: Measure how far a choice is above the budget by the sum over all positions, so that
            lowering one of several equal peaks is progress; otherwise by the highest alone.
    """

    budget_bytes: int
    summed: bool = True


_Flip = tuple[int, int]  # change of the cost [ns], value


class OutOfTimeError(Exception):
    """The time limit has passed before there was anything to give back."""


class Clock:
    """The safety net: says when the time is up."""

    def __init__(self, time_limit_s: float) -> None:
        self.end = time.monotonic() + time_limit_s

    def left_s(self) -> float:
        """Seconds left, 0 when none are. [s]"""
        return max(0.0, self.end - time.monotonic())

    def up(self) -> bool:
        """The time limit has passed."""
        return time.monotonic() >= self.end

    def check(self) -> None:
        """Stop if the time is up.

        Raises:
            OutOfTimeError: It is.
        """
        if self.up():
            raise OutOfTimeError


NO_HURRY = Clock(math.inf)


class Search:
    """Searches around choices of one problem; remembers what the simulator said."""

    def __init__(self, problem: RematProblem) -> None:
        self.problem = problem
        self.screen = Screen(problem)
        self.kept = self.screen.needs.kept
        self._known: dict[frozenset[int], Judged] = {}
        self._near = self._neighbours()

    def schedule(self, saved: Iterable[int]) -> Schedule:
        """The schedule of a choice."""
        return expand(self.problem, frozenset(saved) | self.kept)

    def judge(self, saved: Iterable[int]) -> Judged:
        """Ask the simulator."""
        choice = frozenset(saved) | self.kept
        if choice not in self._known:
            schedule = expand(self.problem, choice)
            simulation = simulate(self.problem, schedule)
            entry = len(schedule.forward)
            live = np.zeros(self.screen.needs.num_positions + 2, dtype=np.int64)
            live[0] = simulation.live_bytes[entry]
            position = 1
            for step, held in zip(
                schedule.backward, simulation.live_bytes[entry + 1 :], strict=False
            ):
                live[position] = max(live[position], held)
                position += step.replay < 0
            live[-1] = max(live[-1], simulation.live_bytes[-1])
            self._known[choice] = Judged(
                choice,
                simulation.recompute_ns,
                simulation.peak_bytes,
                live,
                max(simulation.live_bytes[:entry], default=0),
            )
        return self._known[choice]

    def used(self, judged: Judged) -> Judged:
        """The same choice without saves that nothing reads."""
        simulation = simulate(self.problem, expand(self.problem, judged.saved))
        return self.judge(simulation.saved)

    def excess_bytes(self, judged: Judged) -> Ints:
        """What chains of replays hold at each position besides what the screen counts. [bytes]"""
        priced = self.screen.price(self.screen.flags([judged.saved])).live_bytes[:, 0]
        excess: Ints = np.maximum(judged.live_bytes - priced, 0)
        return excess

    def improve(self, start: Judged, goal: Goal, *, effort: int, clock: Clock) -> Judged:
        """Go downhill from a choice.

        Args:
            start: Where to begin; it may be above the budget.
            goal: The budget, and how to measure what is above it.
            effort: How many choices to price at most.
            clock: When to stop in any case.

        Returns:
            The best choice met; ``start`` if none is better.
        """
        *_, best = self.descend(start, goal, effort=effort, clock=clock)
        return best

    def descend(self, start: Judged, goal: Goal, *, effort: int, clock: Clock) -> Iterator[Judged]:
        """The choices on the way downhill, each better than the one before; see ``improve``."""
        best = self.used(start)
        best = min(best, start, key=lambda judged: judged.key(goal))
        yield best
        while effort > 0 and not clock.up():
            found, spent = self._round(best, goal, effort)
            effort -= spent
            if found is best:
                break
            best = found
            yield best

    @cached_property
    def few(self) -> tuple[Judged, ...]:
        """All choices, judged, where they are few; otherwise none."""
        free = [g for g in self.screen.columns if g not in self.kept]
        if len(free) > _FEW:
            return ()
        return tuple(
            self.judge(g for bit, g in enumerate(free) if number >> bit & 1)
            for number in range(2 ** len(free))
        )

    # One round ------------------------------------------------------------------------------

    def _round(self, best: Judged, goal: Goal, effort: int) -> tuple[Judged, int]:
        """Try all neighbours once: single flips and slides first, then exchanges."""
        excess = self.excess_bytes(best)
        singles = self._singles(best.saved)
        keys, costs = self._price(singles, excess, goal)
        found = self._verify(best, singles, keys, goal)
        if found is not best:
            return found, len(singles)
        pairs = self._exchanges(best, singles, costs, min(effort, 4096))
        keys, _ = self._price(pairs, excess, goal)
        found = self._verify(best, pairs, keys, goal)
        return found, len(singles) + len(pairs)

    def _price(
        self, choices: Sequence[frozenset[int]], excess: Ints, goal: Goal
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Screen choices: (bytes above the budget, summed; cost), and the cost alone."""
        keys: list[tuple[int, int]] = []
        costs: list[int] = []
        for start in range(0, len(choices), _BATCH):
            prices = self.screen.price(self.screen.flags(choices[start : start + _BATCH]))
            above = prices.above_bytes(excess, goal.budget_bytes, summed=goal.summed)
            keys.extend(zip(above.tolist(), prices.recompute_ns.tolist(), strict=True))
            costs.extend(prices.recompute_ns.tolist())
        return keys, costs

    def _verify(
        self,
        best: Judged,
        choices: Sequence[frozenset[int]],
        keys: Sequence[tuple[int, int]],
        goal: Goal,
    ) -> Judged:
        """Show the most promising neighbours to the simulator; combine those that hold."""
        base = best.key(goal)
        order = sorted(range(len(choices)), key=lambda i: (keys[i], i))
        first = best
        shown = 0
        for index in order:
            if keys[index] > base[:2] or shown >= _VERIFY:
                break
            change_in = choices[index] - first.saved
            change_out = first.saved - choices[index]
            merged = (best.saved | change_in) - change_out
            if merged == best.saved:
                continue
            shown += 1
            judged = self.judge(merged)
            if judged.key(goal) < best.key(goal):
                best = judged
        return best

    def _singles(self, saved: frozenset[int]) -> list[frozenset[int]]:
        """Flips of one value, then slides."""
        flips = [saved ^ {g} for g in self.screen.columns if g not in self.kept]
        slides: dict[frozenset[int], None] = {}
        for g in self.screen.columns:
            if g in self.kept:
                continue
            below, above = self._near[g]
            if g in saved:
                slides[(saved - {g}) | below] = None
                slides[(saved - {g}) | above] = None
                slides[saved - {g} - above] = None
                slides[saved - {g} - below] = None
            else:
                slides[(saved | {g}) - below] = None
                slides[(saved | {g}) - above] = None
                slides[saved | {g} | below] = None
        known = {saved, *flips}
        return flips + [choice for choice in slides if choice not in known]

    def _neighbours(self) -> dict[int, tuple[frozenset[int], frozenset[int]]]:
        """Candidate -> candidates that make it, candidates that are made from it."""
        problem, columns = self.problem, set(self.screen.columns) - self.kept
        below: dict[int, set[int]] = {g: set() for g in columns}
        above: dict[int, set[int]] = {g: set() for g in columns}
        for replay in problem.replays:
            for g in replay.creates:
                for u in replay.reads:
                    if g in columns and u in columns and u != g:
                        below[g].add(u)
                        above[u].add(g)
        return {g: (frozenset(below[g]), frozenset(above[g])) for g in sorted(columns)}

    def _exchanges(
        self, best: Judged, singles: Sequence[frozenset[int]], costs: Sequence[int], most: int
    ) -> list[frozenset[int]]:
        """Exchange saved values for others, where the single flips promise a gain."""
        flips = [g for g in self.screen.columns if g not in self.kept]
        drops: list[_Flip] = []
        adds: list[_Flip] = []
        for g, cost_ns in zip(flips, costs, strict=False):
            change_ns = cost_ns - best.recompute_ns
            if g in best.saved:
                drops.append((change_ns, g))
            elif change_ns < 0:
                adds.append((change_ns, g))
        found: list[tuple[tuple[int, ...], int]] = [
            ((h, g), gain + loss) for gain, h in adds for loss, g in drops
        ]
        light, rich = self._by_byte(drops), self._by_byte(adds)
        for ones, twos in ((rich, light), (light, rich)):
            for (first_ns, first), (second_ns, second), (third_ns, third) in (
                (one, *two) for one in ones for two in combinations(twos, 2)
            ):
                found.append(((first, second, third), first_ns + second_ns + third_ns))
        promising = sorted((change_ns, flip) for flip, change_ns in found if change_ns < 0)
        return [best.saved ^ frozenset(flip) for _, flip in promising[:most]]

    def _by_byte(self, flips: list[_Flip]) -> list[_Flip]:
        """The flips with the least change of cost per byte."""

        def price(flip: _Flip) -> tuple[float, int]:
            return flip[0] / max(1, self.problem.storages[flip[1]].size_bytes), flip[1]

        return sorted(flips, key=price)[:_SHORTLIST]
