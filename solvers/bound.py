r"""A proven bound on the extra time, for plans with one replay per operation in the given order.

A relaxation of what every such plan must satisfy. Variables: x_g, the first backward read of g
takes the copy that the forward made; y_r, replay r runs; s_u, the forward's copy of u lives past
the start of the backward. With b bytes, c time, first(g) and last(g) the positions that read g:

    min  sum_r c_r y_r - sum_f c_f (1 - z_f)

1. A value comes from the forward or from a replay -> ``_sources``
       x_g + sum_{r makes g} y_r >= 1 for g read by the backward,  x_g <= s_g
2. A replay finds what it reads -> ``_inputs``
       s_u + sum_{r makes u} y_r >= y_q
3. At the entry of the backward all kept copies are held -> ``_entry``
       fixed + sum_u b_u s_u <= budget
4. While position p runs, what it reads is held, and what a later first read takes from the forward;
   between its first and last read a value may be absent only if it was kept and is replayed again
   -> ``_positions``
       fixed_p + sum_{read at p} b_g + sum_{first > p} b_g x_g
               + sum_{first < p < last} b_g (2 - x_g - sum_r y_r)  <=  budget
5. Kept copies pile up over the forward -> ``_forward``
6. Optional forward operations run if kept or read: z_f >= s_g, z_f >= z_q -> ``_optional``

Replays may stand anywhere: no row depends on it. All variables are relaxed to [0, 1], so the
optimum of the linear program is below that of every plan of the class.
"""

import math

from fxremat.problem import RematProblem
from fxremat.solvers.linear import LinearProgram, Term
from fxremat.solvers.needs import Needs, find_needs

BOUND_CLASS = "one replay per operation, given order"


class _Relaxation:
    """The linear program of one problem and budget."""

    def __init__(self, problem: RematProblem, budget_bytes: int) -> None:
        self.problem, self.budget_bytes = problem, budget_bytes
        self.needs: Needs = find_needs(problem)
        self.program = LinearProgram()
        self.unit_bytes = 1 << max(0, budget_bytes.bit_length() - 10)
        self.unit_ns = max(1, sum(r.cost_ns for r in problem.replays)) / 1000
        new = self.program.variable
        kept = self.needs.kept
        self.s = {g: new(float(g in kept)) for g in self.needs.candidates}
        self.x = {
            g: new(float(g in kept)) for g in self.needs.candidates if self.needs.positions.get(g)
        }
        self.y = [new() for _ in problem.replays]
        self.z = {f: new() for f in self.needs.optional}
        self._sources()
        self._inputs()
        self._entry()
        self._positions()
        self._forward()
        self._optional()
        for r, y in zip(problem.replays, self.y, strict=True):
            self.program.cost([(y, r.cost_ns / self.unit_ns)])
        for f, z in self.z.items():
            cost = problem.operations[f].cost_ns / self.unit_ns
            self.program.cost([(z, cost)], offset=-cost)

    def _size(self, g: int) -> float:
        return self.problem.storages[g].size_bytes / self.unit_bytes

    def _again(self) -> list[Term]:
        """Every other forward in flight holds its kept copies."""
        flights = self.problem.in_flight - 1
        return [(s, flights * self._size(g)) for g, s in self.s.items()] if flights else []

    def _limit(self, terms: list[Term], fixed_bytes: int) -> None:
        if terms:
            self.program.at_most((self.budget_bytes - fixed_bytes) / self.unit_bytes, terms)

    def _makers(self, g: int) -> list[Term]:
        return [(self.y[r], 1.0) for r in self.problem.replays_of.get(g, ())]

    def _sources(self) -> None:
        """1. A value comes from the forward or from a replay."""
        for g, x in self.x.items():
            self.program.at_least(1.0, [(x, 1.0), *self._makers(g)])
            self.program.at_most(0.0, [(x, 1.0), (self.s[g], -1.0)])

    def _inputs(self) -> None:
        """2. A replay finds what it reads."""
        for q, replay in enumerate(self.problem.replays):
            for u in replay.reads:
                if u in self.s:
                    self.program.at_least(
                        0.0, [(self.s[u], 1.0), *self._makers(u), (self.y[q], -1.0)]
                    )

    def _entry(self) -> None:
        """3. At the entry of the backward all kept copies are held."""
        terms = [(s, self._size(g)) for g, s in self.s.items()]
        self._limit(terms + self._again(), self.needs.entry_bytes)

    def _positions(self) -> None:
        """4. What is held while each position runs; what is still to come is summed once."""
        needs = self.needs
        starting: dict[int, list[int]] = {}
        for g in self.x:
            starting.setdefault(needs.first(g), []).append(g)
        later = self.program.variable(0.0, math.inf)
        self.program.at_least(0.0, [(later, 1.0)])
        for position in reversed(range(needs.num_positions + 1)):
            terms: list[Term] = [(later, 1.0)]
            fixed_bytes = needs.fixed_bytes[position]
            for g, x in self.x.items():
                if not needs.first(g) <= position <= needs.last(g):
                    continue
                if position in needs.positions[g]:
                    fixed_bytes += self.problem.storages[g].size_bytes
                else:
                    size = self._size(g)
                    fixed_bytes += 2 * self.problem.storages[g].size_bytes
                    terms += [(x, -size), *((y, -size) for y, _ in self._makers(g))]
            self._limit(terms + self._again(), fixed_bytes)
            if position in starting:
                total = self.program.variable(0.0, math.inf)
                more = [(self.x[g], -self._size(g)) for g in starting[position]]
                self.program.at_least(0.0, [(total, 1.0), (later, -1.0), *more])
                later = total

    def _forward(self) -> None:
        """5. Kept copies pile up over the forward."""
        highest = -1
        for index in reversed(range(self.problem.num_forward)):
            fixed_bytes = self.needs.forward_bytes[index]
            if fixed_bytes > highest:
                highest = fixed_bytes
                terms = [
                    (s, self._size(g))
                    for g, s in self.s.items()
                    if self.needs.forward_last[g] < index
                ]
                self._limit(terms + self._again(), fixed_bytes)

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


def bound_ns(problem: RematProblem, budget_bytes: int, *, time_limit_s: float) -> int | None:
    """Bound the extra time of every plan of ``BOUND_CLASS`` within a budget.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        time_limit_s: For the linear program. [s]

    Returns:
        The bound, a little below the program's optimum for the solver's tolerance [ns]; None when
        it was not solved.
    """
    relaxation = _Relaxation(problem, budget_bytes)
    answer = relaxation.program.relax((), time_limit_s=time_limit_s)
    if answer is None or not answer.optimal:
        return None
    tolerance = 1e-5 * max(1.0, abs(answer.bound))
    return math.floor((answer.bound - tolerance) * relaxation.unit_ns)
