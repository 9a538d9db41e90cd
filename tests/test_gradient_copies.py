"""What autograd copies as it stores gradients that share memory, or that others hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.steps import Made, apply, budgets_of, captured, leaf, measures_as_predicted


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Dot(torch.autograd.Function):
    """Its gradients are its inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return (x * y).sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors
        return y, x


class Kept(torch.autograd.Function):
    """Its gradient is a value that it returns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = x.exp()
        ctx.save_for_backward(value)
        ctx.mark_non_differentiable(value)
        return value.sum(), value

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        (value,) = ctx.saved_tensors
        return value  # type: ignore[no-any-return]


def step_of(loss: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Made:
    """A step whose loss reads a small input and some weights."""
    return loss, (torch.randn(2, 64), *leaves)


def columns() -> Made:
    """Weights side by side, as in a fused projection: three slices of one gradient."""
    return step_of(
        lambda x, q, k, v: (x @ torch.cat([q, k, v], 1)).tanh().sum(),
        *(leaf(64, 64) for _ in range(3)),
    )


def rows() -> Made:
    """Weights one below the other: the slices lie as the weights do."""
    return step_of(
        lambda x, q, k: (x @ torch.cat([q, k]).t()).tanh().sum(), leaf(64, 64), leaf(64, 64)
    )


def layers() -> Made:
    """Weights stacked in a last dimension."""
    return step_of(
        lambda x, *w: (x @ torch.stack(w, -1).flatten(1)).tanh().sum(),
        *(leaf(64, 32) for _ in range(4)),
    )


def turned() -> Made:
    """One gradient, for a weight and, transposed, for another."""
    return step_of(lambda x, w, v: (x @ (w + v.t())).tanh().sum(), leaf(64, 64), leaf(64, 64))


def turned_small() -> Made:
    """The same, below the size from which a copy is made in blocks."""
    return (lambda x, w, v: (x @ (w + v.t())).tanh().sum()), (
        torch.randn(2, 16),
        leaf(16, 16),
        leaf(16, 16),
    )


def three_of_one() -> Made:
    """Two weights that get the same tensor, and one that gets it transposed."""
    return step_of(
        lambda x, w, v, u: (x @ (w + v + u.t())).tanh().sum(), *(leaf(64, 64) for _ in range(3))
    )


def two_groups() -> Made:
    """Two fused projections."""

    def loss(x: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        inner = (x @ torch.cat(w[:2], 1)).tanh()
        return (inner @ torch.cat(w[2:], 1)).tanh().sum()

    return step_of(loss, leaf(64, 32), leaf(64, 32), leaf(64, 32), leaf(64, 32))


def inputs() -> Made:
    """Gradients that are inputs."""
    return (lambda x, y: apply(Dot, x, y)), (leaf(64, 64), leaf(64, 64))


def outputs() -> Made:
    """A gradient that is an output."""
    return (lambda x: apply(Kept, x)), (leaf(64, 64),)


MAKES = (
    columns, rows, layers, turned, turned_small, three_of_one, two_groups, inputs, outputs,
)  # fmt: skip


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_copies_of_gradients_are_predicted(make: Callable[[], Made]) -> None:
    for budget_bytes in sorted(set(budgets_of(captured(make), 1, 0))):
        measures_as_predicted(make, budget_bytes)
