"""Tiny programs of many kinds, run as torch runs them and under plans, and compared bit for bit."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxremat
from fxremat.check import same_bits
from tests.steps import QUICK, as_traced, weighted_sum

Named = Iterator[tuple[str, Any]]
"""What a program shows, piece by piece, copied as soon as it is shown."""

Seen = dict[str, torch.Tensor | str]


class Call(NamedTuple):
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def with_args(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


@dataclass(frozen=True)
class Kind:
    """A callable and what a user does with it.

    Attributes:
        fn: What is optimised.
        program: Calls it (its argument), runs backwards, shows what comes of it.
        module: Whose parameters and buffers are watched; ``fn`` if that is a module.
        example: A call whose peak is measured at the floor; None: none is one graph by itself.
        options: Of ``fxremat.optimize``.
        traced: Compare with AOTAutograd's own trace, which rounds or returns otherwise than eager.
        fractions: Budgets to try, of the way from the floor (0) to the baseline (1).
    """

    fn: Callable[..., Any]
    program: Callable[[Callable[..., Any]], Named]
    module: nn.Module | None = None
    example: Call | None = None
    options: dict[str, Any] = field(default_factory=dict)
    traced: bool = False
    fractions: tuple[float, ...] = (1, 0.5, 0)


def training(
    fn: Callable[..., Any],
    *calls: Call,
    module: nn.Module | None = None,
    between: Callable[[int], None] = lambda number: None,
    measured: bool = True,
    traced: bool = False,
    **options: Any,
) -> Kind:
    """A step of plain gradient descent for each call.

    Args:
        fn: What is optimised.
        calls: Its arguments in each step.
        module: Whose parameters are trained, if ``fn`` is no module.
        between: Told the number of a step before it begins.
        measured: Is the peak of the first call measured?
        traced: As in ``Kind``.
        options: Of ``fxremat.optimize``.

    Returns:
        The kind.
    """
    owner = fn if isinstance(fn, nn.Module) else module

    def program(call: Callable[..., Any]) -> Named:
        for number, (args, kwargs) in enumerate(calls):
            between(number)
            output = call(*args, **kwargs)
            yield f"{number} in and out", (args, kwargs, output)
            weighted_sum(output).backward()
            yield f"{number} gradients in", gradients_of(leaves((args, kwargs)))
            if owner is not None:
                yield from state_of(owner, f"{number} ")
                descend(owner)
            clear(leaves((args, kwargs)))

    return Kind(fn, program, owner, calls[0] if measured else None, options, traced)


def gradients_of(values: Iterable[Any]) -> list[torch.Tensor | None]:
    """The gradients of leaves."""
    return [t.grad for t in values if isinstance(t, torch.Tensor) and t.is_leaf]


def state_of(module: nn.Module, start: str = "") -> Named:
    """Parameters, gradients and buffers of a module."""
    for name, parameter in module.named_parameters():
        yield f"{start}{name}", parameter
        yield f"{start}gradient of {name}", parameter.grad
    for name, buffer in module.named_buffers():
        yield f"{start}{name}", buffer


def clear(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_leaf:
            value.grad = None


def descend(module: nn.Module) -> None:
    """A step of plain gradient descent; gradients are then freed."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad.to(parameter.dtype))
    clear(module.parameters())


def leaves(value: Any) -> list[Any]:
    """What nested containers and dataclasses hold."""
    found: list[Any] = []
    for leaf in pytree.tree_leaves(value):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += [x for f in dataclasses.fields(leaf) for x in leaves(getattr(leaf, f.name))]
        else:
            found.append(leaf)
    return found


def copies(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor | str]]:
    """A value's tensors, and in words its structure, layouts and which of them are one."""
    found = leaves(value)
    yield f"{name} structure", str(pytree.tree_structure(value))
    tensors = [t for t in found if isinstance(t, torch.Tensor)]
    storages = [t.untyped_storage().data_ptr() for t in tensors]
    for number, tensor in enumerate(tensors):
        same = next(i for i, other in enumerate(tensors) if other is tensor)
        shared = storages.index(storages[number]) if tensor.numel() else number
        layout = tensor.stride() if tensor.numel() else ()
        yield (
            f"{name} layout {number}",
            f"{tensor.requires_grad} {layout} {tensor.storage_offset()} is {same} on {shared}",
        )
        yield f"{name} {number}", tensor.detach().resolve_conj().clone()
    yield f"{name} rest", repr([v for v in found if not isinstance(v, torch.Tensor)])


def observe(make: Callable[[], Kind], wrap: Callable[[Kind], Any]) -> Seen:
    """Everything that a program shows, the state it leaves, and the generator."""
    torch.manual_seed(7)
    kind = make()
    call = wrap(kind)
    torch.manual_seed(11)
    seen: Seen = {}
    for name, value in kind.program(call):
        seen |= dict(copies(name, value))
        del value  # an output that is still there waits for its backward
    module = kind.fn if isinstance(kind.fn, nn.Module) else kind.module
    for name, value in state_of(module, "end ") if module is not None else ():
        seen |= dict(copies(name, value))
    return seen | {"generator": torch.get_rng_state()}


def unequal(expected: Seen, got: Seen) -> list[str]:
    """Names of what is not equal bit for bit."""

    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return same_bits(a, b)
        return bool(type(a) is type(b) and a == b)

    return [
        f"{n}: {_short(expected.get(n))}, {_short(got.get(n))}"
        for n in {**expected, **got}
        if not equal(expected.get(n), got.get(n))
    ]


def _short(value: torch.Tensor | str | None) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else str(value)


class Watched:
    """A callable under a budget that never binds; it knows the least budget of all its calls."""

    def __init__(self, kind: Kind) -> None:
        self.fn = fxremat.optimize(kind.fn, 1 << 40, **{**QUICK, **kind.options})
        self.floor_bytes = self.baseline_bytes = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.fn(*args, **kwargs)
        report = fxremat.report(self.fn)
        self.floor_bytes = max(self.floor_bytes, report.floor_bytes)
        self.baseline_bytes = max(self.baseline_bytes, report.baseline_peak_bytes)
        return output


def range_of(make: Callable[[], Kind]) -> tuple[Seen, int, int]:
    """What a program shows with room for everything, its floor and its baseline. [bytes]"""
    kept: list[Watched] = []

    def watch(kind: Kind) -> Watched:
        kept.append(Watched(kind))
        return kept[0]

    seen = observe(make, watch)
    return seen, kept[0].floor_bytes, kept[0].baseline_bytes


def hold(make: Callable[[], Kind]) -> None:
    """Assert that plans change no bit of a program, and that the least of them is exact."""
    traced, fractions = make().traced, make().fractions
    expected = observe(make, lambda kind: as_traced(kind.fn) if traced else kind.fn)
    seen, floor_bytes, baseline_bytes = range_of(make)
    found = unequal(expected, seen)
    assert found == [], f"with room for everything: {found}"
    for fraction in fractions:
        budget_bytes = floor_bytes + int(fraction * (baseline_bytes - floor_bytes))
        got = observe(make, under(budget_bytes))
        found = unequal(expected, got)
        assert found == [], f"budget of {budget_bytes:,} bytes: {found}"
    with pytest.raises(fxremat.InfeasibleBudgetError):
        observe(make, under(floor_bytes - 1))
    exact_at_the_floor(make)


def under(budget_bytes: int) -> Callable[[Kind], Any]:
    """Optimises a kind's callable."""
    return lambda kind: fxremat.optimize(kind.fn, budget_bytes, **{**QUICK, **kind.options})


def exact_at_the_floor(make: Callable[[], Kind]) -> None:
    """Assert that the floor of the example's step is measured as predicted."""
    torch.manual_seed(7)
    kind = make()
    if kind.example is None:
        return
    options = {**QUICK, **kind.options}
    args, kwargs = kind.example
    problem = fxremat.capture(kind.fn, args, kwargs, **options)
    budget_bytes = fxremat.frontier(problem, 2)[-1].peak_bytes
    check = fxremat.verify(kind.fn, args, kwargs, budget=budget_bytes, repeats=1, **options)
    check.raise_if_broken()
    measured_bytes, predicted_bytes = check.measured_peak_bytes, check.predicted_peak_bytes
    assert measured_bytes == predicted_bytes, (
        f"{measured_bytes:,} measured, {predicted_bytes:,} predicted"
    )
