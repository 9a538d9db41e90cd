"""Training steps run twice, as torch runs them and under a plan, and compared bit for bit."""

import atexit
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxremat
from fxremat.check import same_bits
from fxremat.passes.seeding import tensors_in

Make = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
"""Makes a fresh callable and its arguments, the same ones each time."""

CACHE = tempfile.mkdtemp(prefix="fxremat-tests-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

QUICK: dict[str, Any] = {"costs": "uniform", "cache_dir": CACHE}
"""Options of tests for which it does not matter what things cost."""


Made = tuple[Callable[..., Any], tuple[Any, ...]]
"""A callable and its arguments."""


def leaf(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An argument that takes a gradient."""
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def apply(function: Any, *args: Any) -> Any:
    """Call an autograd function, of which torch does not say the types."""
    return function.apply(*args)


def bound(
    step: Callable[..., Any],
    *modules: nn.Module,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Callable[..., Any]:
    """A function with the modules that it uses, so that their state is watched.

    Args:
        step: The function.
        modules: What it uses.
        around: Makes the context in which it is called.
    """
    step.module = modules[0] if len(modules) == 1 else nn.ModuleList(modules)  # type: ignore[attr-defined]
    step.around = around  # type: ignore[attr-defined]
    return step


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
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        weights = torch.arange(real.numel()).mul(0.37).add(number).cos().view(real.shape)
        total = total + (real.float() * weights).sum()
    return total


def around(fn: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """The context in which a callable is called."""
    made_by: Any = getattr(fn, "around", contextlib.nullcontext)
    return made_by()  # type: ignore[no-any-return]


def run(
    make: Make,
    wrap: Callable[[Any], Any] = lambda fn: fn,
    steps: int = 2,
    *,
    accumulate: bool = False,
) -> dict[str, torch.Tensor | None]:
    """Everything that some steps show: outputs, gradients, state, arguments, the generator."""
    fn, args = made(make)
    module = owner_of(fn)
    call = wrap(fn)
    torch.manual_seed(11)
    seen: dict[str, torch.Tensor | None] = {}
    for step in range(steps):
        with around(fn):
            output = call(*args)
        weighted_sum(output).backward()
        for name, tensor in _watched(output, args, module):
            seen[f"step {step} {name}"] = None if tensor is None else tensor.detach().clone()
        for tensor in (*args, *(module.parameters() if module is not None else ())):
            if isinstance(tensor, torch.Tensor) and not accumulate:
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
    for name, part in module.named_modules() if module is not None else ():
        for attribute, value in vars(part).items():
            if not attribute.startswith("_"):
                yield from _attribute(f"attribute {name}.{attribute}", value)


def _attribute(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """What a module keeps in Python: tensors and numbers, also within lists and dictionaries."""
    for number, item in enumerate(pytree.tree_leaves(value)):
        if isinstance(item, torch.Tensor | int | float):
            yield f"{name} {number}", torch.as_tensor(item)


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
    with around(fn):
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
    measures_as_predicted(make, same_at_every_budget(make, fractions, reference))


def same_at_every_budget(
    make: Make,
    fractions: tuple[float, ...] = (1, 0.5, 0),
    reference: Callable[[Any], Any] = lambda fn: fn,
) -> int:
    """Assert that plans change no bit of a step.

    Returns:
        The least of the budgets. [bytes]
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
    return budgets[-1]


def measures_as_predicted(make: Make, budget_bytes: int) -> None:
    """Assert that a plan holds what it says, to the byte."""
    fn, args = made(make)
    with around(fn):
        check = fxremat.verify(fn, args, budget=budget_bytes, repeats=1, **QUICK)
    check.raise_if_broken()
    measured_bytes, predicted_bytes = check.measured_peak_bytes, check.predicted_peak_bytes
    assert measured_bytes == predicted_bytes, (
        f"{measured_bytes:,} measured, {predicted_bytes:,} predicted"
    )
