"""``verify``: run the unrewritten and the planned step from one state, compare, measure."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxremat.budget import format_bytes
from fxremat.check import Check
from fxremat.comparing import Comparison, Observed, bound_in_words, compare, joined
from fxremat.errors import FxrematError, StepFailsError, VerificationError
from fxremat.install import Installed
from fxremat.notes import VIEWS_NOTE
from fxremat.options import Options
from fxremat.passes.allocations import ProfilerBusyError
from fxremat.passes.meter import PeakMeasurement, measure_peak
from fxremat.passes.seeding import seeded_loss, unit
from fxremat.session import Session
from fxremat.stepstate import GRAPH_INPUT, StepState
from fxremat.unrewritten import ReferenceTrace

LEARNING_RATE = 1e-3  # of the plain gradient steps between several verified steps


RETRACED = (
    "{name} was compiled anew when the step that had just run was run again from the same state: "
    "it changes something in Python that cannot be put back, so its steps cannot be compared. "
    "Keep what changes from call to call in attributes of the module, or in its buffers."
)


class _Verification:
    """One callable, its arguments and its two ways of running."""

    def __init__(
        self,
        target: Callable[..., Any],
        module: nn.Module | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        loss: Callable[[Any], torch.Tensor],
        options: Options,
    ) -> None:
        self.loss, self.options = loss, options
        self.state = StepState(
            module, args, kwargs, held=options.gradients == "held", target=target
        )
        self.reference = Installed(target, module, options, trace=ReferenceTrace)
        self.planned = Installed(target, module, options)
        self.planned.session.alone = False  # the copies of the state lie beside it
        self.reference.session.on_inputs = self.planned.session.on_inputs = self.state.add

    def step(self, call: Installed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward and backward."""
        output = call(*args, **kwargs)
        loss = self.loss(output)
        if self.options.outputs == "released":
            output = None
        if self.loss is seeded_loss:  # its gradient is no part of the step
            torch.autograd.backward(loss, unit(loss.device))
        else:
            loss.backward()
        return output

    def observe(self, call: Installed, steps: int) -> list[Observed]:
        """Several steps from the kept state, with a plain gradient step between them."""
        found = []
        self.state.put_back()
        for _ in range(steps):
            output = self.step(call, *self.state.arguments())
            found.append(self.state.observe(output))
            del output
            self.descend()
        return found

    def observe_planned(self, steps: int) -> list[Observed]:
        """The planned steps.

        Raises:
            StepFailsError: They raise, and unrewritten ones do not.
        """
        try:
            return self.observe(self.planned, steps)
        except FxrematError:
            raise
        except Exception as error:
            self.observe(self.reference, steps)  # raises by itself where the model is to blame
            raise StepFailsError(
                "the planned step raises where the unrewritten one does not: "
                f"{type(error).__name__}: {error}\nThe plan is not used; please report this model.",
                (f"{type(error).__name__}: {error}",),
            ) from error

    def descend(self) -> None:
        """A step of plain gradient descent."""
        with torch.no_grad():
            for name, tensor in self.state.tensors.items():
                if tensor.is_leaf and tensor.grad is not None:
                    if name.startswith("parameter"):
                        tensor -= LEARNING_RATE * tensor.grad
                    self.state.clear(tensor)

    def measure(self, device: torch.device) -> tuple[PeakMeasurement, Observed]:
        """What a warm planned step holds above its start, and what it leaves."""
        self.state.put_back()
        args, kwargs = self.state.arguments()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what other steps needed is not reserved for this one
        kept: list[Any] = []
        begun: list[bool] = []
        known = len(self.planned.session.graphs)

        def step() -> None:
            begun.append(True)
            kept.append(self.step(self.planned, args, kwargs))

        try:
            peak = measure_peak(step, device=device)
        except ProfilerBusyError as error:  # planning measures costs, which needs the profiler too
            if not begun:
                raise
            raise VerificationError(RETRACED.format(name=self.planned.session.name)) from error
        if len(self.planned.session.graphs) > known:
            raise VerificationError(RETRACED.format(name=self.planned.session.name))
        return peak, self.state.observe(kept.pop())

    def times(self, repeats: int) -> tuple[list[float], list[float]]:
        """Times of both kinds of step, taken alternately. [s]"""
        baseline_s: list[float] = []
        planned_s: list[float] = []
        for _ in range(repeats):
            for call, found in ((self.reference, baseline_s), (self.planned, planned_s)):
                self.state.put_back()
                args, kwargs = self.state.arguments()
                synchronise()
                start_s = time.perf_counter()
                self.step(call, args, kwargs)
                synchronise()
                found.append(time.perf_counter() - start_s)
        return baseline_s, planned_s


def synchronise() -> None:
    """Wait for the device."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def verify(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    loss: Callable[[Any], torch.Tensor] | None,
    steps: int,
    repeats: int,
    options: Options,
) -> Check:
    """Compare and measure; see ``fxremat.verify``."""
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    module = owner if isinstance(owner, nn.Module) else None
    target = fn._call_impl if isinstance(fn, nn.Module) else getattr(fn, "__wrapped__", fn)
    both = _Verification(target, module, args, kwargs or {}, loss or seeded_loss, options)
    return _check(both, steps, repeats)


def verify_call(
    target: Callable[..., Any],
    module: nn.Module | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
) -> None:
    """Check the arguments of one call before it runs.

    Raises:
        VerificationError: The planned step breaks a rule.
    """
    both = _Verification(target, module, args, kwargs, seeded_loss, replace(options, verify=False))
    _check(both, steps=1, repeats=1).raise_if_broken()


def _check(both: _Verification, steps: int, repeats: int) -> Check:
    options = both.options
    try:
        got = both.observe_planned(steps)
        if both.planned.session.shares:  # the first call showed the pieces, now their plan runs
            both.planned.session.settle()
            got = both.observe_planned(steps)
        device = torch.device(both.planned.session.only_plan().problem.device)
        _room_for_reference(both.planned.session)
        expected = both.observe(both.reference, steps)
        peak, again = both.measure(device)
        plan = both.planned.session.only_plan()  # a later step may have run another graph
        baseline_s, planned_s = both.times(max(1, repeats))
    finally:
        both.state.restore()
    found = _compare_steps(expected, got, again, options.executor)
    uncounted = _uncounted(both)
    resident_bytes = plan.problem.resident_bytes
    start_bytes = peak.absolute_bytes - peak.peak_bytes
    step_s = statistics.median(planned_s)
    return Check(
        executor=options.executor,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=resident_bytes + peak.peak_bytes,
        measured_reserved_bytes=resident_bytes + peak.reserved_bytes - start_bytes,
        baseline_step_s=statistics.median(baseline_s),
        step_s=step_s,
        step_spread=(max(planned_s) - min(planned_s)) / step_s,
        extra_calls=len(plan.schedule.forward)
        + len(plan.schedule.backward)
        - len(plan.problem.operations),
        max_abs_diff=found.max_abs_diff,
        differing=found.differing,
        beyond_bound=found.beyond,
        bound=bound_in_words(options.executor),
        words=found.words,
        measured_end_bytes=resident_bytes + peak.end_bytes,
        predicted_end_bytes=plan.simulation.end_bytes,
        uncounted=uncounted,
        notes=(f"not counted by the plan: {uncounted}.",) if uncounted else (),
    )


def _uncounted(both: _Verification) -> str:
    """What may hold memory that no plan knows of, in words; empty if nothing does."""
    if both.loss is not seeded_loss:
        return "what the loss given to verify allocates"
    if both.options.executor != "eager":
        return "what Inductor's code holds otherwise than the graph"
    ran = both.planned.session.ran
    if ran[0].plan.problem.device.startswith("cuda"):
        return "what CUDA's allocator adds to a block"
    if len(ran) > 1:
        return "what runs between the pieces"
    if VIEWS_NOTE in ran[0].notes:
        return "what autograd adds up where outputs are views of one value"
    return ""


def _compare_steps(
    expected: list[Observed], got: list[Observed], again: Observed, executor: str
) -> Comparison:
    """Compare steps; with more than one, names say which. ``again`` is the first one once more."""
    parts = [
        compare(_both_watched(one, other), other, executor, label)
        for number, (one, other) in enumerate(zip(expected, got, strict=True))
        for label in ["" if len(got) == 1 else f"step {number}: "]
    ]
    return joined([*parts, compare(expected[0], again, executor, "run again: ")])


def _both_watched(one: Observed, other: Observed) -> Observed:
    """A run without the inputs of graphs that had not been met yet when another one ran."""
    unmet = {n for n in one.inputs if n.startswith(GRAPH_INPUT) and n not in other.inputs}
    return replace(one, inputs={n: t for n, t in one.inputs.items() if n not in unmet})


def _room_for_reference(session: Session) -> None:
    """Refuse before the unrewritten step runs out of memory."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return
    free_bytes, _ = torch.cuda.mem_get_info()
    free_bytes += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    report = session.report()
    needed_bytes = report.baseline_peak_bytes - report.resident_bytes
    if needed_bytes > free_bytes:
        raise VerificationError(
            f"the unrewritten step needs {format_bytes(needed_bytes)} more, and "
            f"{format_bytes(free_bytes)} "
            "are free on the device. Verify with a smaller batch."
        )
