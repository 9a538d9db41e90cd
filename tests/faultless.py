"""Callables for faults to be planted in; they are sound themselves."""

from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """Something of everything: a normalisation, a dropout, values to replay."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.norm(self.a(x)))
        return self.b(torch.tanh(self.drop(h) * h.exp()))


def net() -> tuple[Any, tuple[Any, ...]]:
    return Net(), (torch.randn(200, 8),)


def evaluated() -> tuple[Any, tuple[Any, ...]]:
    return Net().eval(), (torch.randn(200, 8),)


class Two(nn.Module):
    """Returns two values with equal bits, each with memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.layer(x))
        return h, h.clone()


def two() -> tuple[Any, tuple[Any, ...]]:
    return Two(), (torch.randn(5, 6),)


def convolution() -> tuple[Any, tuple[Any, ...]]:
    layers = nn.Sequential(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.Conv2d(32, 16, 5))
    return layers, (torch.randn(2, 16, 20, 20, requires_grad=True),)


class NotANumber(nn.Module):
    """NaNs in outputs, gradients and a buffer: equal to themselves here."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.log(self.layer(x))
        self.seen.add_(h.detach().mean(0))
        return h * h.exp()


def nans() -> tuple[Any, tuple[Any, ...]]:
    return NotANumber(), (torch.randn(5, 6),)
