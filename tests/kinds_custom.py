"""Tiny models with operators and autograd functions of the user's own, after what users report."""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tests.steps import Made, Make, apply, bound, leaf


class Dirty(torch.autograd.Function):
    """Writes over its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = ctx.saved_tensors[0]
        return gradients[0] * y.sqrt()


def marked_dirty() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor) -> Any:
        return apply(Dirty, torch.sin(layer(x))).tanh()

    return bound(step, layer), (leaf(19, 7),)


class Largest(torch.autograd.Function):
    """Values and indices, which take no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, where = x.topk(count, -1)
        ctx.mark_non_differentiable(where)
        ctx.save_for_backward(where)
        ctx.shape = x.shape
        return values, where

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (where,) = ctx.saved_tensors
        zeros = torch.zeros(ctx.shape, dtype=gradients[0].dtype)
        return zeros.scatter(-1, where, gradients[0]), None


def marked_non_differentiable() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor) -> Any:
        values, where = apply(Largest, torch.sin(layer(x)), 3)
        return values.exp() * x.gather(-1, where), where

    return bound(step, layer), (leaf(19, 7),)


class Unmaterialised(torch.autograd.Function):
    """Asks for no zeros where an output has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        (x,) = ctx.saved_tensors
        first, second = gradients
        total = torch.zeros_like(x)
        if first is not None:
            total = total + first * x.cos()
        if second is not None:
            total = total - second * x.sin() * 3
        return total


def gradients_not_materialised() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor) -> Any:
        first, _ = apply(Unmaterialised, layer(x))
        both = apply(Unmaterialised, first)
        return both[0].exp() * both[1]

    return bound(step, layer), (leaf(19, 7),)


class Once(torch.autograd.Function):
    """Its backward takes no part in autograd; it keeps what it computed without gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            inner = torch.sigmoid(x @ w)
        ctx.save_for_backward(inner, x, w)
        ctx.needs = ctx.needs_input_grad
        return inner * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        inner, x, w = ctx.saved_tensors
        slope = gradients[0] * x * inner * (1 - inner)
        left = gradients[0] * inner + slope @ w.t() if ctx.needs[0] else None
        return left, x.t() @ slope if ctx.needs[1] else None


def once_and_kept_intermediates() -> Made:
    layer = nn.Linear(7, 7)
    frozen = torch.randn(7, 7)

    def step(x: torch.Tensor, w: torch.Tensor, frozen: torch.Tensor) -> Any:
        h = apply(Once, layer(x), w)
        return apply(Once, h, frozen).tanh()

    return bound(step, layer), (leaf(19, 7), leaf(7, 7), frozen)


class Attributes(torch.autograd.Function):
    """Keeps a tensor as an attribute of the context, beside other objects."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: dict[str, float]) -> torch.Tensor:
        ctx.half = x * how["scale"]
        ctx.how, ctx.shape = how, tuple(x.shape)
        return ctx.half.exp()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total = gradients[0] * ctx.half.exp() * ctx.how["scale"]
        return total.view(ctx.shape), None


def kept_as_attributes() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor) -> Any:
        return apply(Attributes, torch.tanh(layer(x)), {"scale": 0.5}).sin()

    return bound(step, layer), (leaf(19, 7),)


class SetUp(torch.autograd.Function):
    """The newer form: its context is set up apart."""

    @staticmethod
    def forward(x: torch.Tensor, power: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x**power, x.abs().log1p()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.power = inputs[1]
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, logged = ctx.saved_tensors
        own = gradients[0] * ctx.power * x ** (ctx.power - 1)
        return own + gradients[1] * x.sign() * torch.exp(-logged), None


def context_set_up() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor) -> Any:
        cube, logged = apply(SetUp, layer(x), 3)
        return torch.tanh(cube) * logged.cos()

    return bound(step, layer), (leaf(19, 7),)


class OwnDropout(torch.autograd.Function):
    """Draws in its forward and keeps the mask."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float) -> torch.Tensor:
        mask = torch.rand_like(x) >= p
        ctx.save_for_backward(mask)
        ctx.p = p
        return x * mask / (1 - p)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return gradients[0] * mask / (1 - ctx.p), None


def own_dropout() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor) -> Any:
        h = apply(OwnDropout, torch.tanh(layer(x)), 0.4)
        return apply(OwnDropout, layer(h).exp(), 0.2)

    return bound(step, layer), (leaf(39, 7),)


class DrawsInBackward(torch.autograd.Function):
    """Adds noise to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] + 0.1 * torch.randn_like(gradients[0])


def noise_on_gradients() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor) -> Any:
        h = nn.functional.dropout(torch.tanh(layer(x)), 0.3)
        return torch.exp(layer(apply(DrawsInBackward, h)))

    return bound(step, layer), (leaf(39, 7),)


class Reversed(torch.autograd.Function):
    """Turns the gradient round, and returns its input itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        ctx.strength = strength
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return -ctx.strength * gradients[0], None


def gradient_reversed() -> Made:
    layer, head = nn.Linear(7, 7), nn.Linear(7, 3)

    def step(x: torch.Tensor) -> Any:
        h = layer(x).sin().exp()
        return head(apply(Reversed, h, 0.5)).tanh(), h.cos()

    return bound(step, layer, head), (leaf(19, 7),)


class Recomputing(torch.autograd.Function):
    """A checkpoint written by hand: autograd runs within its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return torch.tanh(x @ w).exp()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = torch.tanh(x @ w).exp()
        return torch.autograd.grad(y, (x, w), gradients[0])


def checkpoint_by_hand() -> Made:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        return apply(Recomputing, x.sin(), w).cos()

    return step, (leaf(19, 7), leaf(7, 7))


HOLD = (
    marked_dirty, marked_non_differentiable, gradients_not_materialised,
    once_and_kept_intermediates, kept_as_attributes, context_set_up, own_dropout,
    noise_on_gradients, gradient_reversed,
)  # fmt: skip
AS_TRACED: tuple[Make, ...] = ()
UNMEASURED: tuple[Make, ...] = ()
OPEN: tuple[Make, ...] = ()
# Refused in words that name the line.
REFUSED: tuple[Make, ...] = (checkpoint_by_hand,)
