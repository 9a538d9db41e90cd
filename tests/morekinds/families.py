"""Small networks of well-known families, written by hand, each with the loss it is trained by."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # why: everybody calls it so

from tests.morekinds.program import Kind, training, with_args
from tests.steps import leaf


def normed(inside: int, outside: int, size: int = 3, **options: Any) -> nn.Sequential:
    convolution = nn.Conv2d(inside, outside, size, padding=size // 2, bias=False, **options)
    return nn.Sequential(convolution, nn.BatchNorm2d(outside), nn.ReLU6(inplace=True))


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.body(x)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(normed(4 + 3 * i, 3) for i in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1)


def classifier(*body: nn.Module, width: int) -> Kind:
    net = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3))
    where = torch.tensor([0, 2])

    def step(x: torch.Tensor) -> Any:
        return F.cross_entropy(net(x), where)

    return training(step, *[with_args(torch.randn(2, 2, 8, 8)) for _ in range(2)], module=net)


def residual_network() -> Kind:
    blocks = [Residual(nn.Sequential(normed(4, 4), normed(4, 4))) for _ in range(2)]
    return classifier(normed(2, 4), *blocks, width=4)


def dense_network() -> Kind:
    return classifier(normed(2, 4), Dense(), normed(16, 6, 1), width=6)


def inverted_residuals() -> Kind:
    body = nn.Sequential(
        normed(4, 12, 1), normed(12, 12, groups=12), nn.Conv2d(12, 4, 1), nn.BatchNorm2d(4)
    )
    return classifier(normed(2, 4, stride=2), Residual(body), normed(4, 6, 1), width=6)


class UNet(nn.Module):
    """Two levels, a skip connection, time added in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = normed(2, 4), normed(4, 8), normed(12, 4)
        self.time, self.out = nn.Linear(4, 8), nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> Any:
        high = self.down(x)
        low = self.middle(F.max_pool2d(high, 2))
        phase = t[:, None] * torch.exp(-torch.arange(2.0))
        low = low + self.time(torch.cat([phase.sin(), phase.cos()], -1))[:, :, None, None]
        wide = F.interpolate(low, scale_factor=2.0, mode="nearest")
        return self.out(self.up(torch.cat([wide, high], 1)))


def diffusion() -> Kind:
    net = UNet()
    kept = torch.linspace(0.99, 0.1, 10).cumprod(0)

    def step(x: torch.Tensor) -> Any:
        t = torch.randint(0, 10, (x.shape[0],))
        noise = torch.randn_like(x)
        share = kept[t][:, None, None, None]
        return F.mse_loss(net(share.sqrt() * x + (1 - share).sqrt() * noise, t.float()), noise)

    return training(step, *[with_args(torch.randn(2, 2, 8, 8)) for _ in range(2)], module=net)


def encoder_and_decoder() -> Kind:
    net = nn.Transformer(8, 2, 1, 1, 12, 0.1, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)

    def step(source: torch.Tensor, target: torch.Tensor) -> Any:
        return net(source, target, tgt_mask=mask, tgt_is_causal=True)

    return training(step, *[with_args(leaf(2, 5, 8), leaf(2, 4, 8))] * 2, module=net)


def gated() -> Kind:
    words, head = nn.Embedding(17, 6), nn.Linear(10, 3)
    cells = nn.GRU(6, 5, batch_first=True, bidirectional=True)
    net = nn.ModuleList([words, cells, head])

    def step(ids: torch.Tensor, where: torch.Tensor) -> Any:
        found, _ = cells(words(ids))
        return F.cross_entropy(head(found.amax(1)), where)

    ids = torch.randint(0, 17, (3, 4))
    return training(step, *[with_args(ids, torch.tensor([0, 2, 1]))] * 2, module=net)


class Graph(nn.Module):
    """Messages along edges, added up at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(12, 6), nn.GRUCell(6, 6)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> Any:
        for _ in range(2):
            sent = self.message(torch.cat([x[ends[0]], x[ends[1]]], -1)).relu()
            x = self.update(torch.zeros_like(x).index_add(0, ends[1], sent), x)
        return x.scatter_reduce(0, ends[:1].t().expand(-1, 6), x[ends[0]], "amax")


def graph_network() -> Kind:
    ends = torch.tensor([[0, 1, 2, 3, 4, 4, 0], [1, 2, 3, 4, 0, 2, 2]])
    return training(Graph(), with_args(leaf(5, 6), ends), traced=True)


def recommender() -> Kind:
    tables = nn.ModuleList(nn.EmbeddingBag(11, 4, mode="sum") for _ in range(3))
    top = nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 1))
    net = nn.ModuleList([tables, top])

    def step(dense: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> Any:
        found = torch.stack([dense, *(table(ids) for table in tables)], 1)
        crossed = found @ found.mT
        low = torch.tril_indices(4, 4, -1)
        pairs = torch.cat([crossed[:, low[0], low[1]], dense[:, :1]], -1)
        return F.binary_cross_entropy_with_logits(top(pairs).squeeze(-1), y)

    calls = with_args(leaf(5, 4), torch.randint(0, 11, (5, 3)), torch.rand(5))
    return training(step, calls, calls, module=net)


CASES = (
    residual_network, dense_network, inverted_residuals, diffusion,
    encoder_and_decoder, gated, graph_network, recommender,
)  # fmt: skip
