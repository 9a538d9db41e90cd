"""fxremat beside torch's own tools, at the peaks that those reach.

For each model, torch's partitioner divides the step with ``activation_memory_budget`` at several
values. What that holds is measured, and given to fxremat as its budget. Both run by the same
executor, with the outputs held and differentiated alike, in turn with the unrewritten graph; shown
are the extra time of a step, and, free of noise, the extra cost of the real graphs under one table
of measured operator costs. Per-block ``torch.utils.checkpoint`` runs eagerly, as users run it, and
is compared with plain eager torch; fxremat stands beside it at the same peak. What
``differentiate="loss"`` brings stands in lines of its own, beside torch with the logits detached.

    python examples/benchmarks/peers.py --models gpt2 llama resnet --markdown RESULTS.md
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peer_models import MODELS, Sizes, Subject
from peer_plans import Runner, Ways
from peer_tables import Row, describe_machine, tables
from peer_timing import gradients, measure, time_in_turn

from fxremat import InfeasibleBudgetError
from fxremat.budget import format_bytes
from fxremat.check import same_bits

KNOBS = (0.7, 0.5, 0.3, 0.2)
QUICK_KNOBS = (0.5, 0.2)
LOSS_KNOB = 0.3  # at which differentiate="loss" is shown


def say(text: str) -> None:
    """Show what is going on."""
    print(text, file=sys.stderr, flush=True)


class Bench:
    """All rows of one model.

    Args:
        subject: The model.
        time_limit_s: For solving, per budget. [s]
    """

    def __init__(self, subject: Subject, time_limit_s: float) -> None:
        self.subject = subject
        self.time_limit_s = time_limit_s
        self.rows: list[Row] = []

    def run(self, knobs: Sequence[float], repeats: int) -> list[Row]:
        """Plan, check and measure everything, then time it in turn."""
        self.at_knobs("all", knobs)
        self.per_block(self.at_knobs("loss", (LOSS_KNOB,)))
        running = [row for row in self.rows if row.step is not None]
        say(f"{self.subject.name}: timing {len(running)} kinds of step, {repeats} times each")
        times_s = time_in_turn(self.subject, [_step(row) for row in running], repeats)
        for row, found in zip(running, times_s, strict=True):
            row.times_s = found
        return self.rows

    def at_knobs(self, differentiate: str, knobs: Sequence[float]) -> "tuple[Ways, Row]":
        """Run torch at each knob, and fxremat at the peak that was measured there."""
        ways = Ways(self.subject, differentiate, self.time_limit_s)
        note = "" if differentiate == "all" else f", differentiate={differentiate!r}"
        detached = "" if differentiate == "all" else ", logits detached"
        runner = ways.unrewritten()
        base = self.add(Row(f"unrewritten graph{detached}", step=runner))
        expected = gradients(self.subject, runner)
        self.finish(base, runner, base)
        for knob in knobs:
            theirs = ways.torch(knob)
            row = self.add(Row(f"torch at {knob}{detached}", knob, "torch", base, step=theirs))
            row.equal = self.same(expected, theirs)
            self.finish(row, theirs, base)
            self.plan(
                ways, base, row.peak_bytes, Row(f"fxremat{note}", knob, "fxremat", base), expected
            )
        return ways, base

    def per_block(self, found: "tuple[Ways, Row]") -> None:
        """Per-block checkpointing beside plain eager torch, and fxremat at its peak."""
        subject, (ways, base) = self.subject, found

        def eager() -> Any:
            return subject.model(**subject.batch)

        def checkpointed() -> Any:
            with subject.checkpointed():
                return subject.model(**subject.batch)

        plain = self.add(Row("eager", step=eager))
        expected = gradients(subject, eager)
        plain.peak_bytes = measure(subject, eager)
        row = self.add(Row("torch.utils.checkpoint per block", base=plain, step=checkpointed))
        row.equal = self.same(expected, checkpointed)
        row.peak_bytes = measure(subject, checkpointed)
        expected = gradients(subject, _step(base))
        self.plan(
            ways,
            base,
            row.peak_bytes,
            Row("fxremat at that peak, differentiate='loss'", base=base),
            expected,
        )

    def plan(
        self, ways: Ways, base: Row, peak_bytes: int, row: Row, expected: list[torch.Tensor]
    ) -> None:
        """Run fxremat at a measured peak."""
        assert isinstance(base.step, Runner)
        assert base.step.problem is not None
        resident_bytes = base.step.problem.resident_bytes
        runner = ways.fxremat(peak_bytes + resident_bytes, row.name)
        self.add(row)
        try:
            row.equal = self.same(expected, runner)
        except InfeasibleBudgetError as error:
            row.note = f"floor {format_bytes(error.floor_bytes - resident_bytes)}"
            return
        row.step = runner
        row.budget_bytes = peak_bytes
        assert runner.plan is not None
        row.planned_ns = runner.plan.recompute_ns
        self.finish(row, runner, base)

    def add(self, row: Row) -> Row:
        """Note a row, and say so."""
        say(f"{self.subject.name}: {row.name}")
        self.rows.append(row)
        return row

    def finish(self, row: Row, runner: Runner, base: Row) -> None:
        """Measure the peak of a runner that has run, and price it."""
        assert isinstance(base.step, Runner)
        row.peak_bytes = measure(self.subject, runner)
        row.cost_ns = runner.cost_ns
        row.recompute_ns = runner.cost_ns - base.step.cost_ns
        say(f"  peak {format_bytes(row.peak_bytes)}, recompute {row.recompute:+.1%}")

    def same(self, expected: list[torch.Tensor], run: Callable[[], Any]) -> bool:
        """Are outputs and gradients equal bit for bit?"""
        found = gradients(self.subject, run)
        return all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


def _step(row: Row) -> Callable[[], Any]:
    assert row.step is not None
    return row.step


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each kind")
    parser.add_argument("--knobs", type=float, nargs="+", default=KNOBS, help="values for torch")
    parser.add_argument("--quick", action="store_true", help="two knobs and three repeats")
    parser.add_argument(
        "--time-limit", type=float, default=60.0, help="for solving, per budget [s]"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--markdown", type=Path, help="append the tables to this file")
    sizes = Sizes()
    for name in ("layers", "width", "batch", "tokens", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, default=getattr(sizes, name))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 where fxremat is not bit for bit."""
    options = parse(arguments)
    knobs, repeats = (QUICK_KNOBS, 3) if options.quick else (options.knobs, options.repeats)
    sizes = Sizes(options.layers, options.width, options.batch, options.tokens, options.vocabulary)
    device = torch.device(options.device)
    machine = describe_machine(device, repeats, sizes)
    print(machine)
    written = [f"\n{machine}\n"]
    broken = False
    for name in options.models:
        subject = MODELS[name](sizes, device)
        rows = Bench(subject, options.time_limit).run(knobs, repeats)
        print(f"\n{subject.name}\n\n{tables(rows, 'simple')}", flush=True)
        written.append(f"\n### {subject.name}\n\n{tables(rows, 'github')}\n")
        broken |= any(row.tool == "fxremat" and row.equal is False for row in rows)
    if options.markdown is not None:
        with options.markdown.open("a", encoding="utf-8") as file:
            file.writelines(written)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
