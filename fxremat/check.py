"""What ``verify`` found: one property and one error for each thing that is promised."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tabulate import tabulate

from fxremat.budget import format_bytes
from fxremat.comparing import same_bits
from fxremat.errors import (
    BuffersDifferError,
    GradientsDifferError,
    InputsDifferError,
    OutputsDifferError,
    OverBudgetError,
    PeakDiffersError,
    RandomStateDiffersError,
    VerificationError,
)

__all__ = ["Check", "same_bits"]

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
        max_abs_diff: For each value that differs, the largest difference; 0 where its bits are
            equal and something else differs.
        differing: For each rule, the values that differ in a bit, or in what else a caller can
            see of them: type, strides, need of a gradient, what shares their memory.
        beyond_bound: Values that differ by more than the executor's bound.
        bound: The bound in words.
        words: What differs of each value.
        measured_end_bytes: Held after the planned step, resident bytes included. [bytes]
        predicted_end_bytes: What the plan says about that. [bytes]
        uncounted: What may hold memory beside the plan, in words; empty where nothing does, so
            that measured bytes must not be above predicted ones.
        notes: For people.
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
    words: Mapping[str, str] = field(default_factory=dict)
    measured_end_bytes: int = 0
    predicted_end_bytes: int = 0
    uncounted: str = ""
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
        """The measured peak is within the budget."""
        return self.measured_peak_bytes <= self.budget_bytes

    @property
    def as_predicted(self) -> bool:
        """The step holds, and leaves, no more than the plan says, or something is not counted."""
        return bool(self.uncounted) or (
            self.measured_peak_bytes <= self.predicted_peak_bytes
            and self.measured_end_bytes <= self.predicted_end_bytes
        )

    @property
    def ok(self) -> bool:
        """Values within the executor's bound, generators equal, in budget and as predicted."""
        equal = not self.beyond_bound and self.rng_equal
        return equal and self.within_budget and self.as_predicted

    def raise_if_broken(self) -> None:
        """Raise the error of the first rule that does not hold.

        Raises:
            VerificationError: One of its subclasses.
        """
        for rule, error in RULES.items():
            broken = [name for name in self.differing[rule] if name in self.beyond_bound]
            if broken:
                lines = tuple(f"{name}: {self.words.get(name, 'it differs')}" for name in broken)
                raise error(
                    f"{rule} differ from the unrewritten step ({len(broken)} values; the "
                    f"first: {lines[0]}). "
                    "The plan is not used; please report this model.",
                    lines,
                )
        self._raise_if_over_budget()
        self._raise_if_not_predicted()

    def _raise_if_over_budget(self) -> None:
        if self.within_budget:
            return
        remedy = "Please report this model."
        if self.uncounted:
            remedy = f"Not counted by the plan: {self.uncounted}. Name its bytes with reserve=."
        raise OverBudgetError(
            f"the step held {self.measured_peak_bytes:,} bytes, more than the budget of "
            f"{self.budget_bytes:,} bytes and than the {self.predicted_peak_bytes:,} "
            f"predicted. {remedy}",
            self.measured_peak_bytes,
            self.budget_bytes,
        )

    def _raise_if_not_predicted(self) -> None:
        if self.as_predicted:
            return
        measured_bytes, predicted_bytes = self.measured_peak_bytes, self.predicted_peak_bytes
        what = "held"
        if measured_bytes <= predicted_bytes:
            measured_bytes, predicted_bytes = self.measured_end_bytes, self.predicted_end_bytes
            what = "left behind"
        raise PeakDiffersError(
            f"the step {what} {measured_bytes:,} bytes, more than the {predicted_bytes:,} "
            f"predicted, though less than the budget of {self.budget_bytes:,} bytes. The plan is "
            "not used; please report this model, or look for code of your own that allocates "
            "meanwhile.",
            measured_bytes,
            predicted_bytes,
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
