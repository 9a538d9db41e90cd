"""Kinds of arguments and results: how they are packed, what they share, what they are."""

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.morekinds.program import Kind, training, with_args
from tests.steps import leaf

X = (5, 6)


class Net(nn.Module):
    """Two layers with dropout; what comes out is packed by a function."""

    def __init__(self, pack: Any = lambda x, h, y: y, width: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.pack = pack

    def forward(self, x: torch.Tensor) -> Any:
        h = nn.functional.dropout(torch.tanh(self.first(x)), 0.3)
        return self.pack(x, h, self.second(h))


def packed(pack: Any) -> Kind:
    return training(Net(pack), with_args(leaf(*X)), with_args(leaf(*X)))


@dataclass
class Result:
    hidden: torch.Tensor
    logits: torch.Tensor
    extra: Any = None


class Pair(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor


def dict_output() -> Kind:
    return packed(lambda x, h, y: {"h": h, "deep": [{"y": y.exp()}, (y.sin(), None, "text", 3)]})


def dataclass_output() -> Kind:
    return packed(lambda x, h, y: Result(h, y * 2, extra=[y.cos()]))


def named_tuple_output() -> Kind:
    return packed(lambda x, h, y: Pair(h, y))


def ordered_dict_output() -> Kind:
    return packed(lambda x, h, y: collections.OrderedDict(b=y, a=h))


def views_of_one_output() -> Kind:
    net = Net(lambda x, h, y: (y[:, :3], y[:, 3:], y.t()))  # autograd adds their gradients up
    return training(net, with_args(leaf(*X)), with_args(leaf(*X)), measured=False, traced=True)


def chunks_output() -> Kind:
    kind = packed(lambda x, h, y: y.sin().chunk(3, -1))
    return Kind(kind.fn, kind.program, kind.module, None)


def input_as_output() -> Kind:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x, torch.exp(y) * x, y

    return training(step, with_args(torch.randn(*X), leaf(*X)), measured=False)


def differentiable_input_as_output() -> Kind:
    return training(Net(lambda x, h, y: (x, y)), with_args(leaf(*X)), measured=False)


def view_of_input_as_output() -> Kind:
    return training(Net(lambda x, h, y: (x[1:], y, x.t())), with_args(leaf(*X)), measured=False)


def parameter_as_output() -> Kind:
    net = Net()

    def step(x: torch.Tensor) -> Any:
        return net(x), net.first.weight, net.second.bias

    return training(step, with_args(leaf(*X)), with_args(leaf(*X)), module=net, measured=False)


def complex_output() -> Kind:
    def step(x: torch.Tensor) -> Any:
        spectrum = torch.fft.rfft(torch.tanh(x))
        return spectrum * torch.exp(spectrum.abs())

    def program(call: Any) -> Any:
        x = leaf(4, 10)
        for number in range(2):
            output = call(x)
            yield f"{number} out", output
            output.abs().square().sum().backward()
            yield f"{number} gradient", x.grad
            x.grad = None

    return Kind(step, program)


def complex_parameters() -> Kind:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> Any:
            h = torch.complex(x, x.sin()) @ self.weight
            return torch.view_as_real(h * h.conj()).sum(-1), h.abs()

    return training(Turned(), with_args(leaf(*X)), with_args(leaf(*X)))


def scalar_output() -> Kind:
    return packed(lambda x, h, y: (y.sum(), y.mean(), h.max()))


def no_dimension_input() -> Kind:
    def step(scale: torch.Tensor, x: torch.Tensor) -> Any:
        return torch.exp(x * scale).sum() + torch.sin(scale)

    return training(step, with_args(leaf(), leaf(*X)), with_args(leaf(), leaf(*X)))


def empty_tensors() -> Kind:
    def step(x: torch.Tensor, none: torch.Tensor) -> Any:
        joined = torch.cat([x, none])
        return torch.tanh(joined), none * 2, joined.sin()[:0]

    return training(step, with_args(leaf(4, 6), leaf(0, 6)), measured=False)


def nested_inputs() -> Kind:
    net = Net()

    def step(batch: Any, *rest: torch.Tensor) -> Any:
        x = batch["x"][0] + batch["x"][1]["deep"] * batch["scale"]
        return [net(x) * other for other in rest]

    def batch(scale: float) -> Any:
        return {"x": [leaf(*X), {"deep": leaf(*X)}], "scale": scale, "name": "a", "none": None}

    return training(
        step,
        with_args(batch(2.0), leaf(*X), leaf(1, 6)),
        with_args(batch(3.0), leaf(*X)),
        module=net,
    )


def keywords_and_defaults() -> Kind:
    default = torch.linspace(0, 1, 6)
    net = Net()

    def step(
        *, x: torch.Tensor, shift: torch.Tensor = default, mode: str = "sin", flag: bool = False
    ) -> Any:
        h = net(x + shift)
        return (h.sin() if mode == "sin" else h.exp()) * (2 if flag else 1)

    return training(
        step,
        with_args(x=leaf(*X)),
        with_args(x=leaf(*X), shift=leaf(6), mode="exp", flag=True),
        module=net,
    )


def dataclass_input() -> Kind:
    net = Net()

    def step(batch: Result) -> Any:
        return net(batch.hidden) * batch.logits.exp()

    return training(
        step,
        with_args(Result(leaf(*X), leaf(*X))),
        with_args(Result(leaf(*X), torch.randn(*X))),
        module=net,
    )


def same_tensor_passed_twice() -> Kind:
    def step(a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.tanh(a @ b.t()).exp() * a.sum()

    x = leaf(4, 4)
    return training(step, with_args(x, x), with_args(leaf(4, 4), leaf(4, 4)), with_args(x, x))


def inputs_that_are_views() -> Kind:
    def step(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        return torch.exp(a * b.t()).tanh() * c

    x = torch.randn(6, 6)
    return training(step, with_args(x[:4, :4], x[2:, 2:], leaf(4, 4)))


def intermediate_inputs() -> Kind:
    net, front = Net(), nn.Linear(6, 6)

    def program(call: Any) -> Any:
        for number in range(2):
            x = torch.randn(*X)
            h = front(x).relu()
            h.retain_grad()
            output = call(h)
            yield f"{number} out", output
            output.square().sum().backward()
            yield f"{number} gradients", (h.grad, front.weight.grad)
            front.zero_grad()
            net.zero_grad()

    return Kind(net, program)


def strided_inputs() -> Kind:
    def step(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        return torch.sin(a) * torch.exp(b).tanh(), (c.cos() * a).contiguous()

    def spread(*size: int) -> torch.Tensor:
        return torch.randn(*size).t().requires_grad_()

    wide = torch.randn(1, 6).expand(5, 6)
    return training(
        step, with_args(spread(6, 5), wide, torch.randn(10, 12)[::2, ::2]), measured=False
    )


def channels_last() -> Kind:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 3, 3)
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 9, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    return training(net, with_args(x), with_args(torch.randn(2, 3, 9, 8)), traced=True)


CASES = (
    dict_output, dataclass_output, named_tuple_output, ordered_dict_output,
    views_of_one_output, chunks_output, input_as_output, differentiable_input_as_output,
    view_of_input_as_output, parameter_as_output, complex_output,
    complex_parameters, scalar_output, no_dimension_input, empty_tensors,
    nested_inputs, keywords_and_defaults, dataclass_input, same_tensor_passed_twice,
    inputs_that_are_views, intermediate_inputs, strided_inputs, channels_last,
)  # fmt: skip
