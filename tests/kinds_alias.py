"""Tiny models with views, in-place writes and shared storages, after what users report."""

from typing import Any

import torch
from torch import nn

from tests.steps import Made, Make, bound, leaf


def view_kept_base_written() -> Made:
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> Any:
        h = layer(x)
        left = h[:, :4]
        kept = h.clone()[:, 4:]
        h.mul_(1.5)
        return left.sin() * kept.cos(), h.exp().sum(1)

    return bound(step, layer), (leaf(31, 8),)


def outputs_written_by_slice() -> Made:
    layer = nn.Linear(6, 9)

    def step(x: torch.Tensor) -> Any:
        y = torch.tanh(layer(x)).clone()
        y[:, 0] = 0.25
        y[1:3].add_(x[:2, :1])
        y[3:, ::2] *= y[3:, 1:].exp().mean()
        return y, y[:, 2:].sum(0)

    return bound(step, layer), (leaf(11, 6),)


def overlapping_windows() -> Made:
    layer = nn.Linear(40, 40)

    def step(x: torch.Tensor) -> Any:
        h = layer(x).sigmoid()
        windows = h.as_strided((5, 19, 4), (40, 2, 1))
        wide = h[:, None].expand(-1, 3, -1)
        return (windows * windows.flip(-1)).tanh().sum(-1), (wide * wide.exp()).mean(1)

    return bound(step, layer), (leaf(5, 40),)


def out_variants() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor) -> Any:
        h = layer(x).tanh()
        with torch.no_grad():
            scratch = torch.empty(23, 7)
            torch.mul(h, 0.5, out=scratch)
            torch.add(scratch, 1.0, out=scratch)
            largest = torch.empty(23)
            torch.amax(scratch, 1, out=largest)
        return (h * scratch).exp() / largest[:, None]

    return bound(step, layer), (leaf(23, 7),)


def through_data() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor) -> Any:
        h = layer(x)
        scale = h.data.abs().amax(1, keepdim=True)
        mask = (h.data > 0).to(h.dtype)
        return ((h / scale).sin() * mask).exp()

    return bound(step, layer), (leaf(23, 7),)


def data_written() -> Made:
    layer = nn.Linear(7, 7)

    def step(x: torch.Tensor) -> Any:
        h = layer(x) * 1.0
        h.data.clamp_(-0.5, 0.5)
        return torch.sin(h * 2).exp()

    return bound(step, layer), (leaf(23, 7),)


def complex_views() -> Made:
    def step(x: torch.Tensor, weight: torch.Tensor) -> Any:
        z = torch.fft.rfft(x, dim=-1) * torch.view_as_complex(weight)
        turned = z * torch.polar(z.abs(), z.angle().sin())
        parts = torch.view_as_real(turned)
        back = torch.fft.irfft(turned, n=16, dim=-1)
        return parts.tanh(), back.cos(), turned.conj() * z

    return step, (leaf(6, 16), leaf(9, 2))


def real_part_written() -> Made:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        z = torch.complex(x @ w, x.sin())
        z.real.mul_(0.5)
        z.imag[:, 1] += 0.25
        return z.abs().exp(), torch.view_as_real(z * z).sum(-1)

    return step, (leaf(13, 6), leaf(6, 6))


def detached_chunks_written() -> Made:
    layer = nn.Linear(8, 12)

    def step(x: torch.Tensor) -> Any:
        h = layer(x).sin()
        gates = h.detach().clone()
        first, second, third = gates.chunk(3, dim=1)
        first.zero_()
        second.mul_(third)
        rows = gates.unbind(0)
        rows[2].fill_(0.75)
        gates.split([5, 7], dim=1)[1].exp_()
        return h * gates, (h * gates.t().contiguous().t()).cos()

    return bound(step, layer), (leaf(17, 8),)


def narrowed_and_selected_written() -> Made:
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> Any:
        h = layer(x).exp() + 0.5
        h.narrow(1, 2, 3).mul_(x.narrow(1, 0, 3))
        h.select(0, 1).sub_(0.5)
        h.diagonal().fill_(0.125)
        h.view(-1)[::7].neg_()
        return torch.sin(h * h.tril(1))

    return bound(step, layer), (leaf(8, 8),)


def written_by_index() -> Made:
    layer = nn.Linear(8, 8)
    where = torch.tensor([0, 3, 3, 5, 0])

    def step(x: torch.Tensor, where: torch.Tensor) -> Any:
        h = layer(x).tanh().clone()
        h.index_add_(0, where, x[:5])
        h.scatter_add_(1, where[:, None].expand(5, 4), x[:5, :4].exp())
        h[where] = h[where] * 2
        h.masked_fill_(x < -1, 0.3)
        h.index_put_((where[:2], where[2:4]), x.new_ones(2), accumulate=True)
        return h.sin().exp()

    return bound(step, layer), (leaf(11, 8), where)


def cache_written() -> Made:
    layer = nn.Linear(6, 12)

    def step(x: torch.Tensor, cache: torch.Tensor, at: int) -> Any:
        key, value = layer(x).chunk(2, -1)
        with torch.no_grad():
            cache[:, at : at + 3] = key.detach()
        past = cache.clone()
        score = (value @ past.transpose(1, 2)).softmax(-1)
        return score @ past, score.exp()

    return bound(step, layer), (leaf(4, 3, 6), torch.zeros(4, 9, 6), 2)


def metadata_written() -> Made:
    layer = nn.Linear(6, 6)

    def step(x: torch.Tensor) -> Any:
        h = layer(x).sin()
        h.t_()
        h.unsqueeze_(0)
        g = h * h.exp()
        g.transpose_(1, 2).squeeze_(0)
        return g @ g.t(), h

    return bound(step, layer), (leaf(14, 6),)


def input_handed_back() -> Made:
    layer = nn.Linear(6, 6)

    def step(x: torch.Tensor, plain: torch.Tensor) -> Any:
        h = layer(x).sin()
        return h.exp() * plain, plain, plain.view(-1)[:4], h

    return bound(step, layer), (leaf(14, 6), torch.randn(14, 6))


def arguments_of_one_storage() -> Made:
    layer = nn.Linear(6, 6)
    base = torch.randn(20, 6)

    def step(x: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Any:
        h = layer(x).sin() * left.clone()
        with torch.no_grad():
            left.mul_(0.5)
        return torch.exp(h * right)

    return bound(step, layer), (leaf(10, 6), base[:10], base[5:15])


def one_tensor_twice() -> Made:
    layer = nn.Bilinear(6, 6, 5)
    x = leaf(14, 6)
    return layer, (x, x)


def one_output_twice() -> Made:
    layer = nn.Linear(6, 6)

    def step(x: torch.Tensor) -> Any:
        h = layer(x).sin().exp()
        return h, {"again": h, "doubled": h.tanh() * 2}

    return bound(step, layer), (leaf(14, 6),)


def activations_in_place() -> Made:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(9, 9), nn.Linear(9, 9)

        def forward(self, x: torch.Tensor) -> Any:
            h = nn.functional.dropout(self.a(x), 0.3, training=True, inplace=True)
            h = self.b(nn.functional.leaky_relu_(h, 0.2))
            h.add_(x).mul_(0.7)
            return nn.functional.silu(h, inplace=True)

    return nn.Sequential(Block(), Block()), (leaf(19, 9),)


def detached_in_place() -> Made:
    layer, other = nn.Linear(9, 9), nn.Linear(9, 9)

    def step(x: torch.Tensor) -> Any:
        h = layer(x).exp()
        stopped = (h * 2).detach_()
        return other(h).sin() * stopped

    return bound(step, layer, other), (leaf(19, 9),)


def parts_of_weights() -> Made:
    class Elastic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.big = nn.Parameter(torch.randn(12, 12) / 4)

        def forward(self, x: torch.Tensor) -> Any:
            small = nn.functional.linear(x, self.big[:7, :9])
            flat = self.big.view(-1)[5:54].view(7, 7)
            return torch.tanh(small @ flat.t()) @ self.big.t()[:7, 3:10]

    return Elastic(), (leaf(15, 9),)


def embedding_renormed() -> Made:
    words = nn.Embedding(13, 6, max_norm=1.0)
    with torch.no_grad():
        words.weight.mul_(3)

    def step(ids: torch.Tensor) -> Any:
        h = words(ids)
        return torch.sin(h).exp() @ h.transpose(-1, -2)

    return bound(step, words), (torch.randint(0, 13, (4, 7)),)


def folded_windows() -> Made:
    conv = nn.Conv1d(4, 4, 3, padding=1)

    def step(x: torch.Tensor) -> Any:
        h = conv(x).roll(2, -1)
        windows = h.unfold(-1, 4, 2)
        patches = nn.functional.unfold(h[:, :, None], (1, 3))
        return windows.flip(-1).sin() * windows, nn.functional.fold(patches.exp(), (1, 20), (1, 3))

    return bound(step, conv), (leaf(3, 4, 20),)


HOLD = (
    view_kept_base_written, overlapping_windows, out_variants, through_data, data_written,
    complex_views, real_part_written, detached_chunks_written,
    written_by_index, cache_written, input_handed_back, arguments_of_one_storage,
    one_tensor_twice, one_output_twice, activations_in_place, detached_in_place,
    parts_of_weights, embedding_renormed, folded_windows,
    outputs_written_by_slice, narrowed_and_selected_written,
)  # fmt: skip
# AOTAutograd adds up gradients in another order than eager, or draws where eager does not.
AS_TRACED: tuple[Make, ...] = (metadata_written,)
UNMEASURED: tuple[Make, ...] = ()
OPEN: tuple[Make, ...] = ()
REFUSED: tuple[Make, ...] = ()
