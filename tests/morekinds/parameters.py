"""Kinds of parameters: tied, viewed, frozen, merged, parametrised, made outside."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # why: everybody calls it so

from tests.morekinds.program import Kind, training, with_args
from tests.steps import leaf


def tokens(*size: int) -> torch.Tensor:
    return torch.randint(0, 17, size)


class ThreeTimes(nn.Module):
    """One matrix as the embedding, transposed in the middle and as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(17, 6)
        self.middle, self.head = nn.Linear(17, 6, bias=False), nn.Linear(6, 17, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> Any:
        h = self.words(ids).tanh()
        return self.head((h @ self.words.weight.t()).softmax(-1) @ self.words.weight)


def tied_in_three_places() -> Kind:
    return training(ThreeTimes(), with_args(tokens(3, 4)), with_args(tokens(3, 4)))


class Cast(nn.Module):
    """A weight that is used as a view, transposed, sliced, and in another type."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(36))

    def forward(self, x: torch.Tensor) -> Any:
        square = self.weight.view(6, 6)
        h = (x.bfloat16() @ square.t().bfloat16()).float().tanh()
        return (h @ square[:, :3]).exp() * self.weight[:3], (x.double() @ square.double()).sin()


def viewed_and_cast() -> Kind:
    return training(Cast(), with_args(leaf(5, 6)), with_args(leaf(5, 6)))


class Adapted(nn.Module):
    """A frozen layer with a low-rank update, merged by a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 2))
        self.merged = False

    def forward(self, x: torch.Tensor) -> Any:
        if self.merged:
            return F.linear(x, self.base.weight + self.up @ self.down, self.base.bias).tanh()
        h = F.dropout(x, 0.2, self.training)
        return (self.base(x) + h @ self.down.t() @ self.up.t()).tanh()


def adapter_merged_between_steps() -> Kind:
    net = Adapted()

    def merge(number: int) -> None:
        net.merged = number == 1

    calls = [with_args(leaf(5, 6)) for _ in range(3)]
    return training(nn.Sequential(net, nn.GELU(), Adapted()), *calls, between=merge)


class Held(nn.Module):
    """Parameters in a list and in a dictionary, one of them unused, buffers beside."""

    scale: torch.Tensor
    hidden: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([torch.randn(6) for _ in range(3)])
        self.named = nn.ParameterDict({"a": torch.randn(6, 6), "unused": torch.randn(4)})
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("hidden", torch.rand(6), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        for each in self.many:
            x = (x * each).sin() @ self.named["a"]
        return x * self.scale + self.hidden


def lists_and_dictionaries() -> Kind:
    return training(Held(), with_args(leaf(5, 6)), with_args(leaf(5, 6)))


def embedding_with_padding() -> Kind:
    words = nn.Embedding(17, 6, padding_idx=3, scale_grad_by_freq=True)
    bags = nn.EmbeddingBag(17, 6, mode="mean")
    both = nn.ModuleList([words, bags])

    def step(ids: torch.Tensor) -> Any:
        return (words(ids).tanh().sum(1) * bags(ids)).exp()

    return training(step, with_args(tokens(4, 5)), with_args(tokens(4, 5)), module=both)


def parameters_outside_the_module() -> Kind:
    scale = nn.Parameter(torch.randn(6))
    shift = torch.randn(6, requires_grad=True)

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> Any:
            return (self.layer(x) * scale).tanh().exp() + shift.sin()

    x = leaf(5, 6)
    kind = training(Inner(), with_args(x))

    def program(call: Any) -> Any:
        for number in range(2):
            yield from kind.program(call)
            yield f"{number} outside", (scale.grad, shift.grad)
            scale.grad = shift.grad = None

    return Kind(kind.fn, program, example=kind.example)


def no_parameters() -> Kind:
    net = nn.Sequential(nn.Tanh(), nn.Dropout(0.3), nn.Softmax(-1), nn.GELU())
    return training(net, with_args(leaf(5, 6)), with_args(leaf(5, 6)))


def shared_module_called_twice() -> Kind:
    layer = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2))
    return training(
        nn.Sequential(layer, nn.Linear(6, 6), layer, layer),
        *[with_args(leaf(5, 6)) for _ in range(2)],
    )


def parameters_in_one_flat_buffer() -> Kind:
    """Every parameter is a view of one tensor, as sharded trainers lay them."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    start = 0
    for parameter in net.parameters():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    return training(net, with_args(leaf(5, 6)), with_args(leaf(5, 6)))


CASES = (
    tied_in_three_places, viewed_and_cast, adapter_merged_between_steps, lists_and_dictionaries,
    embedding_with_padding, parameters_outside_the_module,
    no_parameters, shared_module_called_twice,
    parameters_in_one_flat_buffer,
)  # fmt: skip
