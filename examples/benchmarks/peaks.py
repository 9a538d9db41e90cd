"""Budgets of stock models, down to the floor: are the bits equal, and is the peak as predicted?

Eight small models from transformers and diffusers, those of the tests, each at several budgets
between its floor (0) and its unrewritten peak (1). Every row compares three steps with the
unrewritten graph.

    python examples/benchmarks/peaks.py --markdown RESULTS.md
    python examples/benchmarks/peaks.py --executor inductor --fractions 0.5 0
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import fxremat

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.models import MODELS, made  # the same models as in the tests

FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.0)
HEADERS = (
    "model", "budget", "budget bytes", "predicted", "measured", "outputs", "gradients", "buffers",
    "generators", "largest difference", "recompute", "solving s",
)  # fmt: skip
MODEL_HEADERS = (
    "model", "operations", "unrewritten peak", "floor", "profiling s", "floor's search s",
    "one byte less",
)  # fmt: skip


class Sweep:
    """One model at several budgets.

    Args:
        name: Of the model.
        executor: "eager" or "inductor".
        steps: Steps that are compared at each budget.
        cache: Where costs are kept meanwhile.
    """

    def __init__(self, name: str, executor: str, steps: int, cache: str) -> None:
        self.name = name
        self.steps = steps
        self.options: dict[str, Any] = {
            "executor": executor,
            "cache_dir": cache,
            "progress": False,
        }
        self.broken = False

    def about(self) -> tuple[object, ...]:
        """Trace and price the model, find its floor, and ask for one byte less."""
        torch._dynamo.reset()
        model, args, kwargs = made(self.name)
        start_s = time.perf_counter()
        self.problem = fxremat.capture(model, args, kwargs, **self.options)
        captured_s = time.perf_counter() - start_s
        torch._dynamo.reset()
        start_s = time.perf_counter()  # costs are cached by now: what remains is the trace
        fxremat.capture(model, args, kwargs, **self.options)
        profile_s = max(0.0, captured_s - (time.perf_counter() - start_s))
        start_s = time.perf_counter()
        plans = fxremat.frontier(self.problem, 2)
        floor_s = time.perf_counter() - start_s
        self.top_bytes, self.floor_bytes = plans[0].budget_bytes, plans[-1].peak_bytes
        operations = len(self.problem.operations)
        return (
            self.name, operations, f"{self.top_bytes:,}", f"{self.floor_bytes:,}",
            f"{profile_s:.1f}", f"{floor_s:.1f}", self.one_byte_less(),
        )  # fmt: skip

    def one_byte_less(self) -> str:
        """What a budget of one byte below the floor gives."""
        torch._dynamo.reset()
        model, args, kwargs = made(self.name)
        fxremat.optimize(model, self.floor_bytes - 1, **self.options)
        try:
            model(*args, **kwargs)
        except fxremat.InfeasibleBudgetError as error:
            if error.floor_bytes == self.floor_bytes:
                return "refused, floor named"
            self.broken |= self.options["executor"] == "eager"
            return f"refused, {error.floor_bytes:,} named"
        self.broken = True
        return "ACCEPTED"

    def at(self, fraction: float) -> tuple[object, ...]:
        """One budget."""
        budget_bytes = self.floor_bytes + int(fraction * (self.top_bytes - self.floor_bytes))
        start_s = time.perf_counter()
        plan = fxremat.plan(self.problem, budget_bytes)
        solve_s = time.perf_counter() - start_s
        share = plan.recompute_ns / self.problem.step_ns
        torch._dynamo.reset()
        model, args, kwargs = made(self.name)
        head = (self.name, f"{fraction:g}", f"{budget_bytes:,}")
        try:
            check = fxremat.verify(
                model, args, kwargs, budget=budget_bytes, steps=self.steps, repeats=1,
                **self.options,
            )  # fmt: skip
        except fxremat.InfeasibleBudgetError as error:
            return (*head, "refused:", f"{error.floor_bytes:,}", *[""] * 5, f"{share:+.1%}", "")
        exact = check.measured_peak_bytes == check.predicted_peak_bytes
        self.broken |= not check.ok or (self.options["executor"] == "eager" and not exact)
        equal = (
            check.outputs_equal, check.gradients_equal, check.buffers_equal, check.rng_equal
        )  # fmt: skip
        return (
            *head,
            f"{check.predicted_peak_bytes:,}",
            f"{check.measured_peak_bytes:,}",
            *("equal" if same else "differ" for same in equal),
            f"{max(check.max_abs_diff.values(), default=0):.1e}" if check.max_abs_diff else "none",
            f"{share:+.1%}",
            f"{solve_s:.1f}",
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--fractions", nargs="+", type=float, default=FRACTIONS)
    parser.add_argument("--executor", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--steps", type=int, default=3, help="compared at each budget")
    parser.add_argument("--markdown", type=Path, help="append the tables to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep; the exit status is 1 where a promise is broken."""
    options = parse(arguments)
    models: list[tuple[object, ...]] = []
    rows: list[tuple[object, ...]] = []
    broken = False
    with tempfile.TemporaryDirectory() as cache:
        for name in options.models:
            sweep = Sweep(name, options.executor, options.steps, cache)
            models.append(sweep.about())
            print(*models[-1], sep="  ", file=sys.stderr, flush=True)
            for fraction in options.fractions:
                rows.append(sweep.at(fraction))
                print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
            broken |= sweep.broken
    title = (
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, executor "
        f"{options.executor}, {options.steps} steps at each budget; peaks in bytes, with resident."
    )
    for style, write in (("simple", print), ("github", None)):
        text = "\n\n".join(
            (
                title,
                str(tabulate(models, MODEL_HEADERS, tablefmt=style, disable_numparse=True)),
                str(tabulate(rows, HEADERS, tablefmt=style, disable_numparse=True)),
            )
        )
        if write is not None:
            write(text)
        elif options.markdown is not None:
            with options.markdown.open("a", encoding="utf-8") as file:
                file.write(f"\n{text}\n")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
