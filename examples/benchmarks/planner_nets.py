"""Networks of the planner's benchmark that are written out here: each returns its loss.

They are deep and plain, so that their joint graphs are long: a transformer with SwiGLU in which
every product, norm and rotation is an operator of its own, a recurrent network unrolled cell by
cell, and a residual network whose blocks hold no more inside than between them.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class LossOf(nn.Module):
    """Another module's loss, without its other outputs.

    Args:
        model: Its output has ``loss``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


class CrossEntropy(nn.Module):
    """A classifier with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)


class Denoising(nn.Module):
    """A diffusion network that predicts the noise in its input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(self.model(images + noise, times).sample, noise)


# A decoder with RMS norm, rotary positions and SwiGLU (Shazeer 2020), operator by operator


class RootMeanSquare(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class SwigluBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RootMeanSquare(width), RootMeanSquare(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            project(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        scores = rotated(q, cos, sin) @ rotated(k, cos, sin).transpose(-1, -2)
        shares = torch.softmax(scores * q.shape[-1] ** -0.5 + mask, -1)
        return self.o((shares @ v).transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x), cos, sin, mask)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Swiglu(nn.Module):
    cos: Tensor
    sin: Tensor
    mask: Tensor

    def __init__(
        self, layers: int, width: int, heads: int, hidden: int, length: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(SwigluBlock(width, heads, hidden) for _ in range(layers))
        self.norm = RootMeanSquare(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        rate = 10_000.0 ** (-torch.arange(0, size, 2).float() / size)
        angle = torch.arange(length).float()[:, None] * torch.cat([rate, rate])
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        self.register_buffer("mask", torch.full((length, length), -1e9).triu(1))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, self.mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class UnrolledLSTM(nn.Module):
    """An LSTM cell (Hochreiter and Schmidhuber 1997) run step by step; its last state is read out.

    A readout of every state would stack them all, and that stack would bound every plan.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.given, self.kept = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.readout = nn.Linear(width, width)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = cell = inputs.new_zeros(inputs.shape[1], self.width)
        for x in inputs.unbind():
            enter, forget, leave, new = (self.given(x) + self.kept(hidden)).chunk(4, -1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
            hidden = torch.sigmoid(leave) * torch.tanh(cell)
        return F.mse_loss(self.readout(hidden), targets)


class ResidualMLP(nn.Module):
    """Blocks ``x + W2(relu(W1 x))`` with a hidden width that is no larger than that of ``x``."""

    def __init__(self, blocks: int, width: int, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, targets)
