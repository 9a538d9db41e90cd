r"""A proven bound on the extra time, for plans with one replay per operation in the given order.

A relaxation of what every such plan must satisfy. The backward is cut at a few positions, those
where a plan holds most: cut 0 is the entry of the backward, cuts 1 .. K are the moments while those
positions run, and cut K + 1 is the end. With b bytes, c time, and Y_{u,k} = sum of y_{r,k} over the
replays r that make u:

Variables, all relaxed to [0, 1]
    s_u      the forward's copy of u is held at the entry
    y_{r,k}  replay r has run before cut k; Y_r stands for the end
    f_{u,k}  the forward's copy of u is still held at cut k; f_{u,0} is s_u
    d_{u,k}  the replayed copy of u is held at cut k
    z_f      forward operation f, which only the backward needs, runs in the forward

Objective
    min  sum_r c_r Y_r - sum_f c_f (1 - z_f)                                             [ns]

Constraints
    1. Copies do not come from nowhere, and what has run stays run -> ``_copies``, ``_monotone``
           f_{u,k+1} <= f_{u,k},   y_{r,k} <= y_{r,k+1},
           d_{u,k+1} <= d_{u,k} + Y_{u,k+1} - Y_{u,k}
    2. The backward finds what it reads -> ``_reads``
           f_{u,k} + d_{u,k} >= 1                             for u read at cut k
           f_{u,k} + d_{u,k} + Y_{u,k+1} - Y_{u,k} >= 1       for u read between cuts k and k + 1
    3. A replay finds what it reads, wherever it stands -> ``_inputs``; for each q that reads u
           f_{u,k} + d_{u,k} + Y_{u,k+1} - Y_{u,k} >= y_{q,k+1} - y_{q,k}
           s_u + Y_{u,k} >= y_{q,k}
           f_{u,k} + d_{u,k} + Y_{u,K+1} - Y_{u,k} >= Y_q - y_{q,k}
    4. What is held at a cut is within the budget -> ``_bytes``
           fixed_k + sum_u b_u (f_{u,k} + d_{u,k}) <= budget
    5. Kept copies pile up over the forward -> ``_forward``
    6. Optional forward operations run if kept or read: z_f >= s_g, z_f >= z_q -> ``_optional``

Any choice of cuts gives a bound, since leaving out positions leaves out constraints. The last two
rows of group 3 follow from the first for whole plans but not for parts of them: without them half
a value, used twice, would make a whole one.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from fxremat.problem import RematProblem
from fxremat.solvers.linear import LinearProgram, Term
from fxremat.solvers.needs import Needs, find_needs
from fxremat.solvers.screen import Ints

BOUND_CLASS = "one replay per operation, given order"
ANY_REPLAYS = "any replays, given order"  # with no cut but the entry and the end
_CUTS = 8
_APART = 64  # cuts are at least a 64th of the backward apart


def highest(live_bytes: Ints, number: int = _CUTS) -> tuple[int, ...]:
    """The positions where most is held: where to cut.

    Args:
        live_bytes: Bytes held at the entry of the backward and at each position. [bytes]
        number: How many positions at most.

    Returns:
        Positions, ascending.
    """
    held = live_bytes[1:].tolist()
    chosen: list[int] = []
    for position in sorted(range(len(held)), key=lambda p: (-held[p], p)):
        if all(abs(position - other) > len(held) // _APART for other in chosen):
            chosen.append(position)
        if len(chosen) == number:
            break
    return tuple(sorted(chosen))


class _Relaxation:
    """The linear program of one problem, budget and cut; None among variables is a 0."""

    def __init__(self, problem: RematProblem, budget_bytes: int, cuts: Sequence[int]) -> None:
        self.problem, self.budget_bytes = problem, budget_bytes
        self.needs: Needs = find_needs(problem)
        self.cuts, self.end = tuple(cuts), len(cuts) + 1
        self.program = LinearProgram()
        self.unit_bytes = 1 << max(0, budget_bytes.bit_length() - 10)
        self.unit_ns = max(1, sum(r.cost_ns for r in problem.replays)) / 1000
        new, kept = self.program.variable, self.needs.kept
        self.s = {g: new(float(g in kept)) for g in self.needs.candidates}
        self.late, self.late_replay = self._latest()
        self.y = [self._runs(q) for q in range(len(problem.replays))]
        self.z = {f: new() for f in self.needs.optional}
        self.held = {g: self._copies(g) for g in self.s}
        self._monotone()
        self._reads()
        self._inputs()
        self._bytes()
        self._forward()
        self._optional()
        self._objective()

    # Variables ------------------------------------------------------------------------------

    def _latest(self) -> tuple[dict[int, int], list[int]]:
        """Last position at which a storage, and a replay, can still be of use; -1 for never."""
        late = {g: self.needs.last(g) for g in self.s}
        late_replay = [-1] * len(self.problem.replays)
        for q in reversed(range(len(self.problem.replays))):
            replay = self.problem.replays[q]
            late_replay[q] = max((late.get(g, -1) for g in replay.creates), default=-1)
            for u in replay.reads:
                late[u] = max(late.get(u, -1), late_replay[q])
        return late, late_replay

    def _runs(self, q: int) -> list[int | None]:
        """y_{q,k} for each cut; the same variable where the replay cannot be of use between."""
        if self.late_replay[q] < 0:
            return [None] * (self.end + 1)
        runs: list[int | None] = [None, self.program.variable()]
        for cut in self.cuts:
            useful = self.late_replay[q] > cut
            runs.append(self.program.variable() if useful else runs[-1])
        return runs

    def _made(self, g: int, k: int, factor: float = 1.0) -> list[Term]:
        """Y_{g,k} times a factor."""
        runs = (self.y[r][k] for r in self.problem.replays_of.get(g, ()))
        return [(y, factor) for y in runs if y is not None]

    def _copies(self, g: int) -> list[list[Term]]:
        """1. The terms f_{g,k} + d_{g,k} for each cut but the end."""
        program, forward = self.program, self.s[g]
        replayed: list[Term] = []
        found: list[list[Term]] = [[(forward, 1.0)]]
        for k, cut in enumerate(self.cuts, 1):
            if self.late[g] < cut:
                found.append([])
                continue
            kept = g in self.needs.kept and self.needs.last(g) >= cut
            before, forward = forward, program.variable(float(kept))
            program.at_most(0.0, [(forward, 1.0), (before, -1.0)])
            found.append([(forward, 1.0)])
            if self.problem.replays_of.get(g):
                here = program.variable()
                new = [*self._made(g, k, -1.0), *self._made(g, k - 1)]
                program.at_most(0.0, [(here, 1.0), *replayed, *new])
                replayed = [(here, -1.0)]
                found[-1].append((here, 1.0))
        return found

    # Constraints ----------------------------------------------------------------------------

    def _monotone(self) -> None:
        """1. What has run stays run."""
        for runs in self.y:
            for earlier, later in pairwise(runs):
                if earlier is not None and later is not None and earlier != later:
                    self.program.at_most(0.0, [(earlier, 1.0), (later, -1.0)])

    def _there(self, g: int, k: int, until: int) -> list[Term]:
        """Held at cut k, or made from there to a later cut."""
        return [*self.held[g][k], *self._made(g, until), *self._made(g, k, -1.0)]

    def _reads(self) -> None:
        """2. The backward finds what it reads."""
        for g in self.s:
            seen: set[tuple[int, bool]] = set()
            for position in self.needs.positions.get(g, ()):
                k = bisect_right(self.cuts, position)
                seen.add((k, k > 0 and self.cuts[k - 1] == position))
            for k, at_cut in sorted(seen):
                self.program.at_least(1.0, self.held[g][k] if at_cut else self._there(g, k, k + 1))

    def _inputs(self) -> None:
        """3. A replay finds what it reads."""
        for q, replay in enumerate(self.problem.replays):
            runs = self.y[q]
            for u in replay.reads:
                if u not in self.s or self.late_replay[q] < 0:
                    continue
                for k in range(self.end):
                    source = [(self.s[u], 1.0), *self._made(u, k + 1)]
                    if runs[k + 1] != runs[k]:
                        self._at_least(self._there(u, k, k + 1), runs[k + 1], runs[k])
                        self._at_least(source, runs[k + 1], None)
                    if runs[self.end] != runs[k]:
                        self._at_least(self._there(u, k, self.end), runs[self.end], runs[k])

    def _at_least(self, terms: list[Term], later: int | None, earlier: int | None) -> None:
        """Sum of terms >= later - earlier."""
        less = [(v, f) for v, f in ((later, -1.0), (earlier, 1.0)) if v is not None]
        self.program.at_least(0.0, [*terms, *less])

    def _limit(self, terms: Sequence[Term], fixed_bytes: int, others: int) -> None:
        """A row of bytes, with the kept copies that so many other forwards in flight hold."""
        more = [(s, others * self._size(g)) for g, s in self.s.items()] if others else []
        if terms or more:
            high = (self.budget_bytes - fixed_bytes) / self.unit_bytes
            self.program.at_most(high, [*terms, *more])

    def _size(self, g: int) -> float:
        return self.problem.storages[g].size_bytes / self.unit_bytes

    def _bytes(self) -> None:
        """4. What is held at a cut is within the budget."""
        others = self.problem.in_flight - 1
        fixed = (self.needs.entry_bytes, *(self.needs.fixed_bytes[cut] for cut in self.cuts))
        for k, fixed_bytes in enumerate(fixed):
            terms = [(v, f * self._size(g)) for g in self.s for v, f in self.held[g][k]]
            self._limit(terms, fixed_bytes, others)
            if k and others:  # one of them has left its gradients instead
                fixed_bytes += self.problem.waiting_bytes - self.needs.held_bytes
                self._limit(terms, fixed_bytes, others - 1)

    def _forward(self) -> None:
        """5. Kept copies pile up over the forward."""
        highest_bytes = -1
        for index in reversed(range(self.problem.num_forward)):
            fixed_bytes = self.needs.forward_bytes[index]
            if fixed_bytes > highest_bytes:
                highest_bytes = fixed_bytes
                last = self.needs.forward_last
                terms = [(s, self._size(g)) for g, s in self.s.items() if last[g] < index]
                self._limit(terms, fixed_bytes, self.problem.in_flight - 1)

    def _optional(self) -> None:
        """6. Optional forward operations run if kept or read."""
        readers: dict[int, list[int]] = {}
        for f in self.z:
            for u in self.problem.operations[f].reads:
                readers.setdefault(u, []).append(f)
        for f, z in self.z.items():
            for g in self.problem.operations[f].creates:
                if g in self.s:
                    self.program.at_least(0.0, [(z, 1.0), (self.s[g], -1.0)])
                for q in readers.get(g, ()):
                    self.program.at_least(0.0, [(z, 1.0), (self.z[q], -1.0)])

    def _objective(self) -> None:
        """Time of the replays, less that of forward operations that need not run."""
        for q, replay in enumerate(self.problem.replays):
            runs = self.y[q][self.end]
            if runs is not None:
                self.program.cost([(runs, replay.cost_ns / self.unit_ns)])
        for f, z in self.z.items():
            cost = self.problem.operations[f].cost_ns / self.unit_ns
            self.program.cost([(z, cost)], offset=-cost)


def bound_ns(
    problem: RematProblem, budget_bytes: int, cuts: Sequence[int], *, time_limit_s: float
) -> int | None:
    """Bound the extra time of every plan of ``BOUND_CLASS`` within a budget.

    Without cuts it bounds that of every plan of ``ANY_REPLAYS``: what is held at the entry of the
    backward is then all that is limited, and a replay counts once, however often it runs.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        cuts: Positions to look at, ascending; any give a bound, those where most is held the best.
        time_limit_s: For the linear program. [s]

    Returns:
        The bound, a little below the program's optimum for the solver's tolerance [ns]; None when
        it was not solved.
    """
    relaxation = _Relaxation(problem, budget_bytes, cuts)
    answer = relaxation.program.relax((), time_limit_s=time_limit_s)
    if answer is None or not answer.optimal:
        return None
    tolerance = 1e-5 * max(1.0, abs(answer.bound))
    return math.floor((answer.bound - tolerance) * relaxation.unit_ns)
