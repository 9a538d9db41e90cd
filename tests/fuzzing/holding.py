"""Runs a program by eager and under plans, and says whether what fxremat promises holds."""

import contextlib
import enum
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fxremat
from tests.fuzzing.program import Program
from tests.fuzzing.running import Make, References, Run, Seen, differing, far_apart

FRACTIONS = (1.0, 0.5, 0.0)  # of the way from the floor to the baseline


class Outcome(enum.StrEnum):
    """What became of a program."""

    HELD = "held"
    REFUSED = "refused"  # in words, before the step
    SKIPPED = "skipped"  # torch alone does not run it, or not twice alike
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a program, and why.

    Attributes:
        outcome: What became of it.
        kind: Short and the same for alike causes, so that a smaller program can be held to it.
        words: The details.
        traced: It was held to what AOTAutograd makes of the step, which differs from eager.
        unmeasured: It puts tensors into its module that nobody counts.
        below: It held less than was predicted, which costs time but breaks nothing.
    """

    outcome: Outcome
    kind: str = ""
    words: str = ""
    traced: bool = False
    unmeasured: bool = False
    below: bool = False


class Broken(Exception):  # noqa: N818  # a finding, not an error of this code
    """Something promised does not hold."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(words)
        self.kind = kind


def kind_of(error: BaseException) -> str:
    """The same for alike exceptions."""
    return f"{type(error).__name__}"


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Neither warnings nor what torch logs of a trace that fails."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def hold(program: Program, options: Mapping[str, Any]) -> Verdict:
    """Run a program at several budgets and compare.

    Args:
        program: What to run.
        options: Of ``fxremat.optimize``.

    Returns:
        What became of it.
    """
    torch._dynamo.reset()
    with silence():
        make = program.maker()
        try:
            references = References(make)
        except Exception as error:  # noqa: BLE001  # eager may raise anything
            return Verdict(Outcome.SKIPPED, f"eager: {kind_of(error)}", str(error))
        try:
            return _hold(program, make, references, dict(options))
        except Broken as broken:
            return Verdict(Outcome.FAULT, broken.kind, str(broken))


def _hold(program: Program, make: Make, references: References, options: dict[str, Any]) -> Verdict:
    """The same, for a program that eager runs."""
    try:
        first = Run(make, lambda net: fxremat.optimize(net, "100%", **options))
        found = [first.steps()]
        report = fxremat.report(first.net)
    except Exception as error:  # noqa: BLE001  # any other than fxremat's own is a fault
        return _judged(error, references)
    if not report.differentiated:
        return Verdict(Outcome.SKIPPED, "nothing to differentiate")
    baseline_bytes, floor_bytes = report.baseline_peak_bytes, report.floor_bytes
    runs = [first]
    for fraction in FRACTIONS[1:]:
        budget_bytes = floor_bytes + int(fraction * (baseline_bytes - floor_bytes))

        def wrap(net: nn.Module, budget_bytes: int = budget_bytes) -> Any:
            return fxremat.optimize(net, budget_bytes, **options)

        try:
            wrapped = Run(make, wrap)
            runs.append(wrapped)
            found.append(wrapped.steps())
        except Exception as error:  # the baseline's budget did not raise
            words = f"budget {budget_bytes:,} (fraction {fraction}): {error}"
            raise Broken(f"raised {kind_of(error)} below the baseline", words) from error
    traced = _check_bits(references, found)
    unmeasured = program.rebinds
    below = False
    if not unmeasured:
        for run, fraction in zip(runs, FRACTIONS, strict=True):
            below |= _check_peak(run, fraction)
    return Verdict(Outcome.HELD, traced=traced, unmeasured=unmeasured, below=below)


def _judged(error: Exception, references: References) -> Verdict:
    """What an exception in the first call says."""
    if isinstance(error, fxremat.UnsupportedGraphError):
        return Verdict(Outcome.REFUSED, kind_of(error), str(error))
    try:
        references.traced_steps()
    except Exception as torchs:  # noqa: BLE001  # torch's trace may raise anything
        return Verdict(Outcome.SKIPPED, f"torch's trace: {kind_of(torchs)}", str(error))
    if isinstance(error, fxremat.CaptureError):
        return Verdict(Outcome.REFUSED, kind_of(error), str(error))
    return Verdict(Outcome.FAULT, f"raised {kind_of(error)} at the baseline", str(error))


def _check_bits(references: References, found: list[Seen]) -> bool:
    """Is each value as in eager, or else as in torch's trace; was there any of the latter?

    Raises:
        Broken: They are not.
    """
    if not any(differing(references.eager, got) for got in found):
        return False
    try:
        traced = references.traced_steps()
    except Exception:  # noqa: BLE001  # then eager is the only reference
        traced = references.eager
    far = far_apart(references.eager, traced)
    if far:
        raise Broken(f"far from eager, as traced: {_rule(far)}", f"{far[:6]}")
    for fraction, got in zip(FRACTIONS, found, strict=True):
        from_traced, from_eager = differing(traced, got), differing(references.eager, got)
        wrong = [name for name in from_traced if name in from_eager]
        if wrong:
            words = f"at fraction {fraction}, other than eager and than torch's trace: {wrong[:6]}"
            raise Broken(f"bits of {_rule(wrong)}", words)
    return True


def _rule(names: list[str]) -> str:
    """What sort of thing differs."""
    return " ".join(names[0].split()[2:3] or names[0].split())


def _check_peak(run: Run, fraction: float) -> bool:
    """Hold a warm step to its prediction. Does it hold less?

    Raises:
        Broken: It holds more.
    """
    try:
        above_bytes = run.peak_bytes()
    except Exception as error:
        kind = f"raised {type(error).__name__} with the loss of verify"
        raise Broken(kind, str(error)) from error
    report = fxremat.report(run.net)
    measured_bytes = above_bytes + report.resident_bytes
    words = (
        f"at fraction {fraction}: {measured_bytes:,} measured, {report.predicted_peak_bytes:,} "
        f"predicted, budget {report.budget_bytes:,}, resident {report.resident_bytes:,}"
    )
    noted = "".join(f"; {feature}" for feature in sorted(run.features))
    if measured_bytes > report.budget_bytes:
        raise Broken(f"over the budget{noted}", words)
    if measured_bytes > report.predicted_peak_bytes:
        raise Broken(f"more than predicted{noted}", words)
    return measured_bytes < report.predicted_peak_bytes
