"""Price many choices at once, nearly as the simulator would.

Local search asks for the cost and the peak of thousands of choices that differ in a value or two.
The simulator answers exactly, one schedule at a time. ``Screen`` follows the same rule (each value
that is not saved is replayed once, just before its first read) for a whole batch, with arrays over
the choices, and leaves out only what happens between two backward operations: the short-lived
results inside a chain of replays. It therefore proposes; whoever uses it asks the simulator before
a choice counts. How much a chain holds is passed in as ``excess_bytes``, measured on a choice
nearby.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from fxremat.problem import RematProblem
from fxremat.solvers.needs import Needs, find_needs

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Prices:
    """What a batch of choices costs and holds.

    Attributes:
        recompute_ns: Extra cost of each choice. [ns]
        live_bytes: Bytes held at each position, a row for each: entry, positions, end. [bytes]
        forward_bytes: Peak of the forward for each choice. [bytes]
    """

    recompute_ns: Ints
    live_bytes: Ints
    forward_bytes: Ints

    def above_bytes(self, excess_bytes: Ints, budget_bytes: int, *, summed: bool) -> Ints:
        """Bytes above the budget, when chains of replays hold that much more.

        Args:
            excess_bytes: What they hold at each position. [bytes]
            budget_bytes: The budget. [bytes]
            summed: Over all positions; otherwise at the highest.

        Returns:
            For each choice. [bytes]
        """
        live = self.live_bytes + (excess_bytes[:, None] - budget_bytes)
        forward = np.maximum(self.forward_bytes - budget_bytes, 0)
        if not summed:
            highest: Ints = np.maximum(live.max(axis=0), forward)
            return highest
        backward: Ints = np.maximum(live, 0).sum(axis=0)
        return backward + forward


class Screen:
    """The tables to price choices of one problem with."""

    def __init__(self, problem: RematProblem) -> None:
        self.problem = problem
        self.needs: Needs = find_needs(problem)
        self.columns = self.needs.candidates
        self.column_of = {g: column for column, g in enumerate(self.columns)}
        self.never = self.needs.num_positions + 1
        self.values = [
            g
            for g, storage in enumerate(problem.storages)
            if storage.producer >= 0 and storage.producer < problem.num_forward
        ]
        self.ways: list[list[int]] = []
        for index, replay in enumerate(problem.replays):
            if self.ways and problem.replays[self.ways[-1][0]].operation == replay.operation:
                self.ways[-1].append(index)
            else:
                self.ways.append([index])
        self._tabulate_forward()
        sizes = [problem.storages[g].size_bytes for g in self.columns]
        self.size_bytes: Ints = np.array(sizes, dtype=np.int64)

    def _tabulate_forward(self) -> None:
        """Forward rows that no later one dominates, with what is saved by then."""
        forward = self.needs.forward_bytes
        rows: list[int] = []
        highest = -1
        for index in reversed(range(len(forward))):
            if forward[index] > highest:
                highest = forward[index]
                rows.append(index)
        self.forward_rows = rows
        self.forward_fixed: Ints = np.array([forward[index] for index in rows], dtype=np.int64)
        table = np.zeros((len(rows), len(self.columns)), dtype=np.int64)
        for column, g in enumerate(self.columns):
            for row, index in enumerate(rows):
                if self.needs.forward_last[g] < index:
                    table[row, column] = self.problem.storages[g].size_bytes
        self.forward_table = table

    def flags(self, choices: Sequence[frozenset[int]]) -> Flags:
        """Choices as columns of flags, a row for each candidate."""
        like = choices[0] if choices else frozenset()
        first = np.array([g in like or g in self.needs.kept for g in self.columns], dtype=np.bool_)
        saved: Flags = np.repeat(first[:, None], len(choices), axis=1)
        for column, choice in enumerate(choices):
            for g in choice ^ like:  # neighbours of one choice differ in little
                row = self.column_of.get(g)
                if row is not None and g not in self.needs.kept:
                    saved[row, column] = g in choice
        return saved

    def price(self, saved: Flags) -> Prices:
        """Cost and bytes of each column of ``saved``, whose rows are the candidates."""
        batch = saved.shape[1]
        never = self.never
        first: dict[int, Ints] = {}
        until: dict[int, Ints] = {}
        for g in self.values:
            first[g] = np.full(batch, self.needs.first(g), dtype=np.int64)
            until[g] = np.full(batch, self.needs.last(g), dtype=np.int64)
        kept: dict[int, Flags] = {}
        for g in self.values:
            always = g in self.needs.kept or g not in self.problem.replays_of
            column = self.column_of.get(g)
            kept[g] = np.full(batch, always) if always or column is None else saved[column]
        born: dict[int, Ints] = {}
        recompute_ns = np.zeros(batch, dtype=np.int64)
        for ways in reversed(self.ways):
            times = self._times(ways, kept, first)
            for way, time in times.items():
                replay = self.problem.replays[way]
                recompute_ns += np.where(time < never, replay.cost_ns, 0)
                before = np.where(time < never, time - 1, -1)
                for u in replay.reads:
                    if u in first:
                        np.minimum(first[u], time, out=first[u])
                        np.maximum(until[u], before, out=until[u])
                for g in replay.creates:
                    born[g] = np.minimum(born[g], time) if g in born else time
        recompute_ns -= self._not_run(kept, first)
        live = self._live(kept, born, first, until)
        used = saved & np.stack([first[g] < never for g in self.columns]) if len(saved) else saved
        forward = self.forward_fixed[:, None] + self.forward_table @ used.astype(np.int64)
        forward_peak: Ints = forward.max(axis=0) if len(forward) else recompute_ns * 0
        if self.problem.in_flight > 1:
            flight = self.size_bytes @ used.astype(np.int64)
            forward_peak = forward_peak + (self.problem.in_flight - 1) * flight
            live[0] += (self.problem.in_flight - 1) * flight
            live[1:] += self._beside(flight)
        return Prices(recompute_ns, live, forward_peak)

    def _beside(self, flight: Ints) -> Ints:
        """``beside_bytes`` of what each choice saves, without the outputs of other forwards."""
        held_bytes = self.needs.held_bytes
        other = np.maximum(flight + held_bytes, self.problem.waiting_bytes)
        outputs_bytes = (self.problem.in_flight - 1) * held_bytes  # in the fixed bytes already
        beside: Ints = (self.problem.in_flight - 2) * (flight + held_bytes) + other - outputs_bytes
        return beside

    def _times(
        self, ways: list[int], kept: dict[int, Flags], first: dict[int, Ints]
    ) -> dict[int, Ints]:
        """When each replay of one operation runs: just before the first read of what it makes."""
        replays, never = self.problem.replays, self.never
        times: dict[int, Ints] = {}
        chosen: set[int] = set()
        for way in ways:
            replay = replays[way]
            time: Ints | None = None
            for g in replay.creates:
                if g in chosen:
                    continue
                chosen.add(g)
                wanted = np.where(kept[g], never, first[g])
                time = wanted if time is None else np.minimum(time, wanted)
            if time is None:
                time = np.full_like(next(iter(first.values())), never)
            time = np.minimum(time, never)
            times[way] = time
            for u in replay.reads if len(ways) > 1 else ():
                if u in first and self.problem.storages[u].producer == replay.operation:
                    np.minimum(first[u], time, out=first[u])
        for way, other in combinations(ways, 2):
            if set(replays[way].creates) <= set(replays[other].creates):
                times[way] = np.where(times[other] <= times[way], never, times[way])
        return times

    def _not_run(self, kept: dict[int, Flags], first: dict[int, Ints]) -> Ints | int:
        """Cost of optional forward operations that do not run. [ns]"""
        if not self.needs.optional:
            return 0
        total = np.zeros_like(next(iter(first.values())))
        read_by_run: dict[int, Flags] = {}
        for index in reversed(self.needs.optional):
            operation = self.problem.operations[index]
            runs = np.zeros(len(total), dtype=np.bool_)
            for g in operation.creates:
                runs |= kept[g] & (first[g] < self.never)
                if g in read_by_run:
                    runs |= read_by_run[g]
            for u in operation.reads:
                read_by_run[u] = read_by_run[u] | runs if u in read_by_run else runs
            total += np.where(runs, 0, operation.cost_ns)
        return total

    def _live(
        self,
        kept: dict[int, Flags],
        born: dict[int, Ints],
        first: dict[int, Ints],
        until: dict[int, Ints],
    ) -> Ints:
        """Bytes at entry, at each position and at the end; a column for each choice."""
        number, never = self.needs.num_positions, self.never
        fixed = np.array([self.needs.entry_bytes, *self.needs.fixed_bytes], dtype=np.int64)
        sizes = {g: self.problem.storages[g].size_bytes for g in self.values}
        counted = [
            g for g in self.values if sizes[g] and (g not in self.needs.kept or g in self.column_of)
        ]
        if not counted:
            batch = len(next(iter(first.values()), (0,)))
            return np.repeat(fixed[:, None], batch, axis=1)
        absent = np.full_like(first[counted[0]], never)
        keeps = np.stack([kept[g] for g in counted])
        read = np.stack([first[g] for g in counted]) < never
        start = np.where(keeps, -1, np.stack([born.get(g, absent) for g in counted]))
        stop = np.stack([until[g] for g in counted])
        stop = np.where(keeps & read, np.maximum(stop, -1), stop)
        holds = (start < never) & read & (stop >= start)
        amount = holds * np.array([sizes[g] for g in counted], dtype=np.float64)[:, None]
        columns = np.arange(absent.size)
        shape = (number + 4, absent.size)
        begins = np.minimum(start + 1, number + 2) * absent.size + columns
        ends = np.clip(stop + 2, 0, number + 3) * absent.size + columns
        # Sums in double are exact: no number of bytes comes near 2**53.
        change = np.bincount(begins.ravel(), amount.ravel(), shape[0] * shape[1])
        change -= np.bincount(ends.ravel(), amount.ravel(), shape[0] * shape[1])
        level = np.cumsum(change.reshape(shape)[: number + 2], axis=0).astype(np.int64)
        return level + fixed[:, None]
