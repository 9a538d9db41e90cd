"""Runs deep chains far below what per-block checkpointing holds: bits, peaks, and extra forwards.

A residual MLP of 256 blocks and an LSTM of 128 steps. What counts is what the step holds above
resident bytes and gradients; ``block`` saves the input of each block and replays each once. Each
row is a budget of a share of that, verified against the unrewritten graph: the measured peak, and
whether outputs, gradients, buffers and generators are equal to the bit.

    python examples/benchmarks/deep_chains.py
    python examples/benchmarks/deep_chains.py --only residual-mlp-256 --parts 8 12
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from planner_models import Step, lstm, residual_mlp
from tabulate import tabulate

import fxremat
from fxremat.errors import InfeasibleBudgetError
from fxremat.planning import UNLIMITED
from fxremat.problem import RematProblem

MIB = 1024**2
CHAINS: dict[str, Callable[[], Step]] = {
    "residual-mlp-256": partial(residual_mlp, batch=4096),
    "lstm-128": lstm,
}
HEADERS = (
    "chain", "of block's", "budget MiB", "above resident and gradients MiB", "solver",
    "extra forwards", "predicted", "measured", "bits", "solved in",
)  # fmt: skip


def own_bytes(problem: RematProblem, peak_bytes: int) -> int:
    """What a peak holds above resident bytes and gradients. [bytes]"""
    gradients = sum(problem.storages[g].size_bytes for g in problem.gradients)
    return peak_bytes - problem.resident_bytes - gradients


def extra_forwards(problem: RematProblem, recompute_ns: int) -> float:
    """Time of replays, in forwards."""
    return recompute_ns / sum(operation.cost_ns for operation in problem.forward)


def rows_of(name: str, parts: Sequence[int], cache: str) -> Iterator[tuple[str, ...]]:
    """One chain: ``block``, then a row for each share of what that holds."""
    step = made(name)
    problem = fxremat.capture(step.module, step.args, step.kwargs, cache_dir=cache)
    block = fxremat.plan(problem, UNLIMITED, solver="block")
    block_bytes = own_bytes(problem, block.peak_bytes)
    forwards = extra_forwards(problem, block.recompute_ns)
    yield (
        name, "1", f"{block.peak_bytes / MIB:,.1f}", f"{block_bytes / MIB:,.1f}", "block",
        f"{forwards:.2f}", f"{block.peak_bytes:,}", "", "", "",
    )  # fmt: skip
    for part in parts:
        yield at(name, problem, block.peak_bytes - block_bytes + block_bytes // part, part, cache)


def made(name: str) -> Step:
    """The step, the same each time."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    return CHAINS[name]()


def at(
    name: str, problem: RematProblem, budget_bytes: int, part: int, cache: str
) -> tuple[str, ...]:
    """One budget, run for real."""
    head = (name, f"1/{part}", f"{budget_bytes / MIB:,.1f}")
    start_s = time.perf_counter()
    try:
        plan = fxremat.plan(problem, budget_bytes)
    except InfeasibleBudgetError as error:
        least = f"{own_bytes(problem, error.floor_bytes) / MIB:,.1f}"
        return (*head, f"least is {least}", "none", *[""] * 5)
    solve_s = time.perf_counter() - start_s
    step = made(name)
    options: dict[str, Any] = {"cache_dir": cache, "steps": 1, "repeats": 1}
    check = fxremat.verify(step.module, step.args, step.kwargs, budget=budget_bytes, **options)
    equal = (check.outputs_equal, check.gradients_equal, check.buffers_equal, check.rng_equal)
    return (
        *head, f"{own_bytes(problem, plan.peak_bytes) / MIB:,.1f}", plan.solver,
        f"{extra_forwards(problem, plan.recompute_ns):.2f}", f"{check.predicted_peak_bytes:,}",
        f"{check.measured_peak_bytes:,}", "equal" if all(equal) else "DIFFER", f"{solve_s:.1f} s",
    )  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=tuple(CHAINS), default=tuple(CHAINS))
    parser.add_argument("--parts", nargs="+", type=int, default=(4, 8, 10, 12))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all rows and print them; 1 where bits differ."""
    options = parse(arguments)
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as cache:
        for name in options.only:
            for row in rows_of(name, options.parts, cache):
                rows.append(row)
                print(*row, sep="  ", file=sys.stderr, flush=True)
    print(tabulate(rows, HEADERS, disable_numparse=True))
    return int(any("DIFFER" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
