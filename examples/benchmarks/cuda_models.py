"""The models of ``cuda_acceptance.py`` in plain torch: each one's forward returns its loss.

They avoid what CUDA cannot do twice with the same bits (interpolation, adaptive pooling), so that a
comparison of bits means something. With ``per_block`` set, each block runs under torch's own
activation checkpointing, for comparison.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint


class LossModel(nn.Module):
    """A module whose forward returns the loss.

    Attributes:
        per_block: Run every block under ``torch.utils.checkpoint``.
    """

    per_block = False

    def block(self, block: nn.Module, *inputs: Tensor) -> Tensor:
        """Run one block, checkpointed if asked."""
        if self.per_block:
            return checkpoint(block, *inputs, use_reentrant=False)  # type: ignore[no-any-return]
        return block(*inputs)  # type: ignore[no-any-return]


# GPT-2 (Radford et al. 2019)


class GPT2Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.norm1(x)).split(width, dim=-1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        y = self.project(y.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(y, p, self.training)
        y = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(y, p, self.training)


class GPT2(LossModel):
    """A decoder with learned positions, dropout and the output layer tied to the embedding."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int,
        length: int,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(GPT2Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = self.block(block, x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


# ResNet-50 (He et al. 2015)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.skip = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.skip(x))


class ResNet(LossModel):
    """Bottleneck blocks in four stages, with batch statistics."""

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        found: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                found.append(Bottleneck(inputs, width << stage, stride))
                inputs = 4 * (width << stage)
        self.blocks = nn.ModuleList(found)
        self.classify = nn.Linear(inputs, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, 1)
        for block in self.blocks:
            x = self.block(block, x)
        return F.cross_entropy(self.classify(x.mean((2, 3))), labels)


# UNet with group norm and attention, as in denoising diffusion (Ho et al. 2020)


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, groups: int, *, attention: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, inputs), nn.GroupNorm(groups, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.attend = nn.Conv2d(outputs, 3 * outputs, 1) if attention else None
        self.norm3 = nn.GroupNorm(groups, outputs) if attention else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        x = self.skip(x) + self.conv2(F.silu(self.norm2(y)))
        if self.attend is None or self.norm3 is None:
            return x
        batch, width, height, _ = x.shape
        parts = self.attend(self.norm3(x)).view(batch, 3, 4, width // 4, -1).transpose(-1, -2)
        q, k, v = parts.contiguous().unbind(1)  # fused attention wants the last stride to be 1
        y = F.scaled_dot_product_attention(q, k, v)
        return x + y.transpose(-1, -2).reshape(batch, width, height, -1)


class UNet(LossModel):
    """Down, across and up again, with a skip connection at each level; predicts the noise."""

    def __init__(self, widths: tuple[int, ...], groups: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, widths[0], 3, padding=1)
        down: list[nn.Module] = []
        up: list[nn.Module] = []
        inputs = widths[0]
        for level, width in enumerate(widths):
            deepest = level == len(widths) - 1
            down.append(ResidualBlock(inputs, width, groups, attention=deepest))
            inputs = width
        for width in reversed(widths[:-1]):
            up.append(ResidualBlock(inputs + width, width, groups, attention=False))
            inputs = width
        self.down, self.up = nn.ModuleList(down), nn.ModuleList(up)
        self.leave = nn.Conv2d(inputs, 3, 3, padding=1)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        x = self.enter(images)
        skips: list[Tensor] = []
        for block in self.down:
            x = F.avg_pool2d(x, 2) if skips else x
            x = self.block(block, x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = self.block(block, torch.cat([doubled(x), skips.pop()], 1))
        return torch.mean((self.leave(x) - noise).square())


def doubled(x: Tensor) -> Tensor:
    """Nearest-neighbour upsampling by two; its gradient is a plain sum, the same in every run."""
    batch, width, height, breadth = x.shape
    wide = x[:, :, :, None, :, None].expand(batch, width, height, 2, breadth, 2)
    return wide.reshape(batch, width, 2 * height, 2 * breadth)


# Llama blocks (Touvron et al. 2023): RMS norm, rotary positions, grouped queries, SwiGLU


class LlamaBlock(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int, groups: int, hidden: int, length: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up, self.down = nn.Linear(width, hidden, False), nn.Linear(hidden, width, False)
        rate = 500_000.0 ** (-torch.arange(0, self.size, 2).float() / self.size)
        angle = torch.arange(length).float()[:, None] * torch.cat([rate, rate])
        kind = torch.get_default_dtype()
        self.register_buffer("cos", angle.cos().to(kind), persistent=False)
        self.register_buffer("sin", angle.sin().to(kind), persistent=False)

    def rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        length = x.shape[-2]
        return x * self.cos[:length] + torch.cat([-second, first], -1) * self.sin[:length]

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, length, self.heads, self.size).transpose(1, 2)
        kv = self.kv(y).view(batch, length, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        k, v = (self.repeated(part) for part in (self.rotated(kv[0]), kv[1]))
        y = F.scaled_dot_product_attention(self.rotated(q), k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        y = self.down(F.silu(self.gate(y)) * self.up(y))
        return torch.add(x, y)

    def repeated(self, x: Tensor) -> Tensor:
        """One copy of each group for every head that shares it."""
        batch, groups, length, size = x.shape
        wide = x[:, :, None].expand(batch, groups, self.heads // groups, length, size)
        return wide.reshape(batch, self.heads, length, size)


class Llama(LossModel):
    """A stack of blocks between given states and a regression loss."""

    def __init__(
        self, layers: int, width: int, heads: int, groups: int, hidden: int, length: int
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            LlamaBlock(width, heads, groups, hidden, length) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)

    def forward(self, states: Tensor, targets: Tensor) -> Tensor:
        x = states
        for block in self.blocks:
            x = self.block(block, x)
        return torch.mean((self.norm(x) - targets).float().square())


@dataclass(frozen=True, slots=True)
class Case:
    """One model with its arguments.

    Attributes:
        name: On the command line.
        make: Builds module and arguments on torch's default device, tiny or as measured.
        shallow: The same with fewer blocks, for an executor that compiles slowly; None: as it is.
    """

    name: str
    make: Callable[[bool], tuple[LossModel, tuple[Tensor, ...]]]
    shallow: Callable[[bool], tuple[LossModel, tuple[Tensor, ...]]] | None = None


def gpt2(tiny: bool, layers: int = 12) -> tuple[LossModel, tuple[Tensor, ...]]:
    """GPT-2 small (124 million parameters) on 4 x 1,024 tokens."""
    layers, width, heads, vocabulary, batch, length = (
        (3, 32, 4, 31, 4, 64) if tiny else (layers, 768, 12, 50_257, 4, 1_024)
    )
    model = GPT2(layers, width, heads, vocabulary, length)
    tokens = torch.randint(vocabulary, (2, batch, length))
    return model, (tokens[0].clone(), tokens[1].clone())


def resnet50(tiny: bool) -> tuple[LossModel, tuple[Tensor, ...]]:
    """ResNet-50 (26 million parameters) on 64 images."""
    blocks, width, classes, batch, size = (
        ((1, 1), 8, 10, 2, 32) if tiny else ((3, 4, 6, 3), 64, 1_000, 64, 224)
    )
    model = ResNet(blocks, width, classes)
    return model, (torch.randn(batch, 3, size, size), torch.randint(classes, (batch,)))


def unet(tiny: bool) -> tuple[LossModel, tuple[Tensor, ...]]:
    """A UNet of four levels on 16 images."""
    widths, groups, batch, size = (
        ((8, 16), 4, 2, 16) if tiny else ((128, 256, 384, 512), 32, 16, 128)
    )
    shape = (batch, 3, size, size)
    return UNet(widths, groups), (torch.randn(shape), torch.randn(shape))


def llama(tiny: bool) -> tuple[LossModel, tuple[Tensor, ...]]:
    """Five bf16 blocks of the size of an 8-billion model's (1.1 billion parameters), 2 x 2,048."""
    layers, width, heads, groups, hidden, batch, length = (
        (2, 64, 4, 2, 128, 2, 16) if tiny else (5, 4_096, 32, 8, 14_336, 2, 2_048)
    )
    kind = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Llama(layers, width, heads, groups, hidden, length)
        states = torch.randn(2, batch, length, width)
    finally:
        torch.set_default_dtype(kind)
    return model, (states[0].clone(), states[1].clone())


CASES = (
    Case("gpt2", gpt2, shallow=partial(gpt2, layers=6)),
    Case("resnet50", resnet50),
    Case("unet", unet),
    Case("llama", llama),
)
