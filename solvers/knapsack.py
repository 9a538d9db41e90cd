"""Torch's selector for ``activation_memory_budget``, on our problem.

What it does there: a fraction of the activation bytes is given, from 0 (keep only the inputs) to 1
(keep what a minimum cut keeps that recomputes only what is nearly free). In between, a 0/1 knapsack
picks among the values that are dear to recompute: its weights are their bytes, its values their own
runtimes, each as if its inputs were there. A last minimum cut over bytes then saves what the
backward cannot be made of without recomputing a picked value. (``choose_saved_values_set`` in
``torch/_functorch/partitioners.py``.)

Here, everything that may be replayed is an item, since all replays are priced by measurement and
none counts as free; whatever has no replay is kept, as a banned value is there. Bytes are rounded
to a 10,000th of all items, as there. A fraction limits saved bytes, not the peak, so the largest
fraction is taken whose plan is within the budget in the simulator: the first on a fixed scan from 1
downwards, in coarse steps and then, above the one that fits, in fine ones.
"""

from collections.abc import Collection
from functools import partial

from ortools.graph.python import max_flow

from fxremat.plans import Solution
from fxremat.problem import RematProblem
from fxremat.schedule import expand
from fxremat.simulate import Schedule, simulate
from fxremat.solvers.linear import LinearProgram
from fxremat.solvers.needs import find_needs
from fxremat.solvers.search import Clock

_GRAIN = 10_000  # units that all items weigh together
_STEPS = 16  # coarse steps, and fine ones in each
_NODES = 1000
_GAP = 1e-4  # of the runtime that one knapsack may leave


class Selector:
    """Picks what to save for a fraction of the bytes of all items."""

    def __init__(self, problem: RematProblem) -> None:
        self.problem = problem
        self.needs = find_needs(problem)
        self.items = [
            g
            for g in self.needs.candidates
            if g in problem.replays_of and g not in self.needs.kept and not problem.storages[g].lazy
        ]
        total_bytes = max(1, sum(problem.storages[g].size_bytes for g in self.items))
        ways = ((g, problem.replays_of[g]) for g in self.items)
        runtimes = [min(problem.replays[way].cost_ns for way in found) for _, found in ways]
        unit_ns = max([1, *runtimes]) / 1000
        self.program = LinearProgram()
        self.taken = [self.program.variable(whole=True) for _ in self.items]
        self.limit = self.program.at_most(
            0.0,
            (
                (variable, round(problem.storages[g].size_bytes / total_bytes * _GRAIN))
                for variable, g in zip(self.taken, self.items, strict=True)
            ),
        )
        self.program.cost(
            (variable, -runtime / unit_ns)
            for variable, runtime in zip(self.taken, runtimes, strict=True)
        )

    def pick(self, fraction: float, clock: Clock) -> frozenset[int]:
        """Items that the knapsack takes."""
        if not self.items:
            return frozenset()
        self.program.cap(self.limit, float(round(fraction * _GRAIN)))
        answer = self.program.solve(
            self.taken,
            time_limit_s=clock.left_s(),
            node_limit=_NODES,
            relative_gap=_GAP,
            hint={},
        )
        if answer is None:
            return frozenset()
        pairs = zip(self.taken, self.items, strict=True)
        return frozenset(g for variable, g in pairs if answer.values[variable] > 0.5)

    def schedule(self, fraction: float, clock: Clock) -> Schedule:
        """The plan of a fraction."""
        return expand(self.problem, cut(self.problem, self.pick(fraction, clock)))


def cut(problem: RematProblem, picked: Collection[int]) -> frozenset[int]:
    """The fewest bytes from which the backward can be made without replaying some values.

    A minimum cut between the values that must come from the forward and those that the backward
    reads: a value is an edge of as many units as it has bytes, a replay leads from what it reads to
    what it makes.

    Args:
        problem: The step.
        picked: Values not to replay; those that cannot be replayed are added.

    Returns:
        What to save.
    """
    needs = find_needs(problem)
    values = [*needs.candidates, *(g for g in needs.kept if g not in needs.candidates)]
    number = {g: 2 * index + 2 for index, g in enumerate(sorted(values))}
    source, sink = 0, 1
    endless = 1 + sum(problem.storages[g].size_bytes for g in number)
    flow = max_flow.SimpleMaxFlow()
    add = flow.add_arc_with_capacity
    for g, node in number.items():
        add(node, node + 1, 0 if g in needs.kept else problem.storages[g].size_bytes)
        if needs.positions.get(g):
            add(node + 1, sink, endless)
        if g in needs.kept or g in picked or g not in problem.replays_of:
            add(source, node, endless)
            continue
        for u in problem.replays[problem.replays_of[g][0]].reads:
            if u in number:
                add(number[u] + 1, node, endless)
    if flow.solve(source, sink) != flow.OPTIMAL:
        return frozenset(number)
    reached = set(flow.get_source_side_min_cut())
    crossing = (g for g, node in number.items() if node in reached and node + 1 not in reached)
    return needs.kept | frozenset(crossing)


def knapsack(problem: RematProblem, budget_bytes: int, *, time_limit_s: float) -> Solution:
    """Save what torch's selector would, for the largest fraction that fits.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        time_limit_s: When to stop scanning; the best so far comes back. [s]

    Returns:
        The plan of the largest fraction on the scan that is within the budget.
    """
    clock = Clock(time_limit_s)
    schedule = partial(Selector(problem).schedule, clock=clock)
    best: tuple[int, Schedule] | None = None
    scan = [_STEPS * step for step in range(_STEPS, -1, -1)]
    while scan and not clock.up():
        number = scan.pop(0)
        found = schedule(number / _STEPS**2)
        if simulate(problem, found).peak_bytes > budget_bytes:
            continue
        fine = range(number + _STEPS - 1, number, -1)
        coarse = best is None and number < _STEPS**2
        best = number, found
        scan = list(fine) if coarse else []
    if best is None:
        words = "the time limit has passed" if clock.up() else "no fraction fits"
        return Solution(None, message=words)
    return Solution(best[1], message=f"{best[0] / _STEPS**2:.2%} of the bytes that can be replayed")
