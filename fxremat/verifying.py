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
from fxremat.check import Check, Observed, bound_in_words, compare
from fxremat.compiling import ReferenceTrace
from fxremat.errors import VerificationError
from fxremat.install import Installed
from fxremat.options import Options
from fxremat.passes.meter import measure_peak
from fxremat.passes.seeding import seeded_loss, tensors_in, unit
from fxremat.session import Session

LEARNING_RATE = 1e-3  # of the plain gradient steps between several verified steps


class _State:
    """Everything a step may change, so that it can be put back.

    Steps begin without gradients, or with zeros for parameters where ``held`` says so.
    """

    def __init__(self, module: nn.Module | None, args: Any, kwargs: Any, *, held: bool) -> None:
        self.module = module
        self.held = held
        self.arguments = dict(enumerate(tensors_in((args, kwargs))))
        self.tensors: dict[str, torch.Tensor] = {f"input {i}": t for i, t in self.arguments.items()}
        self.kept: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor | None] = {}
        if module is not None:
            self.tensors |= {f"parameter {n}": p for n, p in module.named_parameters()}
            self.tensors |= {f"buffer {n}": b for n, b in module.named_buffers()}
        self.generators = generator_states()
        self.keep()

    def keep(self) -> None:
        """Copy what is not copied yet."""
        for name, tensor in self.tensors.items():
            if name not in self.kept:
                self.kept[name] = tensor.detach().clone()
                self.gradients[name] = tensor.grad if tensor.is_leaf else None

    def add(self, found: Sequence[tuple[str, Any]]) -> None:
        """Also watch what a trace found to be the inputs of its graph."""
        known = {id(tensor) for tensor in self.tensors.values()}
        new = [(n, v) for n, v in found if isinstance(v, torch.Tensor) and id(v) not in known]
        self.tensors |= {f"graph input {name}": value for name, value in new}
        self.keep()
        for _, tensor in new:
            self.clear(tensor)

    def clear(self, tensor: torch.Tensor) -> None:
        """Give a tensor the gradient that a step is to find."""
        if tensor.is_leaf:
            zeros = self.held and tensor.requires_grad and isinstance(tensor, nn.Parameter)
            tensor.grad = torch.zeros_like(tensor) if zeros else None

    def put_back(self) -> None:
        """As it was, with the gradients that a step is to find."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.detach().copy_(self.kept[name])
                self.clear(tensor)
        set_generator_states(self.generators)

    def restore(self) -> None:
        """As it was, with the gradients that were there."""
        self.put_back()
        for name, tensor in self.tensors.items():
            if tensor.is_leaf:
                tensor.grad = self.gradients[name]

    def observe(self, output: Any) -> Observed:
        """What a step has left, on copies."""

        def named(start: str) -> dict[str, torch.Tensor | None]:
            return {n: t.detach().clone() for n, t in self.tensors.items() if n.startswith(start)}

        gradients = {
            f"gradient of {n}": None if t.grad is None else t.grad.detach().clone()
            for n, t in self.tensors.items()
            if t.is_leaf
        }
        outputs = {f"output {i}": t.detach().clone() for i, t in enumerate(tensors_in(output))}
        generators: dict[str, torch.Tensor | None] = dict(generator_states())
        inputs = named("input") | named("parameter") | named("graph input")
        return Observed(outputs, gradients, named("buffer"), inputs, generators)


def generator_states() -> dict[str, torch.Tensor]:
    """States of the default generators."""
    states = {"generator cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"generator cuda:{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_generator_states(states: Mapping[str, torch.Tensor]) -> None:
    """Put the default generators back."""
    torch.set_rng_state(states["generator cpu"])
    if len(states) > 1:
        torch.cuda.set_rng_state_all([s for n, s in states.items() if n != "generator cpu"])


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
        self.module = module
        self.args, self.kwargs, self.loss, self.options = args, kwargs, loss, options
        self.state = _State(self.module, args, kwargs, held=options.gradients == "held")
        self.reference = Installed(target, self.module, options, trace=ReferenceTrace)
        self.planned = Installed(target, self.module, options)
        self.planned.session.alone = False  # the copies of the state lie beside it
        self.reference.session.on_inputs = self.planned.session.on_inputs = self.state.add

    def step(self, call: Installed) -> Any:
        """One forward and backward."""
        output = call(*self.args, **self.kwargs)
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
            output = self.step(call)
            found.append(self.state.observe(output))
            del output
            self.descend()
        return found

    def descend(self) -> None:
        """A step of plain gradient descent."""
        with torch.no_grad():
            for name, tensor in self.state.tensors.items():
                if tensor.is_leaf and tensor.grad is not None:
                    if name.startswith("parameter"):
                        tensor -= LEARNING_RATE * tensor.grad
                    self.state.clear(tensor)

    def measure(self, device: torch.device) -> tuple[int, int]:
        """Peak and reserved bytes of a warm planned step, above its start. [bytes]"""
        self.state.put_back()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what other steps needed is not reserved for this one
        kept: list[Any] = []
        peak = measure_peak(lambda: kept.append(self.step(self.planned)), device=device)
        start_bytes = peak.absolute_bytes - peak.peak_bytes
        return peak.peak_bytes, peak.reserved_bytes - start_bytes

    def times(self, repeats: int) -> tuple[list[float], list[float]]:
        """Times of both kinds of step, taken alternately. [s]"""
        baseline_s: list[float] = []
        planned_s: list[float] = []
        for _ in range(repeats):
            for call, found in ((self.reference, baseline_s), (self.planned, planned_s)):
                self.state.put_back()
                synchronise()
                start_s = time.perf_counter()
                self.step(call)
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
        got = both.observe(both.planned, steps)
        if both.planned.session.shares:  # the first call showed the pieces, now their plan runs
            both.planned.session.settle()
            got = both.observe(both.planned, steps)
        plan = both.planned.session.only_plan()
        _room_for_reference(both.planned.session)
        expected = both.observe(both.reference, steps)
        peak_bytes, reserved_bytes = both.measure(torch.device(plan.problem.device))
        baseline_s, planned_s = both.times(max(1, repeats))
    finally:
        both.state.restore()
    differing, largest, beyond = _compare_steps(expected, got, options.executor)
    resident_bytes = plan.problem.resident_bytes
    step_s = statistics.median(planned_s)
    return Check(
        executor=options.executor,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=resident_bytes + peak_bytes,
        measured_reserved_bytes=resident_bytes + reserved_bytes,
        baseline_step_s=statistics.median(baseline_s),
        step_s=step_s,
        step_spread=(max(planned_s) - min(planned_s)) / step_s,
        extra_calls=len(plan.schedule.forward)
        + len(plan.schedule.backward)
        - len(plan.problem.operations),
        max_abs_diff=largest,
        differing=differing,
        beyond_bound=beyond,
        bound=bound_in_words(options.executor),
    )


def _compare_steps(
    expected: list[Observed], got: list[Observed], executor: str
) -> tuple[dict[str, tuple[str, ...]], dict[str, float], tuple[str, ...]]:
    """Compare several steps; with more than one, names say which."""
    differing: dict[str, tuple[str, ...]] = {}
    largest: dict[str, float] = {}
    beyond: list[str] = []
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        parts, differences, over = compare(one, other, executor)
        label = "" if len(got) == 1 else f"step {number}: "
        for rule, names in parts.items():
            differing[rule] = (*differing.get(rule, ()), *(label + name for name in names))
        largest |= {label + name: value for name, value in differences.items()}
        beyond += [label + name for name in over]
    return differing, largest, tuple(beyond)


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
