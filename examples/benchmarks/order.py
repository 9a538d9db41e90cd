"""What the order of the backward brings, for each of the planner's benchmark models.

Each model is captured twice: with the backward as autograd runs it, and in the order that fxremat
gives it (``fxremat/passes/place.py``). The table shows peaks of both: with everything saved, with
per-block checkpointing, and at the floor; and what a plan costs in both at the higher of the two
floors. Costs and bytes are on paper, as in ``planner_problems.py``. Random problems are left out:
they have no joint graph.

    python examples/benchmarks/order.py
    python examples/benchmarks/order.py --only resnet50 t5-small
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from planner_problems import RANDOM, problem_of, problem_options
from tabulate import tabulate

import fxremat
from fxremat.passes.extract import Analysis
from fxremat.passes.joint import Joint
from fxremat.planning import floor_plan, save_all_peak_bytes
from fxremat.problem import RematProblem
from fxremat.simulate import simulate

MIB = 1024**2
UNLIMITED = 1 << 62
HEADERS = (
    "problem", "all saved MiB", "placed", "per block MiB", "placed", "floor MiB", "placed",
    "extra time at the higher floor", "placed",
)  # fmt: skip


def as_given(analysis: Analysis) -> Joint:
    """Leave the backward in autograd's order."""
    return analysis.joint


def both_of(name: str, folder: Path) -> tuple[RematProblem, RematProblem]:
    """A problem in autograd's order, and in that of fxremat."""
    with mock.patch("fxremat.pipeline.place", as_given):
        given, _ = problem_of(name, folder / "as_given")
    placed, _ = problem_of(name, folder)
    return given, placed


def peaks_of(problem: RematProblem) -> tuple[int, int, int]:
    """Peaks with all saved, per block, and at the floor. [bytes]"""
    block = fxremat.SOLVERS["block"](problem, UNLIMITED, time_limit_s=60.0).schedule
    assert block is not None  # no budget is too small
    block_bytes = simulate(problem, block).peak_bytes
    return save_all_peak_bytes(problem), block_bytes, floor_plan(problem).peak_bytes


def row(name: str, given: RematProblem, placed: RematProblem) -> tuple[str, ...]:
    """One line of the table."""
    cells = [name]
    before, after = peaks_of(given), peaks_of(placed)
    for old, new in zip(before, after, strict=True):
        change = f"{(new - old) / old:+.1%}" if new != old else "="
        cells += [f"{old / MIB:,.1f}", change]
    budget_bytes = max(before[-1], after[-1])
    for problem in (given, placed):
        plan = fxremat.plan(problem, budget_bytes)
        cells.append(f"{plan.recompute_ns / problem.step_ns:.2%}")
    return tuple(cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Capture what is missing, plan, and print the table."""
    options = problem_options(__doc__).parse_args(arguments)
    rows = []
    for name in options.only:
        if name not in RANDOM:
            rows.append(row(name, *both_of(name, options.folder)))
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print(tabulate(rows, HEADERS, disable_numparse=True, colalign=("left", *["right"] * 8)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
