"""Tiny models with operators that only ``torch.library`` knows, after what users report."""

from typing import Any

import torch
from torch import nn

from tests.steps import Made, Make, apply, bound, leaf

CALLS: list[str] = []
"""Which of the operators ran; none may run twice in a step."""


@torch.library.custom_op("fxremat_kinds::swish", mutates_args=())
def swish(x: torch.Tensor, sharp: float) -> torch.Tensor:
    CALLS.append("swish")
    return x * torch.sigmoid(sharp * x)


@swish.register_fake
def _(x: torch.Tensor, sharp: float) -> torch.Tensor:
    return torch.empty_like(x)


def _swish_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], output)
    ctx.sharp = inputs[1]


def _swish_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    x, y = ctx.saved_tensors
    s = torch.sigmoid(ctx.sharp * x)
    return gradient * (s + ctx.sharp * y * (1 - s)), None


swish.register_autograd(_swish_backward, setup_context=_swish_setup)


@torch.library.custom_op("fxremat_kinds::count_", mutates_args={"counter", "total"})
def count_(counter: torch.Tensor, total: torch.Tensor, x: torch.Tensor) -> None:
    CALLS.append("count_")
    counter.add_(1)
    total.add_(x.sum(0))


@torch.library.custom_op("fxremat_kinds::scale_", mutates_args={"x"})
def scale_(x: torch.Tensor, by: float) -> None:
    CALLS.append("scale_")
    x.mul_(by)


@torch.library.custom_op("fxremat_kinds::jitter", mutates_args=())
def jitter(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    CALLS.append("jitter")
    noise = torch.rand_like(x)
    return x * noise, noise


@jitter.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _jitter_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1])


def _jitter_backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    (noise,) = ctx.saved_tensors
    return gradient * noise  # type: ignore[no-any-return]


jitter.register_autograd(_jitter_backward, setup_context=_jitter_setup)


@torch.library.custom_op("fxremat_kinds::parts", mutates_args=())
def parts(x: torch.Tensor) -> list[torch.Tensor]:
    CALLS.append("parts")
    return [x.cos(), x[:, :2] * 2, torch.tensor([x.shape[0]])]


@parts.register_fake
def _(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(x), x.new_empty(x.shape[0], 2), x.new_empty(1, dtype=torch.int64)]


OLD = torch.library.Library("fxremat_kinds_old", "DEF")
OLD.define("cube(Tensor x) -> Tensor")
OLD.impl("cube", lambda x: x**3, "CompositeExplicitAutograd")
OLD.define("mix(Tensor x, Tensor y) -> Tensor")
OLD.impl("mix", lambda x, y: torch.lerp(x, y, 0.25).tanh(), "CompositeImplicitAutograd")


class Cube(torch.autograd.Function):
    """The derivative of the older kind of operator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.ops.fxremat_kinds_old.cube(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 3 * x * x  # type: ignore[no-any-return]


def with_a_backward() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor) -> Any:
        h = swish(torch.sin(layer(x)), 1.5)
        return swish(layer(h).tanh(), 0.5).exp()

    return bound(step, layer), (leaf(33, 7),)


def writing_to_buffers() -> Made:
    class Counted(nn.Module):
        counter: torch.Tensor
        total: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(7, 7)
            self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
            self.register_buffer("total", torch.zeros(7))

        def forward(self, x: torch.Tensor) -> Any:
            h = torch.sin(self.layer(x)).exp()
            count_(self.counter, self.total, h.detach())
            return torch.tanh(h * (self.total / self.counter).clone())

    return Counted(), (leaf(33, 7),)


def writing_to_intermediates() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor) -> Any:
        h = layer(x).sin()
        with torch.no_grad():
            weight = h.exp()
            scale_(weight, 0.5)
            scale_(weight[:, 2:5], 3.0)
        return (h * weight).tanh()

    return bound(step, layer), (leaf(33, 7),)


def drawing_unseen() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor) -> Any:
        h, noise = jitter(torch.tanh(layer(x)))
        h = nn.functional.dropout(h, 0.3)
        return jitter(layer(h).exp())[0], noise.mean()

    return bound(step, layer), (leaf(33, 7),)


def returning_a_list() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor) -> Any:
        h = layer(x).sin()
        cosine, narrow, count = parts(h.detach())
        return (h * cosine).exp() / count, narrow.sum() * h.tanh()

    return bound(step, layer), (leaf(33, 7),)


def of_the_older_kind() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor) -> Any:
        h: Any = torch.ops.fxremat_kinds_old.mix(layer(x), x)
        return torch.sin(Cube.apply(h)) * h  # type: ignore[no-untyped-call]

    return bound(step, layer), (leaf(33, 7),)


def asserting() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor) -> Any:
        h = layer(x).sin()
        torch._assert_async((h.detach() < 2).all())
        torch._assert(h.shape[0] == 33, "of the shape that was meant")
        torch._check(h.dim() == 2)
        return h.exp() * h.tanh()

    return bound(step, layer), (leaf(33, 7),)


class Saves(torch.autograd.Function):
    """Saves input and output, and allocates a list of results of which some are integers."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*tensors)
        return (*(t.sin() for t in tensors), torch.tensor(len(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(g * t.cos() for g, t in zip(gradients, ctx.saved_tensors, strict=False))


def many_in_many_out() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor, other: torch.Tensor) -> Any:
        a, b, c, count = apply(Saves, layer(x), other, x * other)
        return a * b.exp() + c, count

    return bound(step, layer), (leaf(19, 7), leaf(19, 7))


HOLD = (
    with_a_backward, writing_to_buffers, writing_to_intermediates, drawing_unseen,
    returning_a_list, of_the_older_kind, asserting, many_in_many_out,
)  # fmt: skip
AS_TRACED: tuple[Make, ...] = ()
UNMEASURED: tuple[Make, ...] = ()
OPEN: tuple[Make, ...] = ()
REFUSED: tuple[Make, ...] = ()
