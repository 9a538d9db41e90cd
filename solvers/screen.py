"""Price many choices at once, nearly as the simulator would.

Local search asks for the cost and the peak of thousands of choices that differ in a value or two.
The simulator answers exactly, one schedule at a time. ``Screen`` follows the same rule (each value
that is not saved is replayed once, just before its first read) for a whole batch, with arrays over
the choices, and leaves out only what happens between two backward operations: the short-lived
results inside a chain of replays. It therefore proposes; whoever uses it asks the simulator before
a choice counts. How much a chain holds is passed in as ``excess_bytes``, measured on a choice
nearby.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fxremat.problem import RematProblem
from fxremat.solvers.needs import Needs, find_needs

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Places = npt.NDArray[Any]  # of positions, in 16 or 32 bits


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


class _Way(NamedTuple):
    """A replay by the rows of what it makes and reads.

    Attributes:
        replay: Its index.
        made: Rows of what it makes and no earlier way of its operation does.
        creates: Rows of all that it makes.
        reads: Rows of what it reads.
        own: Rows of what it reads and its own operation makes.
    """

    replay: int
    made: tuple[int, ...]
    creates: tuple[int, ...]
    reads: tuple[int, ...]
    own: tuple[int, ...]


class Screen:
    """The tables to price choices of one problem with; each forward value has a row in them."""

    def __init__(self, problem: RematProblem) -> None:
        self.problem = problem
        self.needs: Needs = find_needs(problem)
        needs, storages = self.needs, problem.storages
        self.columns = needs.candidates
        self.column_of = {g: column for column, g in enumerate(self.columns)}
        self.never = needs.num_positions + 1
        # Places fit 16 bits but for the longest backwards: less to move is less to wait for.
        self.whole = np.int16 if self.never + 4 < np.iinfo(np.int16).max else np.int32
        values = [g for g, s in enumerate(storages) if 0 <= s.producer < problem.num_forward]
        self.row_of = {g: row for row, g in enumerate(values)}
        self.first = np.array([needs.first(g) for g in values], dtype=self.whole)[:, None]
        self.until = np.array([needs.last(g) for g in values], dtype=self.whole)[:, None]
        always = [g in needs.kept or g not in problem.replays_of for g in values]
        self.always: Flags = np.array(always, dtype=np.bool_)
        self.rows = np.array([self.row_of[g] for g in self.columns], dtype=np.intp)
        self.ways = self._ways()
        self.cost_ns = np.array([r.cost_ns for r in problem.replays], dtype=np.float64)
        self._tabulate_forward()
        sizes = [storages[g].size_bytes for g in self.columns]
        self.size_bytes = np.array(sizes, dtype=np.float64)
        held = set(self.columns)
        counted = [
            g for g in values if storages[g].size_bytes and (g in held or g not in needs.kept)
        ]
        self.counted = np.array([self.row_of[g] for g in counted], dtype=np.intp)
        self.counted_bytes = np.array([storages[g].size_bytes for g in counted], dtype=np.float64)

    def _ways(self) -> list[list[_Way]]:
        """The replays of each operation, in order."""
        replays, storages, row_of = self.problem.replays, self.problem.storages, self.row_of
        found: list[list[_Way]] = []
        chosen: set[int] = set()
        for index, replay in enumerate(replays):
            if not found or replays[found[-1][0].replay].operation != replay.operation:
                found.append([])
                chosen = set()
            reads = [u for u in replay.reads if u in row_of]
            own = [u for u in reads if storages[u].producer == replay.operation]
            made = [g for g in replay.creates if g not in chosen]
            chosen.update(made)
            rows = (tuple(row_of[g] for g in each) for each in (made, replay.creates, reads, own))
            found[-1].append(_Way(index, *rows))
        return found

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
        table = np.zeros((len(rows), len(self.columns)))
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
        """Cost and bytes of each column of ``saved``, whose rows are the candidates.

        Sums of bytes and times are made in double, which is exact: none comes near 2**53.
        """
        batch, never = saved.shape[1], self.never
        first = np.repeat(self.first, batch, axis=1)
        until = np.repeat(self.until, batch, axis=1)
        kept: Flags = np.repeat(self.always[:, None], batch, axis=1)
        kept[self.rows] |= saved
        closed = np.where(kept, self.whole(never), self.whole(0))  # never made where kept
        born = np.full_like(first, never)
        ran: Flags = np.zeros((len(self.cost_ns), batch), dtype=np.bool_)
        for ways in reversed(self.ways):
            for way, time in self._times(ways, closed, first):
                runs = np.less(time, never, out=ran[way.replay])
                before = np.where(runs, time - 1, -1)
                for u in way.reads:
                    np.minimum(first[u], time, out=first[u])
                    np.maximum(until[u], before, out=until[u])
                for g in way.creates:
                    np.minimum(born[g], time, out=born[g])
        recompute_ns = (self.cost_ns @ ran).astype(np.int64) - self._not_run(kept, first)
        live = self._live(kept, born, first, until)
        used = (saved & (first[self.rows] < never)).astype(np.float64)
        forward = self.forward_fixed[:, None] + (self.forward_table @ used).astype(np.int64)
        forward_peak: Ints = forward.max(axis=0) if len(forward) else recompute_ns * 0
        if self.problem.in_flight > 1:
            flight: Ints = (self.size_bytes @ used).astype(np.int64)
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
        self, ways: list[_Way], closed: Places, first: Places
    ) -> Iterable[tuple[_Way, Places]]:
        """When each replay of one operation runs: just before the first read of what it makes."""
        never = self.never
        times: list[Places] = []
        for way in ways:
            time: Places | None = None
            for g in way.made:
                wanted = np.maximum(first[g], closed[g])
                time = wanted if time is None else np.minimum(time, wanted)
            if time is None:
                time = np.full_like(first[0], never)
            times.append(np.minimum(time, self.whole(never)))
            for u in way.own if len(ways) > 1 else ():
                np.minimum(first[u], times[-1], out=first[u])
        for one, other in combinations(range(len(ways)), 2):
            if set(ways[one].creates) <= set(ways[other].creates):
                late = times[other] <= times[one]
                times[one] = np.where(late, self.whole(never), times[one])
        return zip(ways, times, strict=True)

    def _not_run(self, kept: Flags, first: Places) -> Ints | int:
        """Cost of optional forward operations that do not run. [ns]"""
        if not self.needs.optional:
            return 0
        total = np.zeros(kept.shape[1], dtype=np.int64)
        read_by_run: dict[int, Flags] = {}
        for index in reversed(self.needs.optional):
            operation = self.problem.operations[index]
            runs = np.zeros(len(total), dtype=np.bool_)
            for g in operation.creates:
                row = self.row_of[g]
                runs |= kept[row] & (first[row] < self.never)
                if g in read_by_run:
                    runs |= read_by_run[g]
            for u in operation.reads:
                read_by_run[u] = read_by_run[u] | runs if u in read_by_run else runs
            total += np.where(runs, 0, operation.cost_ns)
        return total

    def _live(self, kept: Flags, born: Places, first: Places, until: Places) -> Ints:
        """Bytes at entry, at each position and at the end; a column for each choice.

        Each value is held from one place to another. Choices of one batch are neighbours: the first
        is added up, and of the others what differs from it.
        """
        number, never, batch = self.needs.num_positions, self.never, kept.shape[1]
        fixed = np.array([self.needs.entry_bytes, *self.needs.fixed_bytes], dtype=np.int64)
        out = number + 2  # the place of what is never held
        rows = self.counted
        start = np.where(kept[rows], self.whole(-1), born[rows])
        stop = until[rows]
        holds = (start < never) & (first[rows] < never) & (stop >= start)
        change = np.zeros((out + 2) * batch)
        level = np.zeros(out + 2)
        for place, sign in ((start + 1, 1.0), (stop + 2, -1.0)):
            np.clip(place, 0, out + 1, out=place)
            place[~holds] = out
            like = place[:, 0]
            amount = sign * self.counted_bytes
            level += np.bincount(like, amount, out + 2)
            row, column = np.nonzero(place != like[:, None])
            there = place[row, column].astype(np.intp) * batch + column
            change += np.bincount(there, amount[row], change.size)
            there = like[row].astype(np.intp) * batch + column
            change -= np.bincount(there, amount[row], change.size)
        levels = np.cumsum(change.reshape(out + 2, batch)[:out], axis=0)
        levels += (np.cumsum(level)[:out] + fixed)[:, None]
        return levels.astype(np.int64)
