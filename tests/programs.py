"""Small training programs, each with something that a replay must not get wrong."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Masked(nn.Module):
    """Dropouts of several kinds between matrix products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> Any:
        h = nn.functional.dropout(torch.tanh(self.wide(x)), 0.3)
        h = nn.functional.alpha_dropout(h * h.sigmoid(), 0.2, self.training)
        return x + nn.functional.dropout(self.narrow(h), 0.1)


def masked() -> tuple[Any, tuple[Any, ...]]:
    return nn.Sequential(Masked(14), Masked(14)), (torch.randn(300, 14, requires_grad=True),)


class Noisy(nn.Module):
    """Draws without a mask: only the generator's state can repeat them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(2):
            x = torch.sin(self.layer(x) * torch.rand_like(x)) + torch.bernoulli(x.sigmoid())
            x = x * torch.randn(x.shape, device=x.device).exp()
            x = nn.functional.rrelu(x, training=True)
        return x


def noisy() -> tuple[Any, tuple[Any, ...]]:
    return Noisy(), (torch.randn(64, 32, requires_grad=True),)


class Attention(nn.Module):
    """Dropout inside the fused operator."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.project, self.out = (
            heads,
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: torch.Tensor) -> Any:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.project(x).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.25, is_causal=True)
        return torch.tanh(self.out(y.transpose(1, 2).reshape(batch, length, width)))


def attention() -> tuple[Any, tuple[Any, ...]]:
    return Attention(12, 3), (torch.randn(2, 9, 12, requires_grad=True),)


class InPlace(nn.Module):
    """Writes to intermediates, directly and through views."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x)
        h[:, ::2] *= 1.5
        h.t()[1].add_(0.25)
        h.clamp_(min=-1.0)
        y = self.b(torch.sigmoid_(h))
        y += x
        return nn.functional.elu_(y)


def in_place() -> tuple[Any, tuple[Any, ...]]:
    return nn.Sequential(InPlace(9), InPlace(9)), (torch.randn(11, 9, requires_grad=True),)


def views_and_bases() -> tuple[Any, tuple[Any, ...]]:
    def many_views(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.cos(x @ w)
        left, right = h.chunk(2, dim=1)
        folded = h.unflatten(0, (3, -1)).movedim(0, 1)
        return (
            (left * right.exp()).sum(1),
            h.t() @ h,
            folded.square().sum((1, 2)),
            h.flatten()[3:50:2].tanh(),
        )

    x = torch.randn(15, 8, requires_grad=True)
    return many_views, (x, torch.randn(8, 10, requires_grad=True))


class Counting(nn.Module):
    """Reads buffers, writes them, reads them again; a counter counts."""

    gain: torch.Tensor
    calls: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("gain", torch.linspace(0.4, 1.3, width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        before = torch.exp(self.gain)
        y = torch.sin(self.layer(x) * before) * before
        with torch.no_grad():
            self.gain.mul_(0.75).add_(0.05)
            self.calls.add_(1)
        return torch.tanh(y * self.gain.clone())


def buffers() -> tuple[Any, tuple[Any, ...]]:
    return nn.Sequential(Counting(7), Counting(7)), (torch.randn(6, 7, requires_grad=True),)


def batch_norms() -> tuple[Any, tuple[Any, ...]]:
    net = nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(5, 7, 3, bias=False), nn.BatchNorm2d(7, momentum=0.3), nn.Hardswish(),
    )  # fmt: skip
    return net, (torch.randn(3, 3, 10, 10, requires_grad=True),)


class Rounded(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradients[0] * torch.cos(x) * ctx.scale, None


class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(Rounded.apply(torch.tanh(self.a(x)), 8.0) * x)  # type: ignore[no-untyped-call]


def own_function() -> tuple[Any, tuple[Any, ...]]:
    return Straight(), (torch.randn(5, 6, requires_grad=True),)


class Tied(nn.Module):
    """One weight used at both ends, a frozen layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(29, 10)
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 29, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        h = self.norm(nn.functional.gelu(self.frozen(self.words(ids))))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


def tied() -> tuple[Any, tuple[Any, ...]]:
    return Tied(), (torch.randint(0, 29, (3, 5)), torch.randint(0, 29, (3, 5)))


class Parts(nn.Module):
    """Operators that return several results, each needed by itself; integer outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.group = nn.Linear(12, 12), nn.LayerNorm(12), nn.GroupNorm(3, 12)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.norm(self.layer(x))
        top, where = h.topk(5, dim=-1)
        ordered, _ = h.sort(dim=-1)
        var, mean = torch.var_mean(h, dim=-1)
        picked = nn.functional.log_softmax(self.group(h).gather(-1, where) - top, -1)
        low, high = h.min(dim=1).values, h.max(dim=1).values
        return picked, ordered[:, :3] * var[:, None], mean, low + high, where, None, 3


def parts() -> tuple[Any, tuple[Any, ...]]:
    return Parts(), (torch.randn(7, 12, requires_grad=True),)


class Router(nn.Module):
    """Every score ties, so that the choice of experts hangs on how topk breaks ties."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 5, bias=False)
        nn.init.zeros_(self.gate.weight)
        self.experts = nn.Parameter(torch.randn(5, 6, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        score, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        mixed = torch.einsum("td,tkde->tke", x, self.experts[chosen]).relu()
        return (mixed * score[..., None]).sum(1), chosen


def ties() -> tuple[Any, tuple[Any, ...]]:
    return Router(), (torch.randn(9, 6, requires_grad=True),)


class Checkpointed(nn.Module):
    """Regions that the user already recomputes, with dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(8), nn.Linear(8, 24), nn.GELU(), nn.Dropout(0.3), nn.Linear(24, 8)
            )
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def user_regions() -> tuple[Any, tuple[Any, ...]]:
    return Checkpointed(), (torch.randn(5, 8, requires_grad=True),)


class Detached(nn.Module):
    """A branch without gradients, a detached output, a boolean output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = self.layer(x).tanh()
        with torch.no_grad():
            weights = self.teacher(h).softmax(-1)
        return {
            "out": (h * weights).exp(),
            "weights": weights,
            "stopped": h.detach() + 1,
            "positive": h > 0,
        }


def detached() -> tuple[Any, tuple[Any, ...]]:
    return Detached(), (torch.randn(4, 6, requires_grad=True),)


def low_precision() -> tuple[Any, tuple[Any, ...]]:
    net = nn.Sequential(
        nn.Linear(6, 24), nn.GELU(), nn.Dropout(0.4), nn.Linear(24, 6), nn.Dropout(0.2)
    )
    return net.to(torch.bfloat16), (torch.randn(40, 6, dtype=torch.bfloat16, requires_grad=True),)


def transposed_dropout() -> tuple[Any, tuple[Any, ...]]:
    def step(x: torch.Tensor) -> Any:
        h = nn.functional.dropout(torch.tanh(x).transpose(1, 2), 0.3)
        return (h.transpose(1, 2).reshape(x.shape[0], -1).exp() * h.flatten(1)).sum(1)

    return step, (torch.randn(3, 40, 50, requires_grad=True),)


def written_input() -> tuple[Any, tuple[Any, ...]]:
    net = nn.Linear(6, 6)

    def step(x: torch.Tensor, cache: torch.Tensor) -> Any:
        h = torch.tanh(net(x)) * torch.exp(cache)
        with torch.no_grad():
            cache.copy_(h.detach().mean(0))
        return torch.sin(h)

    step.module = net  # type: ignore[attr-defined]
    return step, (torch.randn(5, 6, requires_grad=True), torch.zeros(6))


def recurrence() -> tuple[Any, tuple[Any, ...]]:
    cell = nn.GRUCell(4, 6)

    def step(x: torch.Tensor) -> Any:
        h = torch.zeros(3, 6)
        for t in range(x.shape[0]):
            h = cell(x[t], h)
        return h

    step.module = cell  # type: ignore[attr-defined]
    return step, (torch.randn(4, 3, 4, requires_grad=True),)


CASES = (
    masked, noisy, attention, in_place, views_and_bases, buffers, batch_norms, own_function, tied,
    parts, ties, user_regions, detached, transposed_dropout, written_input, low_precision,
)  # fmt: skip
