"""Tiny models that draw random numbers in every way torch knows, after what users report."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.steps import Made, Make, bound, leaf


def dropouts_of_channels() -> Made:
    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv1d(4, 6, 3), nn.Conv2d(1, 5, 3)
            self.conv3 = nn.Conv3d(1, 4, 2)
            self.drops = nn.ModuleList([nn.Dropout1d(0.3), nn.Dropout2d(0.4), nn.Dropout3d(0.5)])

        def forward(self, x: torch.Tensor) -> Any:
            h = self.drops[0](self.conv1(x)).sin()
            h = self.drops[1](self.conv2(h[:, None])).tanh()
            return self.drops[2](self.conv3(h[:, None])).exp().mean((2, 3))

    return Channels(), (leaf(3, 4, 9),)


def dropouts_of_self_normalising_nets() -> Made:
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)

    def step(x: torch.Tensor) -> Any:
        h = functional.alpha_dropout(functional.selu(a(x)), 0.2, training=True)
        h = functional.feature_alpha_dropout(b(h)[:, :, None, None], 0.3, training=True)
        return torch.exp(h.flatten(1).sin())

    return bound(step, a, b), (leaf(21, 8),)


def leaks_drawn() -> Made:
    net = nn.Sequential(nn.Linear(8, 8), nn.RReLU(0.1, 0.4), nn.Linear(8, 8), nn.RReLU())
    return net, (leaf(21, 8),)


def choices_relaxed() -> Made:
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> Any:
        soft = functional.gumbel_softmax(layer(x), tau=0.7)
        hard = functional.gumbel_softmax(layer(soft), tau=0.5, hard=True)
        return hard @ x.t(), soft.exp()

    return bound(step, layer), (leaf(21, 8),)


def noise_of_many_kinds() -> Made:
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> Any:
        h = layer(x)
        h = h * torch.randn_like(h).exp() + torch.rand(h.shape, device=h.device)
        h = torch.tanh(h) + torch.normal(0.0, 0.1, h.shape)
        h = h * torch.normal(torch.zeros_like(h), h.detach().abs() + 0.1)
        return torch.sin(h * torch.randint(0, 3, h.shape)).exp() * torch.randint_like(h, 1, 5)

    return bound(step, layer), (leaf(21, 8),)


def coins_and_lots() -> Made:
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> Any:
        p = layer(x).softmax(-1)
        drawn = torch.multinomial(p.detach(), 3)
        coins = torch.bernoulli(p.detach()) + torch.bernoulli(p.detach(), 0.25)
        order = torch.randperm(8)
        return p.gather(1, drawn).log() * coins[:, order[:3]], (p[:, order] * coins).exp(), drawn

    return bound(step, layer), (leaf(21, 8),)


def draws_in_place() -> Made:
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> Any:
        h = layer(x).sin()
        mask = torch.empty_like(h).bernoulli_(0.6)
        noise = torch.empty(21, 8).uniform_(0.5, 1.5)
        heavy = torch.empty(21, 8).exponential_() + torch.empty(21, 8).log_normal_(std=0.2)
        g = (h * mask * noise).exp() * torch.zeros(21, 8).normal_(1, 0.5)
        return g.tanh() * heavy, torch.empty(8).cauchy_().geometric_(0.5) * h

    return bound(step, layer), (leaf(21, 8),)


def nothing_or_everything_dropped() -> Made:
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> Any:
        h = functional.dropout(layer(x).sin(), 0.0)
        gone = functional.dropout(layer(h).exp(), 1.0)
        left = functional.dropout(h.tanh(), 0.5, training=False)
        return functional.dropout(gone + left.exp(), 0.3)

    return bound(step, layer), (leaf(21, 8),)


def dropped_and_written() -> Made:
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> Any:
        h, g = layer(x).sin(), layer(x).cos()
        functional.dropout(h, 0.0).mul_(2)  # the argument itself
        functional.dropout(g, 0.4, training=False).add_(1)
        return h * g, functional.dropout(h.exp(), 0.0)

    return bound(step, layer), (leaf(21, 8),)


def dropped_with_scales_that_round() -> Made:
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> Any:
        h = layer(x)
        for p in (0.15, 0.04, 0.255, 0.3):
            h = functional.dropout(layer(h.sin()), p).exp()
        q = h.view(3, 1, 7, 8)
        return functional.scaled_dot_product_attention(q, q, q, dropout_p=0.15)

    return bound(step, layer), (leaf(21, 8),)


def attention_module() -> Made:
    attend = nn.MultiheadAttention(12, 3, dropout=0.3, batch_first=True)

    def step(x: torch.Tensor, memory: torch.Tensor) -> Any:
        y, weights = attend(x, memory, memory)
        z, _ = attend(y, x, x, need_weights=False)
        return z.sin(), weights

    return bound(step, attend), (leaf(2, 5, 12), leaf(2, 7, 12))


def encoder_layer() -> Made:
    layers = [
        nn.TransformerEncoderLayer(12, 3, 20, dropout=0.2, batch_first=True, norm_first=first)
        for first in (False, True)
    ]
    return nn.Sequential(*layers), (leaf(2, 6, 12),)


def decoder_layer() -> Made:
    layer = nn.TransformerDecoderLayer(12, 3, 20, dropout=0.2, batch_first=True)
    return layer, (leaf(2, 6, 12), leaf(2, 4, 12))


def masked_attention() -> Made:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(12, 36)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
            q, k, v = self.mix(x).view(2, 7, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
            a = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.3)
            b = functional.scaled_dot_product_attention(q, a, v, is_causal=True)
            return b.exp()

    return Masked(), (leaf(2, 7, 12), torch.rand(7, 7) > 0.3)


def recurrent_net_with_dropout() -> Made:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.RNN(5, 6, num_layers=2, dropout=0.4, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            h, last = self.net(x)
            return h.sin(), last

    return Recurrent(), (leaf(3, 6, 5),)


def generator_forked() -> Made:
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> Any:
        h = functional.dropout(layer(x), 0.3)
        with torch.random.fork_rng(devices=[]):
            h = functional.dropout(layer(h.sin()), 0.3)
        return functional.dropout(h.exp(), 0.3)

    return bound(step, layer), (leaf(21, 8),)


def seeded_inside() -> Made:
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> Any:
        torch.manual_seed(3)
        return functional.dropout(layer(x).sin(), 0.3).exp()

    return bound(step, layer), (leaf(21, 8),)


def own_generator() -> Made:
    layer, generator = nn.Linear(8, 8), torch.Generator().manual_seed(5)

    def step(x: torch.Tensor) -> Any:
        return layer(x).sin() * torch.rand(21, 8, generator=generator)

    return bound(step, layer), (leaf(21, 8),)


def layers_dropped() -> Made:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            for number, layer in enumerate(self.layers):
                keep = (torch.rand(x.shape[0], 1) > 0.1 * (number + 1)).to(x.dtype)
                x = x + keep * functional.gelu(layer(x)) / (1 - 0.1 * (number + 1))
            return x

    return Deep(), (leaf(21, 8),)


def variational() -> Made:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(8, 6), nn.Linear(3, 8)

        def forward(self, x: torch.Tensor) -> Any:
            mean, log_std = self.encode(x.tanh()).chunk(2, -1)
            normal = torch.distributions.Normal(mean, log_std.exp(), validate_args=False)
            z = normal.rsample()
            gap = log_std.exp().square() + mean.square() - 2 * log_std
            return self.decode(z).sigmoid(), gap.sum(-1)

    return Coder(), (leaf(21, 8),)


def one_net_called_twice() -> Made:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 8))

    def step(x: torch.Tensor) -> Any:
        first, second = net(x), net(x)
        return (first - second).square().mean() + functional.cosine_similarity(first, second).sum()

    return bound(step, net), (leaf(21, 8),)


def pooling_at_random() -> Made:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.FractionalMaxPool2d(2, output_size=3), nn.SiLU())
    return net, (leaf(2, 2, 10, 10),)


HOLD = (
    dropouts_of_channels, dropouts_of_self_normalising_nets, leaks_drawn, choices_relaxed,
    noise_of_many_kinds, coins_and_lots, draws_in_place, attention_module, encoder_layer,
    decoder_layer, masked_attention, layers_dropped, variational, one_net_called_twice,
    pooling_at_random, nothing_or_everything_dropped, dropped_and_written,
    dropped_with_scales_that_round,
)  # fmt: skip
# AOTAutograd adds up gradients in another order than eager.
AS_TRACED: tuple[Make, ...] = ()
UNMEASURED: tuple[Make, ...] = ()
OPEN: tuple[Make, ...] = ()
# Refused in words that name the line.
REFUSED: tuple[Make, ...] = (
    generator_forked, seeded_inside, own_generator, recurrent_net_with_dropout,
)  # fmt: skip
