"""Kinds of parameters: tied, viewed, frozen, merged, parametrised, made outside."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # why: everybody calls it so
from torch.nn.utils import parametrizations

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


def parametrised() -> Kind:
    net = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="matrix_exp"),
        nn.Linear(8, 3),
    )
    return training(net, with_args(leaf(5, 6)), with_args(leaf(5, 6)), measured=False)


def spectrally_normed() -> Kind:
    """Its power iteration writes two buffers in every forward."""
    net = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 8)), nn.ReLU(),
        parametrizations.spectral_norm(nn.Linear(8, 1)),
    )  # fmt: skip
    return training(net, with_args(leaf(5, 6)), with_args(leaf(5, 6)), measured=False)


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


class Averaged(nn.Module):
    """A slow copy of the weights follows the fast ones inside the forward; buffers count."""

    steps: torch.Tensor
    queue: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.randn(6, 10))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.steps += 1
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            key = F.normalize(self.slow(x), dim=1)
        query = F.normalize(self.fast(x).tanh(), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1)
        with torch.no_grad():
            self.queue.copy_(torch.cat([self.queue[:, len(x) :], key.t()], 1))
        return logits / 0.07


def momentum_contrast() -> Kind:
    return training(Averaged(), *[with_args(leaf(5, 6)) for _ in range(2)])


class Quantised(nn.Module):
    """Codes learnt by moving averages, with a straight-through gradient."""

    codes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("codes", torch.randn(9, 6))

    def forward(self, x: torch.Tensor) -> Any:
        h = self.layer(x)
        where = torch.cdist(h, self.codes).argmin(1)
        found = self.codes[where]
        if self.training:
            with torch.no_grad():
                hits = F.one_hot(where, 9).to(h.dtype)
                self.codes.lerp_(hits.t() @ h / hits.sum(0)[:, None].clamp(min=1), 0.1)
        return h + (found - h).detach(), F.mse_loss(h, found.detach()), where


def quantised_codes() -> Kind:
    return training(Quantised(), *[with_args(leaf(5, 6)) for _ in range(2)])


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
    parametrised, spectrally_normed, embedding_with_padding, parameters_outside_the_module,
    no_parameters, shared_module_called_twice, momentum_contrast, quantised_codes,
    parameters_in_one_flat_buffer,
)  # fmt: skip
