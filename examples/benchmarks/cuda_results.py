"""What the processes of ``cuda_acceptance.py`` are told, and what they report."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One budget.

    Attributes:
        model: Name of the case.
        executor: "eager" or "inductor".
        share: Where the budget lies between the floor (0) and the baseline (1).
        ok: Everything promised holds.
        why: What does not.
        values: "bitwise", or the largest difference.
        budget_bytes: What was allowed. [bytes]
        predicted_bytes: Peak of the plan. [bytes]
        allocated_bytes: What the allocator held, resident bytes included. [bytes]
        reserved_bytes: What it had taken from the device. [bytes]
        baseline_s: Time of the unrewritten step. [s]
        step_s: Time of the planned step. [s]
    """

    model: str
    executor: str
    share: float
    ok: bool
    why: str
    values: str = ""
    budget_bytes: int = 0
    predicted_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    baseline_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True)
class Peer:
    """Another way to save memory on the same step.

    Attributes:
        model: Name of the case.
        executor: "eager" or "inductor".
        name: "per-block", or the value of torch's knob.
        peak_bytes: What the allocator held, resident bytes included. [bytes]
        step_s: Time of the step. [s]
        why: Why there are no numbers.
    """

    model: str
    executor: str
    name: str
    peak_bytes: int = 0
    step_s: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Settings:
    """What the command line says.

    Attributes:
        device: "cuda" or "cpu".
        tiny: Small models, for a run without a GPU.
        shares: Budgets between floor (0) and baseline (1); none of them: the peers instead.
        knob: Values of torch's ``activation_memory_budget``.
        cache_dir: Where measured costs are kept between the traces of one model.
        solve_s: For the solver, per plan. [s]
        deadline_s: When to stop, on the monotonic clock. [s]
    """

    device: str
    tiny: bool
    shares: tuple[float, ...]
    knob: tuple[float, ...]
    cache_dir: str
    solve_s: float
    deadline_s: float
