"""Plans the benchmark problems at budgets down to the floor, beside the other solvers.

For each problem: the floor with the time to find it, then plans at equal steps of the way from the
floor to the baseline. A plan shows its extra time, how much of it may still be won by its bound,
and how long it took. Each other solver gets the same budget; as a rule its plan holds less than
that, so fxremat plans for the peak of that plan too, and the two are compared there.

    python examples/benchmarks/planner.py
    python examples/benchmarks/planner.py --only resnet50 lstm-128 --parts 4 --others greedy rotor
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner_problems import problem_of, problem_options
from tabulate import tabulate

import fxremat
from fxremat.errors import InfeasibleBudgetError
from fxremat.planning import floor_plan, save_all_peak_bytes
from fxremat.plans import Plan
from fxremat.problem import RematProblem

MIB = 1024**2
OTHERS = ("block", "greedy", "sqrt", "knapsack", "rotor")
HEADERS = (
    "problem", "joint nodes", "way up", "budget MiB", "solver", "extra time", "may be won", "by",
    "solved in",
)  # fmt: skip
AGAINST = ("problem", "budget MiB", "other", "its peak MiB", "its extra time", "fxremat's there")


@dataclass(frozen=True)
class Timed:
    """A plan, and the seconds that it took.

    Attributes:
        plan: None where there is none within the budget.
        wall_s: [s]
    """

    plan: Plan | None
    wall_s: float


def timed(problem: RematProblem, budget_bytes: int, solver: str = "auto") -> Timed:
    """Plan once, and look at the clock."""
    start_s = time.perf_counter()
    plan: Plan | None = None
    with contextlib.suppress(InfeasibleBudgetError):
        plan = fxremat.plan(problem, budget_bytes, solver=solver)
    return Timed(plan, time.perf_counter() - start_s)


def share(plan: Plan) -> str:
    """Extra time of a plan, of the unrewritten step."""
    return f"{plan.recompute_ns / plan.problem.step_ns:.2%}"


def line(name: str, nodes: int, way: str, found: Timed) -> tuple[str, ...]:
    """A plan as a line of the table."""
    plan = found.plan
    if plan is None:
        return (name, f"{nodes:,}", way, "", "none", "", "", "", f"{found.wall_s:.1f} s")
    gap = f"{plan.gap:.2%}" if plan.bound_class else ""
    return (
        name, f"{nodes:,}", way, f"{plan.budget_bytes / MIB:,.1f}", plan.solver, share(plan), gap,
        plan.bound_class, f"{found.wall_s:.1f} s",
    )  # fmt: skip


def compared(
    name: str, problem: RematProblem, budget_bytes: int, others: Sequence[str]
) -> Iterator[tuple[tuple[str, ...], bool]]:
    """The other solvers at a budget, and fxremat at the peaks of their plans; is it as cheap?"""
    known: dict[int, Timed] = {}
    for other in others:
        theirs = timed(problem, budget_bytes, other).plan
        if theirs is None:
            continue
        peak_bytes = theirs.peak_bytes
        if peak_bytes not in known:
            known[peak_bytes] = timed(problem, peak_bytes)
        mine = known[peak_bytes].plan
        good = mine is not None and mine.recompute_ns <= theirs.recompute_ns
        yield (
            name, f"{budget_bytes / MIB:,.1f}", other, f"{peak_bytes / MIB:,.1f}", share(theirs),
            "none" if mine is None else share(mine) + ("" if good else " !"),
        ), good  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = problem_options(__doc__)
    parser.add_argument("--others", nargs="*", choices=OTHERS, default=OTHERS, metavar="SOLVER")
    parser.add_argument("--parts", type=int, default=5, help="of the way from floor to baseline")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, compare, print. 1 where another solver was cheaper."""
    options = parse(arguments)
    rows: list[tuple[str, ...]] = []
    against: list[tuple[str, ...]] = []
    times: list[tuple[int, tuple[str, ...]]] = []
    beaten = 0
    for name in options.only:
        problem, facts = problem_of(name, options.folder)
        nodes = facts.nodes or len(problem.operations)
        start_s = time.perf_counter()
        least = floor_plan(problem)
        rows.append(line(name, nodes, "floor", Timed(least, time.perf_counter() - start_s)))
        seconds = [least.solve_s]
        span_bytes = save_all_peak_bytes(problem) - least.peak_bytes
        for part in range(options.parts):
            budget_bytes = least.peak_bytes + span_bytes * part // options.parts
            found = timed(problem, budget_bytes)
            rows.append(line(name, nodes, f"{part / options.parts:.0%}", found))
            seconds.append(found.wall_s)
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
            for row, good in compared(name, problem, budget_bytes, options.others):
                print(*row, sep="  ", file=sys.stderr, flush=True)
                against.append(row)
                beaten += not good
        times.append((nodes, (name, f"{nodes:,}", *(f"{s:.1f}" for s in seconds))))
    print(tabulate(rows, HEADERS, disable_numparse=True))
    ways = (f"at {part / options.parts:.0%}" for part in range(options.parts))
    print("\nSeconds by size: to find the floor, and to plan at so much of the way up from it.\n")
    by_size = [cells for _, cells in sorted(times)]
    print(tabulate(by_size, ("problem", "joint nodes", "floor", *ways), disable_numparse=True))
    print()
    print(tabulate(against, AGAINST, disable_numparse=True))
    print(f"\n{beaten} of {len(against)} plans of other solvers are cheaper than fxremat's there")
    return int(beaten > 0)


if __name__ == "__main__":
    sys.exit(main())
