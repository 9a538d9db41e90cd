"""Tiny models that quantise, calibrate and keep statistics, after what users report."""

from typing import Any

import torch
from torch import nn

from tests.steps import Made, Make, apply, bound, leaf


class Observer(nn.Module):
    """Moving least and largest value; its output is rounded by them."""

    low: torch.Tensor
    high: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("high", torch.tensor(float("-inf")))

    def forward(self, x: torch.Tensor) -> Any:
        seen = x.detach()
        self.low.copy_(torch.minimum(self.low, seen.min()))
        self.high.copy_(torch.maximum(self.high, seen.max()))
        scale = (self.high - self.low) / 255
        zero = (-self.low / scale).round().to(torch.int32)
        return torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 255)


def observed() -> Made:
    net = nn.Sequential(nn.Linear(8, 8), Observer(), nn.GELU(), nn.Linear(8, 8), Observer())
    return net, (leaf(21, 8),)


class LearnedStep(torch.autograd.Function):
    """Rounds by a step that is learned, straight through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        levels = (x / size).round().clamp(-8, 7)
        ctx.save_for_backward(x, size, levels)
        return levels * size

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, size, levels = ctx.saved_tensors
        inside = (x / size).abs() < 8
        return gradients[0] * inside, (gradients[0] * (levels - x / size * inside)).sum()


def step_learned() -> Made:
    layer, size = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.1))

    def step(x: torch.Tensor, size: torch.Tensor) -> Any:
        weight = apply(LearnedStep, layer.weight, size)
        return nn.functional.linear(apply(LearnedStep, x.sin(), size), weight, layer.bias).tanh()

    return bound(step, layer), (leaf(21, 8), size)


def quantised_per_channel() -> Made:
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> Any:
        with torch.no_grad():
            scale = layer.weight.abs().amax(1) / 127
        zero = torch.zeros(8, dtype=torch.int32)
        weight = torch.fake_quantize_per_channel_affine(layer.weight, scale, zero, 0, -128, 127)
        return nn.functional.linear(x, weight).sin().exp()

    return bound(step, layer), (leaf(21, 8),)


def module_of_torch() -> Made:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    def fake() -> Any:
        return FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    net = nn.Sequential(nn.Linear(8, 8), fake(), nn.ReLU(), nn.Linear(8, 8), fake())
    return net, (leaf(21, 8),)


def codebook_followed() -> Made:
    class Codebook(nn.Module):
        codes: torch.Tensor
        uses: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(8, 6), nn.Linear(6, 8)
            self.register_buffer("codes", torch.randn(5, 6))
            self.register_buffer("uses", torch.ones(5))

        def forward(self, x: torch.Tensor) -> Any:
            z = self.encode(x).tanh()
            chosen = torch.cdist(z.detach(), self.codes).argmin(1)
            near = self.codes[chosen]
            with torch.no_grad():
                hot = nn.functional.one_hot(chosen, 5).to(z.dtype)
                self.uses.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.mul_(0.9).add_((hot.t() @ z) / self.uses[:, None], alpha=0.1)
            straight = z + (near - z).detach()
            return self.decode(straight).sigmoid(), (z - near.detach()).square().mean(), chosen

    return Codebook(), (leaf(21, 8),)


def clipped_by_a_running_norm() -> Made:
    class Clipping(nn.Module):
        norm: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("norm", torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> Any:
            h = self.layer(x)
            self.norm.mul_(0.5).add_(h.detach().norm() * 0.5)
            h = h * (self.norm / h.detach().norm()).clamp(max=1.0)
            self.norm.clamp_(max=3.0)
            return torch.sin(h / self.norm).exp()

    return Clipping(), (leaf(21, 8),)


HOLD = (
    observed, step_learned, quantised_per_channel, codebook_followed, clipped_by_a_running_norm,
)  # fmt: skip
AS_TRACED: tuple[Make, ...] = ()
UNMEASURED: tuple[Make, ...] = ()
OPEN: tuple[Make, ...] = ()
# Refused in words that name the line.
REFUSED: tuple[Make, ...] = (module_of_torch,)
