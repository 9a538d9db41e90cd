"""Training steps run twice, as torch runs them and under a plan, and compared bit for bit."""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import fxremat
from fxremat.check import same_bits
from fxremat.passes.seeding import tensors_in

Make = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
"""Makes a fresh callable and its arguments, the same ones each time."""

CACHE = tempfile.mkdtemp(prefix="fxremat-tests-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

QUICK: dict[str, Any] = {"costs": "uniform", "cache_dir": CACHE}
"""Options of tests for which it does not matter what things cost."""


def made(make: Make) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A fresh callable with parameters and arguments drawn from one seed."""
    torch.manual_seed(7)
    return make()


def owner_of(fn: Callable[..., Any]) -> nn.Module | None:
    """The module whose parameters and buffers are watched."""
    return fn if isinstance(fn, nn.Module) else getattr(fn, "module", None)


def weighted_sum(output: Any) -> torch.Tensor:
    """A loss in which every element of every differentiable output has a weight of its own."""
    total = torch.zeros(())
    for number, tensor in enumerate(t for t in tensors_in(output) if t.requires_grad):
        weights = torch.arange(tensor.numel()).mul(0.37).add(number).cos().view(tensor.shape)
        total = total + (tensor.float() * weights).sum()
    return total


def run(
    make: Make, wrap: Callable[[Any], Any] = lambda fn: fn, steps: int = 2
) -> dict[str, torch.Tensor | None]:
    """Everything that some steps show: outputs, gradients, buffers, arguments, the generator."""
    fn, args = made(make)
    module = owner_of(fn)
    call = wrap(fn)
    torch.manual_seed(11)
    seen: dict[str, torch.Tensor | None] = {}
    for step in range(steps):
        output = call(*args)
        weighted_sum(output).backward()
        for name, tensor in _watched(output, args, module):
            seen[f"step {step} {name}"] = None if tensor is None else tensor.detach().clone()
        for tensor in (*args, *(module.parameters() if module is not None else ())):
            if isinstance(tensor, torch.Tensor):
                tensor.grad = None
    return seen | {"generator": torch.get_rng_state()}


def _watched(
    output: Any, args: tuple[Any, ...], module: nn.Module | None
) -> Iterator[tuple[str, torch.Tensor | None]]:
    for number, tensor in enumerate(tensors_in(output)):
        yield f"output {number}", tensor
        yield f"output {number} needs a gradient", torch.tensor(tensor.requires_grad)
    for number, argument in enumerate(tensors_in(args)):
        yield f"argument {number}", argument
        yield f"gradient of argument {number}", argument.grad if argument.is_leaf else None
    for name, parameter in module.named_parameters() if module is not None else ():
        yield f"gradient of {name}", parameter.grad
    for name, buffer in module.named_buffers() if module is not None else ():
        yield f"buffer {name}", buffer


def differing(
    expected: dict[str, torch.Tensor | None], got: dict[str, torch.Tensor | None]
) -> list[str]:
    """Names of what is not equal bit for bit."""
    return [n for n in {**expected, **got} if not same_bits(expected.get(n), got.get(n))]


def same_gradients(one: nn.Module, other: nn.Module) -> bool:
    """Are the gradients of two modules of one kind equal bit for bit?"""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(same_bits(a.grad, b.grad) for a, b in pairs)


def captured(make: Make, **options: Any) -> fxremat.RematProblem:
    """The problem of a step."""
    fn, args = made(make)
    return fxremat.capture(fn, args, **{**QUICK, **options})


def budgets_of(problem: fxremat.RematProblem, *fractions: float) -> list[int]:
    """Budgets between the floor (0) and the baseline (1). [bytes]"""
    baseline, floor = fxremat.frontier(problem, 2)
    span_bytes = baseline.budget_bytes - floor.peak_bytes
    return [floor.peak_bytes + int(fraction * span_bytes) for fraction in fractions]


def as_traced(fn: Any) -> Any:
    """What AOTAutograd makes of a callable, without a plan: some operators then round otherwise."""
    return torch.compile(fn, backend="aot_eager")


def hold_at_every_budget(
    make: Make,
    *,
    fractions: tuple[float, ...] = (1, 0.5, 0),
    reference: Callable[[Any], Any] = lambda fn: fn,
) -> None:
    """Assert that plans change no bit of a step, and that the least of them measures as predicted.

    Args:
        make: Makes the callable and its arguments.
        fractions: Of the way from the floor to the baseline.
        reference: What to compare with; the callable itself, or ``as_traced``.
    """
    expected = run(make, reference)
    budgets = sorted(set(budgets_of(captured(make), *fractions)), reverse=True)
    for budget_bytes in budgets:
        optimised: list[Any] = []

        def wrap(fn: Any, budget_bytes: int = budget_bytes, kept: list[Any] = optimised) -> Any:
            kept.append(fxremat.optimize(fn, budget_bytes, **QUICK))
            return kept[0]

        got = run(make, wrap)
        assert differing(expected, got) == [], f"budget of {budget_bytes:,} bytes"
        report = fxremat.report(optimised[0])
        assert report.predicted_peak_bytes <= report.budget_bytes == budget_bytes
    fn, args = made(make)
    check = fxremat.verify(fn, args, budget=budgets[-1], repeats=1, **QUICK)
    check.raise_if_broken()
    measured_bytes, predicted_bytes = check.measured_peak_bytes, check.predicted_peak_bytes
    assert measured_bytes == predicted_bytes, (
        f"{measured_bytes:,} measured, {predicted_bytes:,} predicted"
    )
