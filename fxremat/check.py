"""What ``verify`` found, and how two runs of one step are compared: bit for bit."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from tabulate import tabulate

from fxremat.budget import format_bytes
from fxremat.errors import (
    BuffersDifferError,
    GradientsDifferError,
    InputsDifferError,
    OutputsDifferError,
    OverBudgetError,
    RandomStateDiffersError,
    VerificationError,
)

# Inductor fuses what stands together, and a plan moves things apart: sums may then round otherwise.
INDUCTOR_EPSILONS = (
    256  # allowed difference, in units of the type's epsilon times the largest value
)


@dataclass(frozen=True)
class Observed:
    """Everything that one run of a step showed, by name.

    Attributes:
        outputs: What the forward returned.
        gradients: Gradients of parameters and arguments; None where there is none.
        buffers: Buffers after the step.
        inputs: Arguments after the step.
        generators: States of the generators after the step.
    """

    outputs: Mapping[str, torch.Tensor | None]
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor | None]
    inputs: Mapping[str, torch.Tensor | None]
    generators: Mapping[str, torch.Tensor | None]


RULES: dict[str, type[VerificationError]] = {
    "outputs": OutputsDifferError,
    "gradients": GradientsDifferError,
    "buffers": BuffersDifferError,
    "inputs": InputsDifferError,
    "generators": RandomStateDiffersError,
}


@dataclass(frozen=True)
class Check:
    """A step compared with the unrewritten one, and measured.

    Attributes:
        executor: What ran both.
        budget_bytes: What was allowed. [bytes]
        predicted_peak_bytes: What the plan says, resident bytes included. [bytes]
        measured_peak_bytes: What the allocator held, resident bytes included. [bytes]
        measured_reserved_bytes: What the allocator had taken from the device. [bytes]
        baseline_step_s: Median time of the unrewritten step. [s]
        step_s: Median time of the planned step, measured alternately. [s]
        step_spread: (max - min) / median of the planned step's times.
        extra_calls: Operator calls more than the unrewritten step.
        max_abs_diff: For each value that differs in a bit, the largest difference.
        differing: For each rule, the values that differ in a bit.
        beyond_bound: Values that differ by more than the executor's bound.
        bound: The bound in words.
    """

    executor: str
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    measured_reserved_bytes: int
    baseline_step_s: float
    step_s: float
    step_spread: float
    extra_calls: int
    max_abs_diff: Mapping[str, float]
    differing: Mapping[str, tuple[str, ...]]
    beyond_bound: tuple[str, ...]
    bound: str
    over_by_caller_bytes: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def outputs_equal(self) -> bool:
        """Outputs are equal bit for bit."""
        return not self.differing["outputs"]

    @property
    def gradients_equal(self) -> bool:
        """Gradients are equal bit for bit."""
        return not self.differing["gradients"]

    @property
    def buffers_equal(self) -> bool:
        """Buffers are equal bit for bit."""
        return not self.differing["buffers"]

    @property
    def inputs_equal(self) -> bool:
        """Arguments are as the unrewritten step leaves them."""
        return not self.differing["inputs"]

    @property
    def rng_equal(self) -> bool:
        """Generators are in the same state."""
        return not self.differing["generators"]

    @property
    def within_budget(self) -> bool:
        """The measured peak, less what the caller's own loss held, is within the budget."""
        return self.measured_peak_bytes - self.over_by_caller_bytes <= self.budget_bytes

    @property
    def ok(self) -> bool:
        """Values within the executor's bound, generators equal, in budget."""
        return not self.beyond_bound and self.rng_equal and self.within_budget

    def raise_if_broken(self) -> None:
        """Raise the error of the first rule that does not hold.

        Raises:
            VerificationError: One of its subclasses.
        """
        for rule, error in RULES.items():
            broken = [name for name in self.differing[rule] if name in self.beyond_bound]
            if broken:
                lines = tuple(
                    f"{name}: largest difference {self.max_abs_diff.get(name, float('nan')):.3g}"
                    for name in broken
                )
                raise error(
                    f"{rule} differ from the unrewritten step ({len(broken)} values; the "
                    f"first: {lines[0]}). "
                    "The plan is not used; please report this model.",
                    lines,
                )
        if not self.within_budget:
            raise OverBudgetError(
                f"the step held {self.measured_peak_bytes:,} bytes, more than the budget of "
                f"{self.budget_bytes:,} bytes and than the {self.predicted_peak_bytes:,} "
                "predicted. "
                "Please report this model.",
                self.measured_peak_bytes,
                self.budget_bytes,
            )

    def __str__(self) -> str:
        """A table for people."""
        rows: list[tuple[str, str]] = [
            ("ok", "yes" if self.ok else "NO"),
            *((rule, _verdict(names)) for rule, names in self.differing.items()),
            ("budget", format_bytes(self.budget_bytes)),
            ("predicted peak", format_bytes(self.predicted_peak_bytes)),
            ("measured peak", format_bytes(self.measured_peak_bytes)),
            ("measured reserved", format_bytes(self.measured_reserved_bytes)),
            ("step", f"{self.step_s * 1e3:.1f} ms, spread {self.step_spread:.0%}"),
            ("unrewritten step", f"{self.baseline_step_s * 1e3:.1f} ms"),
            ("extra calls", f"{self.extra_calls:,}"),
            ("executor", f"{self.executor}, {self.bound}"),
        ]
        notes = "".join(f"\nNote: {note}" for note in self.notes)
        return str(tabulate(rows, tablefmt="plain")) + notes


def _verdict(names: tuple[str, ...]) -> str:
    return "bitwise equal" if not names else f"{len(names)} differ: {', '.join(names[:4])}"


def compare(
    reference: Observed, got: Observed, executor: str
) -> tuple[dict[str, tuple[str, ...]], dict[str, float], tuple[str, ...]]:
    """Compare two runs.

    Returns:
        For each rule the values that differ in a bit; their largest differences; those beyond the
        executor's bound.
    """
    differing: dict[str, tuple[str, ...]] = {}
    largest: dict[str, float] = {}
    beyond: list[str] = []
    for rule in RULES:
        expected, found = getattr(reference, rule), getattr(got, rule)
        names = [n for n in {**expected, **found} if not same_bits(expected.get(n), found.get(n))]
        differing[rule] = tuple(names)
        for name in names:
            largest[name] = _difference(expected.get(name), found.get(name))
            if largest[name] > _allowed(expected.get(name), executor) or rule == "generators":
                beyond.append(name)
    return differing, largest, tuple(beyond)


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Are two tensors equal bit for bit, NaNs too, or both absent?"""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    return torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def _difference(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    wide = torch.complex128 if a.is_complex() else torch.float64
    found = (a.to(wide) - b.to(wide)).abs().max().item()
    return float("inf") if found != found else float(found)


def _allowed(reference: torch.Tensor | None, executor: str) -> float:
    """The largest difference that the executor may show; below 0 for none at all."""
    if executor == "eager" or reference is None or not reference.is_floating_point():
        return -1.0
    scale = max(1.0, reference.abs().max().item()) if reference.numel() else 1.0
    return INDUCTOR_EPSILONS * torch.finfo(reference.dtype).eps * scale


def bound_in_words(executor: str) -> str:
    """What is promised for an executor."""
    if executor == "eager":
        return "bit for bit"
    return f"within {INDUCTOR_EPSILONS} epsilons of the largest value, generators bit for bit"
