"""Draws what time buys which peak: the frontier of problems beside the plans of other solvers.

For each problem: so many plans from the baseline to the floor, with the time for all of them, and
what the other solvers give for the same budgets. Peaks are above what is resident anyway.

    python examples/benchmarks/planner_frontier.py
    python examples/benchmarks/planner_frontier.py --only gpt2-12 --points 16 --picture gpt2.png
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from planner_problems import problem_of, problem_options
from tabulate import tabulate

import fxremat
from fxremat.errors import InfeasibleBudgetError
from fxremat.plans import Plan
from fxremat.problem import RematProblem

SHOWN = ("gpt2-12", "t5-small", "unet", "resnet50", "lstm-128", "residual-mlp-256")
OTHERS = {"block": "s", "greedy": "v", "sqrt": "D", "knapsack": "^", "rotor": "x"}
COLUMNS = 3
HEADERS = (
    "problem", "joint nodes", "points", "all in s", "baseline MiB", "half way: extra time",
    "floor MiB", "at the floor: extra time", "largest gap",
)  # fmt: skip
MIB = 1024**2


@dataclass(frozen=True)
class Frontier:
    """The plans of one problem, and how long they took.

    Attributes:
        name: The problem's.
        nodes: Of its joint graph.
        plans: From the baseline to the floor.
        others: Solver -> its plans within the same budgets.
        wall_s: For all plans of the frontier. [s]
    """

    name: str
    nodes: int
    plans: list[Plan]
    others: dict[str, list[Plan]]
    wall_s: float


def frontier_of(name: str, folder: Path, points: int, solvers: Sequence[str]) -> Frontier:
    """Plan one problem at all points."""
    problem, facts = problem_of(name, folder)
    start_s = time.perf_counter()
    plans = fxremat.frontier(problem, points)
    wall_s = time.perf_counter() - start_s
    others = {solver: others_of(problem, plans, solver) for solver in solvers}
    return Frontier(name, facts.nodes, plans, others, wall_s)


def others_of(problem: RematProblem, plans: Sequence[Plan], solver: str) -> list[Plan]:
    """Another solver's plans within the peaks of the frontier's, where it has one."""
    found = []
    for plan in plans:
        with contextlib.suppress(InfeasibleBudgetError):
            found.append(fxremat.plan(problem, plan.peak_bytes, solver=solver))
    return found


def extra(plan: Plan) -> float:
    """Extra time, of the unrewritten step. [per cent]"""
    return 100 * plan.recompute_ns / plan.problem.step_ns


def row(found: Frontier) -> tuple[str, ...]:
    """One line of the table."""
    first, last = found.plans[0], found.plans[-1]
    middle_bytes = (first.peak_bytes + last.peak_bytes) // 2
    middle = next(plan for plan in found.plans if plan.peak_bytes <= middle_bytes)
    gaps = [f"{plan.gap:.2%} ({plan.bound_class})" for plan in found.plans if plan.bound_class]
    return (
        found.name, f"{found.nodes:,}", str(len(found.plans)), f"{found.wall_s:.1f}",
        f"{first.peak_bytes / MIB:,.1f}", f"{extra(middle):.2f} %",
        f"{last.peak_bytes / MIB:,.1f}", f"{extra(last):.2f} %",
        max(gaps, key=lambda gap: float(gap.partition("%")[0]), default=""),
    )  # fmt: skip


def draw(found: Sequence[Frontier], picture: Path) -> None:
    """All problems in one picture, one field each."""
    mpl.use("Agg")
    from matplotlib import pyplot

    columns = min(COLUMNS, len(found))
    lines = -(-len(found) // columns)
    size = (4.4 * columns, 3.4 * lines)
    figure, fields = pyplot.subplots(
        lines, columns, figsize=size, squeeze=False, layout="constrained"
    )
    for axes, each in zip(fields.flat, found, strict=False):
        _draw_one(axes, each)
    for axes in list(fields.flat)[len(found) :]:
        axes.axis("off")
    handles, labels = fields.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _draw_one(axes: Any, found: Frontier) -> None:
    for solver, plans in found.others.items():
        above = [(p.peak_bytes - p.problem.resident_bytes) / MIB for p in plans]
        axes.plot(above, [extra(p) for p in plans], OTHERS[solver], label=solver, markersize=4)
    above = [(p.peak_bytes - p.problem.resident_bytes) / MIB for p in found.plans]
    axes.plot(above, [extra(p) for p in found.plans], "o-", label="fxremat", markersize=4)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.set_title(found.name)
    axes.set_xlabel("peak above resident [MiB]")
    axes.set_ylabel("extra time [% of a step]")
    axes.grid(alpha=0.3)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = problem_options(__doc__)
    parser.set_defaults(only=SHOWN)
    parser.add_argument("--points", type=int, default=16)
    parser.add_argument("--others", nargs="*", choices=tuple(OTHERS), default=tuple(OTHERS))
    beside = Path(__file__).with_name("frontier.png")
    parser.add_argument("--picture", type=Path, default=beside)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, print and draw."""
    options = parse(arguments)
    found = []
    for name in options.only:
        found.append(frontier_of(name, options.folder, options.points, options.others))
        print(*row(found[-1]), sep="  ", file=sys.stderr, flush=True)
    print(tabulate(map(row, found), HEADERS, disable_numparse=True))
    draw(found, options.picture)
    print(f"\ndrawn: {options.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
