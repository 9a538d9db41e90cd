r"""The residency model: which values to save and when to replay the others, as an integer program.

The backward is cut into stages k = 0 .. K-1. With :math:`b_u` the bytes of storage u, :math:`c_r` the
time of replay r (both scaled by ``_scale``: bytes rounded up, the budget rounded down):

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

import datetime
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ortools.math_opt.python import mathopt

from fxremat.errors import SolverError
from fxremat.problem import RematProblem
from fxremat.solvers.needs import Needs, find_needs
from fxremat.solvers.stages import Stages, windows

_STATUS = mathopt.TerminationReason
_NOTHING = (_STATUS.INFEASIBLE, _STATUS.INFEASIBLE_OR_UNBOUNDED, _STATUS.NO_SOLUTION_FOUND)
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


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers that a solver can work with.

    Attributes:
        unit_bytes: One unit of memory. [bytes]
        grain_bytes: Sizes are rounded up, the budget down, to a multiple of it. [bytes]
        unit_ns: One unit of time. [ns]
    """

    unit_bytes: int
    grain_bytes: int
    unit_ns: float

    def up(self, size_bytes: int) -> float:
        """Bytes in units, rounded up."""
        return -(-size_bytes // self.grain_bytes) * self.grain_bytes / self.unit_bytes

    def down(self, size_bytes: int) -> float:
        """Bytes in units, rounded down."""
        return size_bytes // self.grain_bytes * self.grain_bytes / self.unit_bytes


def _scale(problem: RematProblem, budget_bytes: int) -> Scale:
    """Units in which a budget is about a thousand and all replays together cost a thousand."""
    unit_bytes = 2 ** max(0, budget_bytes.bit_length() - 10)
    total_ns = sum(replay.cost_ns for replay in problem.replays)
    return Scale(unit_bytes, max(1, unit_bytes // 4096), max(1, total_ns) / 1000)


def _limit(time_limit_s: float) -> datetime.timedelta:
    """As MathOpt wants it; 0 would mean none."""
    return datetime.timedelta(seconds=max(0.01, time_limit_s))


class Residency:
    """The model of one problem and one cut; budget and excess can change between solves."""

    def __init__(
        self, problem: RematProblem, stages: Stages, budget_bytes: int, *, reach: int = 6
    ) -> None:
        self.problem, self.stages = problem, stages
        self.needs: Needs = find_needs(problem)
        self.scale = _scale(problem, budget_bytes)
        self.of = stages.of()
        self.model = mathopt.Model(name="residency")
        self.windows = windows(problem, self.needs, stages, reach)
        self.s: dict[int, mathopt.Variable] = {}
        self.y: dict[int, list[mathopt.Variable]] = {}
        self.m: dict[tuple[int, int], list[mathopt.Variable]] = {}
        self.h: dict[tuple[int, tuple[tuple[int, ...], ...]], mathopt.Variable] = {}
        self.z: dict[int, mathopt.Variable] = {}
        self.held = frozenset(self.needs.kept - set(self.needs.candidates))
        self.settled = {g: self._settled(g) for g in self.needs.candidates}
        self.rows: list[tuple[int, mathopt.LinearConstraint, int]] = []
        self._variables()
        self._reads()
        self._monotone()
        self._inputs()
        self._backward_rows()
        self._forward_rows()
        self._optional()
        self._objective()
        self.restrict(budget_bytes, {})

    # Variables ------------------------------------------------------------------------------

    def _variables(self) -> None:
        """s, y and m."""
        for g in self.needs.candidates:
            low = 1.0 if g in self.needs.kept else 0.0
            self.s[g] = self.model.add_variable(lb=low, ub=1.0, is_integer=True, name=f"s{g}")
        for r, window in enumerate(self.windows):
            if window is None:
                continue
            self.y[r] = [
                self.model.add_variable(lb=0.0, ub=1.0, is_integer=True, name=f"y{r}_{end}")
                for end in window.ends
            ]
            for g in self.problem.replays[r].creates:
                several = (
                    len(self.problem.replays[r].creates) > 1 or len(self.problem.replays_of[g]) > 1
                )
                if not several or g not in self.s:
                    self.m[r, g] = self.y[r]
                    continue
                parts = [
                    self.model.add_variable(lb=0.0, ub=1.0, name=f"m{r}_{g}_{end}")
                    for end in window.ends
                ]
                for part, whole in zip(parts, self.y[r], strict=True):
                    self._row(-math.inf, 0.0, [(part, 1.0), (whole, -1.0)])
                self.m[r, g] = parts

    def _row(
        self, low: float, high: float, terms: list[tuple[mathopt.Variable, float]]
    ) -> mathopt.LinearConstraint:
        """low <= sum of terms <= high; a variable may occur twice."""
        row = self.model.add_linear_constraint(lb=low, ub=high)
        total: dict[mathopt.Variable, float] = {}
        for variable, factor in terms:
            total[variable] = total.get(variable, 0.0) + factor
        for variable, factor in total.items():
            if factor:
                row.set_coefficient(variable, factor)
        return row

    def _run(self, r: int, stage: int) -> list[mathopt.Variable]:
        """y_{r,stage}: one variable, or none where it is 0."""
        window = self.windows[r]
        if window is None:
            return []
        piece = window.pieces[stage]
        return [] if piece < 0 else [self.y[r][piece]]

    def _made(self, g: int, stage: int) -> list[mathopt.Variable]:
        """The terms of sum_r m_{r,g,stage}."""
        found: list[mathopt.Variable] = []
        for r in self.problem.replays_of.get(g, ()):
            window = self.windows[r]
            if window is not None and window.pieces[stage] >= 0:
                found.append(self.m[r, g][window.pieces[stage]])
        return found

    # Constraints ----------------------------------------------------------------------------

    def _reads(self) -> None:
        """1. A value is kept or made again, and is there when the backward first reads it."""
        for g, s in self.s.items():
            made = self._made(g, len(self.stages) - 1)
            if made:
                self._row(-math.inf, 1.0, [(s, 1.0), *((part, 1.0) for part in made)])
            if self.needs.positions.get(g) and g not in self.needs.kept:
                made = self._made(g, self.of[self.needs.first(g)])
                self._row(1.0, math.inf, [(s, 1.0), *((part, 1.0) for part in made)])

    def _monotone(self) -> None:
        """2. A replay runs once, stays run, and makes things when it runs."""
        for pieces in (*self.y.values(), *self.m.values()):
            for earlier, later in zip(pieces, pieces[1:], strict=False):
                self._row(-math.inf, 0.0, [(earlier, 1.0), (later, -1.0)])
        for (r, _), parts in self.m.items():
            if parts is self.y[r]:
                continue
            for part, whole in zip(parts[:-1], self.y[r][:-1], strict=True):
                terms = [(part, 1.0), (parts[-1], -1.0), (whole, -1.0), (self.y[r][-1], 1.0)]
                self._row(0.0, math.inf, terms)

    def _inputs(self) -> None:
        """3. A replay finds what it reads."""
        for q, window in enumerate(self.windows):
            if window is None:
                continue
            for u in self.problem.replays[q].reads:
                if u not in self.s or u in self.needs.kept:
                    continue
                seen: set[tuple[int, ...]] = set()
                for stage in self._changes(q, u):
                    runs, made = self._run(q, stage), self._made(u, stage)
                    key = tuple(v.id for v in (*runs, *made))
                    if not runs or key in seen:
                        continue
                    seen.add(key)
                    terms = [(self.s[u], 1.0), *((part, 1.0) for part in made), (runs[0], -1.0)]
                    self._row(0.0, math.inf, terms)

    def _changes(self, q: int, u: int) -> list[int]:
        """Stages at which q's or u's variables change."""
        found: set[int] = set()
        for r in (q, *self.problem.replays_of.get(u, ())):
            window = self.windows[r]
            if window is not None:
                found.update(window.ends)
        return sorted(found | {len(self.stages) - 1})

    def _settled(self, g: int) -> int:
        """Stage from which on no replay can read g any more."""
        ends = [self.windows[q] for q in self.needs.consumers.get(g, ())]
        return max((window.ends[-1] for window in ends if window is not None), default=-1)

    def _holds(self, g: int, stage: int) -> list[mathopt.Variable]:
        """4. h_{g,stage} with its rows, or nothing when no later replay can need g."""
        if stage - 1 >= self.settled[g]:
            return []
        last = len(self.stages) - 1
        total = self._made(g, last)
        rows: dict[tuple[int, ...], list[tuple[mathopt.Variable, float]]] = {}
        for at in {max(stage - 1, -1), stage}:
            made = self._made(g, at)
            later = (
                [] if total == made else [*((v, 1.0) for v in total), *((v, -1.0) for v in made)]
            )
            for q in self.needs.consumers.get(g, ()):
                done, runs = self._run(q, at), self._run(q, last)
                if runs and runs != done:
                    terms = [(runs[0], -1.0), *((v, 1.0) for v in done), *later]
                    rows[tuple(v.id for v, _ in terms)] = terms
        if not rows:
            return []
        key = (g, tuple(sorted(rows)))
        if key not in self.h:
            self.h[key] = self.model.add_variable(lb=0.0, ub=1.0, name=f"h{g}_{stage}")
            for terms in rows.values():
                self._row(0.0, math.inf, [(self.h[key], 1.0), *terms])
        return [self.h[key]]

    def _present(self, g: int, position: int) -> list[mathopt.Variable]:
        """Terms that say whether g is held at a position; -1 is the entry of the backward."""
        stage = self.of[position] if position >= 0 else -1
        if self.needs.last(g) >= position and self.needs.positions.get(g):
            return [self.s[g], *self._made(g, stage)]
        return self._holds(g, stage)

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
        terms: list[tuple[mathopt.Variable, float]] = []
        for g in self.s:
            size = self.scale.up(self.problem.storages[g].size_bytes)
            terms.extend((v, size) for v in self._present(g, position))
        self._limit(position, terms, fixed_bytes)

    def _limit(
        self, position: int, terms: list[tuple[mathopt.Variable, float]], fixed_bytes: int
    ) -> None:
        """A row of bytes; every forward in flight holds the saved values once more."""
        for g, s in self.s.items():
            again = (self.problem.in_flight - 1) * self.problem.storages[g].size_bytes
            if again:
                terms.append((s, self.scale.up(again)))
        self.rows.append((position, self._row(-math.inf, math.inf, terms), fixed_bytes))

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
            self.z[f] = self.model.add_variable(lb=0.0, ub=1.0, name=f"z{f}")
            for u in self.problem.operations[f].reads:
                readers.setdefault(u, []).append(f)
        for f, z in self.z.items():
            for g in self.problem.operations[f].creates:
                if g in self.s:
                    self._row(0.0, math.inf, [(z, 1.0), (self.s[g], -1.0)])
                for q in readers.get(g, ()):
                    self._row(0.0, math.inf, [(z, 1.0), (self.z[q], -1.0)])

    def _objective(self) -> None:
        """Time of the replays, less that of forward operations that need not run."""
        unit_ns = self.scale.unit_ns
        total = mathopt.LinearSum(
            self.problem.replays[r].cost_ns / unit_ns * pieces[-1] for r, pieces in self.y.items()
        )
        skipped = mathopt.LinearSum(
            self.problem.operations[f].cost_ns / unit_ns * (z - 1.0) for f, z in self.z.items()
        )
        self.model.minimize(total + skipped)

    # Solving --------------------------------------------------------------------------------

    def restrict(self, budget_bytes: int, excess_bytes: Mapping[int, int]) -> None:
        """Set the budget, and what chains of replays hold besides the model.

        Args:
            budget_bytes: The budget, resident bytes included. [bytes]
            excess_bytes: Position -> bytes, counted from there to the end of its stage; -1 is the
                entry of the backward, -2 the forward. [bytes]
        """
        worst: dict[int, int] = {}
        for position, size_bytes in excess_bytes.items():
            stage = self.of[position] if position >= 0 else position
            worst[stage] = max(worst.get(stage, 0), size_bytes)
        for position, row, fixed_bytes in self.rows:
            stage = self.of[position] if position >= 0 else position
            row.upper_bound = self.scale.down(budget_bytes - fixed_bytes - worst.get(stage, 0))

    def fix(self, saved: Mapping[int, bool]) -> None:
        """Fix s_u of some storages, free all others."""
        for g, s in self.s.items():
            low = 1.0 if g in self.needs.kept else 0.0
            s.lower_bound, s.upper_bound = low, 1.0
            if g in saved:
                s.lower_bound = s.upper_bound = max(low, float(saved[g]))

    def relax(self, *, time_limit_s: float) -> Relaxation | None:
        """Solve the relaxation.

        Args:
            time_limit_s: A safety net. [s]

        Returns:
            s_u of each candidate, between 0 and 1, and the time; None when nothing is within the
            budget.
        """
        integers = [v for v in (*self.s.values(), *self._all_y()) if v.integer]
        for variable in integers:
            variable.integer = False
        result = self._run_solver(mathopt.SolveParameters(time_limit=_limit(time_limit_s)), None)
        for variable in integers:
            variable.integer = True
        if result is None:
            return None
        total = sum(
            self.problem.replays[r].cost_ns * result[pieces[-1]] for r, pieces in self.y.items()
        )
        total -= sum(
            self.problem.operations[f].cost_ns * (1.0 - result[z]) for f, z in self.z.items()
        )
        return Relaxation({g: result[s] for g, s in self.s.items()}, total)

    def _all_y(self) -> list[mathopt.Variable]:
        return [variable for pieces in self.y.values() for variable in pieces]

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
        parameters = mathopt.SolveParameters(
            time_limit=_limit(time_limit_s),
            node_limit=node_limit,
            relative_gap_tolerance=relative_gap,
            random_seed=0,
        )
        values = self._run_solver(parameters, hint)
        return None if values is None else self._selection(values)

    def _run_solver(
        self, parameters: mathopt.SolveParameters, hint: Collection[int] | None
    ) -> dict[mathopt.Variable, float] | None:
        """Run HiGHS and read its status."""
        extra = mathopt.ModelSolveParameters()
        if hint is not None:
            kept = set(hint)
            values = {s: float(g in kept) for g, s in self.s.items()}
            extra.solution_hints.append(mathopt.SolutionHint(variable_values=values))
        result = mathopt.solve(
            self.model, mathopt.SolverType.HIGHS, params=parameters, model_params=extra
        )
        reason = result.termination.reason
        if reason in (_STATUS.OPTIMAL, _STATUS.FEASIBLE):
            return result.variable_values()
        if reason in _NOTHING:
            return None
        raise SolverError(f"HiGHS ended with {reason.name}: {result.termination.detail}")

    def _selection(self, values: Mapping[mathopt.Variable, float]) -> Selection:
        """Round a 0/1 answer, after checking that it is one."""
        saved = frozenset(g for g, s in self.s.items() if self._flag(values[s])) | self.held
        replays = frozenset(r for r, pieces in self.y.items() if self._flag(values[pieces[-1]]))
        recompute_ns = sum(self.problem.replays[r].cost_ns for r in replays)
        recompute_ns -= sum(
            self.problem.operations[f].cost_ns for f, z in self.z.items() if values[z] < 0.5
        )
        return Selection(saved, replays, recompute_ns)

    def _flag(self, value: float) -> bool:
        if min(abs(value), abs(value - 1.0)) > _INTEGRAL:
            raise SolverError(f"HiGHS gave {value} for a variable that is 0 or 1")
        return value > 0.5
