"""Tensors that an autograd function keeps on ctx, which eager frees with the node and never checks.

AOTAutograd keeps them in a list of its own, beside what goes through ``save_for_backward``.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function

import fxremat
from tests.steps import (
    QUICK,
    Made,
    apply,
    bound,
    budgets_of,
    captured,
    differing,
    hold_at_every_budget,
    leaf,
    made,
    measures_as_predicted,
    run,
)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Gate(Function):
    """Keeps a value of its own beside its arguments."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        ctx.save_for_backward(x, w)
        ctx.y = y.sigmoid()
        return y * ctx.y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, w = ctx.saved_tensors
        gy = gradients[0] * ctx.y
        return gy @ w.t(), x.t() @ gy


class Many(Function):
    """Keeps a list of values, a view of one, and an argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        ctx.parts = [y.sin(), y.cos()]
        ctx.turned, ctx.x, ctx.w = y.exp().t(), x, w
        return y.tanh()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gy = gradients[0] * ctx.parts[0]
        gy = gy * ctx.parts[1] + ctx.turned.t()
        return gy @ ctx.w.t(), ctx.x.t() @ gy


class Result(Function):
    """Keeps what it returns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.y = (x @ w).exp()
        ctx.save_for_backward(x, w)
        return ctx.y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, w = ctx.saved_tensors
        gy = gradients[0] * ctx.y
        return gy @ w.t(), x.t() @ gy


def through(function: Any, layers: int = 1) -> Made:
    weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(layers)])

    def step(x: torch.Tensor) -> Any:
        for w in weights:
            x = apply(function, x, w) * 0.1
        return x

    return bound(step, weights), (leaf(17, 8),)


FUNCTIONS = pytest.mark.parametrize("function", [Gate, Many, Result])
MEASURED = pytest.mark.parametrize(
    "function", [Gate, pytest.param(Many, marks=pytest.mark.slow), Result]
)


@MEASURED
def test_what_ctx_keeps_is_counted_and_freed_as_planned(function: Any) -> None:
    def make() -> Made:
        return through(function, 3)

    for budget_bytes in budgets_of(captured(make), 1, 0.5):
        torch._dynamo.reset()
        measures_as_predicted(make, budget_bytes)
    torch._dynamo.reset()
    hold_at_every_budget(make)


@FUNCTIONS
def test_a_kept_graph_finds_what_ctx_keeps_again(function: Any) -> None:
    def twice(wrap: Any) -> list[torch.Tensor]:
        fn, (x,) = made(lambda: through(function))
        call = wrap(fn)
        loss = call(x).sum()
        loss.backward(retain_graph=True)
        first = x.grad.clone()
        loss.backward()
        return [first, x.grad]

    expected = twice(lambda fn: fn)
    for one, other in zip(
        expected, twice(lambda fn: fxremat.optimize(fn, "1MiB", **QUICK)), strict=True
    ):
        assert torch.equal(one, other)


def test_an_output_that_ctx_keeps_may_be_written_as_in_eager() -> None:
    def gradient(wrap: Any) -> torch.Tensor:
        torch.manual_seed(0)
        w, x = torch.randn(8, 8, requires_grad=True), leaf(17, 8)
        call = wrap(lambda x: apply(Result, x, w))
        y = call(x)
        with torch.no_grad():
            y.detach().mul_(2)
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    optimised = gradient(lambda fn: fxremat.optimize(fn, "1MiB", **QUICK))
    assert torch.equal(gradient(lambda fn: fn), optimised)


@FUNCTIONS
def test_pieces_with_values_on_ctx_hold(function: Any) -> None:
    def make() -> Made:
        return through(function, 2)

    got = run(make, lambda fn: fxremat.optimize(fn, "1MiB", fullgraph=False, **QUICK))
    assert differing(run(make), got) == []
