r"""The residency model: which values to save and when to replay the others, as an integer program.

The backward is cut into stages k = 0 .. K-1. With b_u the bytes of storage u and c_r the time of
replay r (both scaled by ``scale_of``: bytes rounded up, the budget rounded down):

Variables
    s_u      in {0, 1}   u is kept from forward to backward
    y_{r,k}  in {0, 1}   replay r has run by the end of stage k; Y_r stands for the last stage
    m_{r,u,k} in [0, y_{r,k}]  the part of r that makes u, where r makes several storages or u has
                         several replays; elsewhere m is y itself
    h_{u,k}  in [0, 1]   u is held in stage k for a replay that comes later
    z_f      in [0, 1]   forward operation f, which only the backward needs, runs in the forward

Objective
    min  sum_r c_r Y_r - sum_f c_f (1 - z_f)                                             [ns]

Constraints
    1. A value is kept or made again, not both, and is there when the backward first reads it
       -> ``_reads``
           s_u + sum_r M_{r,u} <= 1,   s_u + sum_r m_{r,u,k(u)} >= 1
    2. A replay runs once, stays run, and makes things when it runs -> ``_monotone``
           y_{r,k} <= y_{r,k+1},   m_{r,u,k} <= m_{r,u,k+1},   M_{r,u} - m_{r,u,k} <= Y_r - y_{r,k}
    3. A replay finds what it reads -> ``_inputs``
           s_u + sum_r m_{r,u,k} >= y_{q,k}           for each q that reads u, each stage k
    4. A value outlives its backward reads for the replays that follow, and one that only replays
       read lives until the last of them -> ``_holds``
           h_{u,k} >= (Y_q - y_{q,j}) - sum_r (M_{r,u} - m_{r,u,j})     for j = k - 1 and j = k
    5. The backward stays within the budget -> ``_backward_rows``, at position p of stage k
           fixed_p + excess_k + sum_{u read at p or later} b_u (s_u + sum_r m_{r,u,k})
                   + sum_{other u} b_u h_{u,k}  <=  budget
    6. So does the forward, as saved values pile up -> ``_forward_rows``
           fixed_i + sum_{u out of use before i} b_u s_u  <=  budget
    7. An optional forward operation runs if its results are kept or read -> ``_optional``
           z_f >= s_u,  z_f >= z_q

Only differences such as y_{q,k} against m_{r,u,k} occur: the relaxation stays strong (Checkmate,
https://arxiv.org/abs/1910.02653, multiplies such pairs instead and rematerialises in every stage;
here an operation is replayed once). Each replay has variables only for its window of stages. The
model leaves out what a chain of replays holds between two positions; the caller measures that with
the simulator, of which this file knows nothing, and hands it back as ``excess_bytes``.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

from fxremat.errors import SolverError
from fxremat.problem import RematProblem
from fxremat.solvers.linear import LinearProgram, Term
from fxremat.solvers.needs import Needs, find_needs
from fxremat.solvers.scale import scale_of
from fxremat.solvers.stages import Stages, windows

_INTEGRAL = 1e-4  # how far from 0 or 1 a 0/1 answer may be


@dataclass(frozen=True, slots=True)
class Selection:
    """What the model chose.

    Attributes:
        saved: Storages to keep.
        replays: Replays to run.
        recompute_ns: Their time, less that of optional forward operations that do not run. [ns]
    """

    saved: frozenset[int]
    replays: frozenset[int]
    recompute_ns: int


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The relaxed model's answer.

    Attributes:
        fractions: s_u of each candidate.
        recompute_ns: Its objective; a guide, not a bound, since the model may be too strict. [ns]
    """

    fractions: Mapping[int, float]
    recompute_ns: float


class Residency:
    """The model of one problem and one cut; budget and excess can change between solves."""

    def __init__(
        self, problem: RematProblem, stages: Stages, budget_bytes: int, *, reach: int = 6
    ) -> None:
        """Build it.

        Args:
            problem: The step.
            stages: The cut of its backward.
            budget_bytes: The budget, resident bytes included; also sets the scale. [bytes]
            reach: How many stages a replay has one by one, see ``windows``.
        """
        self.problem, self.stages = problem, stages
        self.needs: Needs = find_needs(problem)
        self.scale = scale_of(problem, budget_bytes)
        self.of = stages.of()
        self.last = len(stages) - 1
        self.program = LinearProgram()
        self.windows = windows(problem, self.needs, stages, reach)
        self.s: dict[int, int] = {}
        self.y: dict[int, list[int]] = {}
        self.m: dict[tuple[int, int], list[int]] = {}
        self.z: dict[int, int] = {}
        self.held = frozenset(self.needs.kept - set(self.needs.candidates))
        self.rows: list[tuple[int, int, int]] = []  # position, row, bytes that it leaves out
        self._variables()
        self._reads()
        self._monotone()
        self._inputs()
        self.h = {g: self._holds(g) for g in self.s}
        self._backward_rows()
        self._forward_rows()
        self._optional()
        self._objective()
        self.restrict(budget_bytes, {})

    # Variables ------------------------------------------------------------------------------

    def _variables(self) -> None:
        """s, y and m."""
        new = self.program.variable
        for g in self.needs.candidates:
            self.s[g] = new(1.0 if g in self.needs.kept else 0.0, whole=True)
        for r, window in enumerate(self.windows):
            if window is None:
                continue
            self.y[r] = [new(whole=True) for _ in window.ends]
            creates = self.problem.replays[r].creates
            for g in creates:
                if g in self.s and (len(creates) > 1 or len(self.problem.replays_of[g]) > 1):
                    self.m[r, g] = [new() for _ in window.ends]
                    for part, whole in zip(self.m[r, g], self.y[r], strict=True):
                        self.program.at_most(0.0, [(part, 1.0), (whole, -1.0)])
                else:
                    self.m[r, g] = self.y[r]

    def _run(self, r: int, stage: int) -> list[int]:
        """y_{r,stage}: one variable, or none where it is 0."""
        window = self.windows[r]
        if window is None or window.pieces[stage] < 0:
            return []
        return [self.y[r][window.pieces[stage]]]

    def _made(self, g: int, stage: int) -> list[int]:
        """The variables of sum_r m_{r,g,stage}."""
        found: list[int] = []
        for r in self.problem.replays_of.get(g, ()):
            window = self.windows[r]
            if window is not None and window.pieces[stage] >= 0:
                found.append(self.m[r, g][window.pieces[stage]])
        return found

    # Constraints ----------------------------------------------------------------------------

    def _reads(self) -> None:
        """1. A value is kept or made again, and is there when the backward first reads it."""
        for g, s in self.s.items():
            made = self._made(g, self.last)
            if made:
                self.program.at_most(1.0, [(s, 1.0), *_plus(made)])
            if self.needs.positions.get(g) and g not in self.needs.kept:
                made = self._made(g, self.of[self.needs.first(g)])
                self.program.at_least(1.0, [(s, 1.0), *_plus(made)])

    def _monotone(self) -> None:
        """2. A replay runs once, stays run, and makes things when it runs."""
        at_most = self.program.at_most
        for pieces in self.y.values():
            for earlier, later in pairwise(pieces):
                at_most(0.0, [(earlier, 1.0), (later, -1.0)])
        for (r, _), parts in self.m.items():
            runs = self.y[r]
            if parts is runs:
                continue
            for earlier, later in pairwise(parts):
                at_most(0.0, [(earlier, 1.0), (later, -1.0)])
            for part, whole in zip(parts[:-1], runs[:-1], strict=True):
                left = [(parts[-1], 1.0), (part, -1.0), (runs[-1], -1.0), (whole, 1.0)]
                at_most(0.0, left)

    def _inputs(self) -> None:
        """3. A replay finds what it reads."""
        for q, window in enumerate(self.windows):
            if window is None:
                continue
            for u in self.problem.replays[q].reads:
                if u not in self.s or u in self.needs.kept:
                    continue
                seen: set[tuple[int, ...]] = set()
                for stage in self._changes((q, *self.problem.replays_of.get(u, ()))):
                    runs, made = self._run(q, stage), self._made(u, stage)
                    key = (*runs, *made)
                    if runs and key not in seen:
                        seen.add(key)
                        terms = [(self.s[u], 1.0), *_plus(made), (runs[0], -1.0)]
                        self.program.at_least(0.0, terms)

    def _changes(self, replays: Collection[int]) -> list[int]:
        """Last stages of the pieces of some replays."""
        found = {self.last}
        for r in replays:
            window = self.windows[r]
            if window is not None:
                found.update(window.ends)
                found.add(window.pieces.index(0) - 1)
        return sorted(stage for stage in found if 0 <= stage <= self.last)

    def _holds(self, g: int) -> list[list[int]]:
        """4. The variables h_{g,k} with their rows, for each stage and last the entry."""
        readers = [q for q in self.needs.consumers.get(g, ()) if self.windows[q] is not None]
        if not readers:
            return [[] for _ in range(self.last + 2)]
        total = self._made(g, self.last)
        demands: list[tuple[tuple[Term, ...], ...]] = []
        for stage in (*range(self.last + 1), -1):
            made = self._made(g, stage)
            later = [] if total == made else [*_plus(total), *((v, -1.0) for v in made)]
            rows: list[tuple[Term, ...]] = []
            for q in readers:
                done, runs = self._run(q, stage), self._run(q, self.last)
                if runs != done:
                    rows.append(((runs[0], -1.0), *_plus(done), *later))
            demands.append(tuple(rows))
        known: dict[frozenset[tuple[Term, ...]], int] = {}
        found: list[list[int]] = []
        for stage in (*range(self.last + 1), -1):
            rows_here = frozenset(demands[stage]) | frozenset(demands[max(stage - 1, -1)])
            if rows_here and rows_here not in known:
                known[rows_here] = self.program.variable()
                for row in sorted(rows_here):
                    self.program.at_least(0.0, [(known[rows_here], 1.0), *row])
            found.append([known[rows_here]] if rows_here else [])
        return found

    def _present(self, g: int, position: int) -> list[int]:
        """Variables that say whether g is held at a position; -1 is the entry of the backward."""
        stage = self.of[position] if position >= 0 else -1
        if self.needs.last(g) >= position and self.needs.positions.get(g):
            return [self.s[g], *self._made(g, stage)]
        return self.h[g][stage]

    def _backward_rows(self) -> None:
        """5. The backward stays within the budget, at positions that no other one dominates."""
        fixed = self.needs.fixed_bytes
        self._memory_row(-1, self.needs.entry_bytes)
        for stage, start in enumerate(self.stages.starts):
            stop = [*self.stages.starts, len(fixed)][stage + 1]
            highest = -1
            for position in range(start, stop):
                if fixed[position] > highest:
                    highest = fixed[position]
                    self._memory_row(position, highest)

    def _memory_row(self, position: int, fixed_bytes: int) -> None:
        """One row of group 5."""
        terms: list[Term] = []
        for g in self.s:
            size = self.scale.up(self.problem.storages[g].size_bytes)
            terms.extend((v, size) for v in self._present(g, position))
        self._limit(position, terms, fixed_bytes)

    def _limit(self, position: int, terms: list[Term], fixed_bytes: int) -> None:
        """A row of bytes; every forward in flight holds the saved values once more.

        In the backward there is a second one: one forward has left its gradients instead.
        """
        others = self.problem.in_flight - 1
        self._row(position, terms, fixed_bytes, others)
        if others and position >= 0:
            fixed_bytes += self.problem.waiting_bytes - self.needs.held_bytes
            self._row(position, terms, fixed_bytes, others - 1)

    def _row(self, position: int, terms: list[Term], fixed_bytes: int, others: int) -> None:
        """The bytes at a position, with those that so many other forwards have saved."""
        more = [
            (s, self.scale.up(others * self.problem.storages[g].size_bytes))
            for g, s in (self.s.items() if others else ())
        ]
        row = self.program.at_most(math.inf, [*terms, *more])
        self.rows.append((position, row, fixed_bytes))

    def _forward_rows(self) -> None:
        """6. The forward stays within the budget."""
        highest = -1
        for index in reversed(range(self.problem.num_forward)):
            fixed_bytes = self.needs.forward_bytes[index]
            if fixed_bytes <= highest:
                continue
            highest = fixed_bytes
            terms = [
                (s, self.scale.up(self.problem.storages[g].size_bytes))
                for g, s in self.s.items()
                if self.needs.forward_last[g] < index
            ]
            self._limit(-2, terms, fixed_bytes)

    def _optional(self) -> None:
        """7. An optional forward operation runs if its results are kept or read."""
        readers: dict[int, list[int]] = {}
        for f in self.needs.optional:
            self.z[f] = self.program.variable()
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
        unit_ns = self.scale.unit_ns
        for r, pieces in self.y.items():
            self.program.cost([(pieces[-1], self.problem.replays[r].cost_ns / unit_ns)])
        for f, z in self.z.items():
            cost = self.problem.operations[f].cost_ns / unit_ns
            self.program.cost([(z, cost)], offset=-cost)

    # Solving --------------------------------------------------------------------------------

    def restrict(self, budget_bytes: int, excess_bytes: Mapping[int, int]) -> None:
        """Set the budget, and what chains of replays hold besides the model.

        Args:
            budget_bytes: The budget, resident bytes included. [bytes]
            excess_bytes: Position -> bytes, counted in all of its stage; -1 is the entry of the
                backward, -2 the forward. [bytes]
        """
        worst: dict[int, int] = {}
        for position, size_bytes in excess_bytes.items():
            stage = self.of[position] if position >= 0 else position
            worst[stage] = max(worst.get(stage, 0), size_bytes)
        for position, row, fixed_bytes in self.rows:
            stage = self.of[position] if position >= 0 else position
            left_bytes = budget_bytes - fixed_bytes - worst.get(stage, 0)
            self.program.cap(row, self.scale.down(left_bytes))

    def fix(self, saved: Mapping[int, bool]) -> None:
        """Fix s_u of some storages, free all others."""
        for g, s in self.s.items():
            low, high = (1.0 if g in self.needs.kept else 0.0), 1.0
            if g in saved:
                low = high = max(low, float(saved[g]))
            self.program.bound(s, low, high)

    def relax(self, *, time_limit_s: float) -> Relaxation | None:
        """Solve the relaxation.

        Args:
            time_limit_s: A safety net. [s]

        Returns:
            s_u of each candidate, between 0 and 1, and the time; None when nothing is within the
            budget.
        """
        wanted = list(self.s.values())
        answer = self.program.relax(wanted, time_limit_s=time_limit_s)
        if answer is None:
            return None
        fractions = {g: answer.values[s] for g, s in self.s.items()}
        return Relaxation(fractions, answer.bound * self.scale.unit_ns)

    def solve(
        self,
        *,
        time_limit_s: float,
        node_limit: int = 100,
        relative_gap: float = 1e-3,
        hint: Collection[int] | None = None,
    ) -> Selection | None:
        """Solve it.

        Args:
            time_limit_s: A safety net; ``node_limit`` is what ends a long search. [s]
            node_limit: Nodes of branch and bound.
            relative_gap: Where to stop.
            hint: Storages saved in a known solution.

        Returns:
            The best selection found; None when there is none.
        """
        known = None if hint is None else set(hint)
        runs = {r: pieces[-1] for r, pieces in self.y.items()}
        answer = self.program.solve(
            [*self.s.values(), *runs.values(), *self.z.values()],
            time_limit_s=time_limit_s,
            node_limit=node_limit,
            relative_gap=relative_gap,
            hint={} if known is None else {s: float(g in known) for g, s in self.s.items()},
        )
        if answer is None:
            return None
        values = answer.values
        replays = frozenset(r for r, y in runs.items() if _flag(values[y]))
        recompute_ns = sum(self.problem.replays[r].cost_ns for r in replays)
        recompute_ns -= sum(
            self.problem.operations[f].cost_ns for f, z in self.z.items() if values[z] < 0.5
        )
        saved = frozenset(g for g, s in self.s.items() if _flag(values[s]))
        return Selection(saved | self.held, replays, recompute_ns)


def _plus(variables: Collection[int]) -> list[Term]:
    """Their sum."""
    return [(variable, 1.0) for variable in variables]


def _flag(value: float) -> bool:
    """A 0/1 answer as a truth value, after checking that it is one."""
    if min(abs(value), abs(value - 1.0)) > _INTEGRAL:
        raise SolverError(f"HiGHS gave {value} for a variable that is 0 or 1")
    return value > 0.5
