"""Train a DenseNet inside a budget: two steps, and what they held beside what was predicted.

A DenseNet (Huang et al. 2016, https://arxiv.org/abs/1608.06993) gives every layer all earlier
feature maps of its block, joined along the channels, so what a plain step holds grows with the
square of a block's depth. The joined maps and their norms cost little to make again, and a plan
finds that by itself.

    python examples/densenet.py
    python examples/densenet.py --layers 6 12 24 16 --growth 32 --side 224 --budget 4GiB
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fxremat
from fxremat.budget import format_bytes

DENSENET_121 = (6, 12, 24, 16)


class DenseLayer(nn.Module):
    """Norm, 1x1 convolution, norm, 3x3 convolution, on all that the block has found so far."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(4 * growth)
        self.narrow = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.convolve = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = torch.cat(features, 1)
        x = self.narrow(F.relu(self.norm1(x)))
        return self.convolve(F.relu(self.norm2(x)))  # type: ignore[no-any-return]


class DenseBlock(nn.Module):
    """Layers of which each adds ``growth`` channels."""

    def __init__(self, layers: int, inputs: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + i * growth, growth) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class Transition(nn.Module):
    """Between two blocks: half the channels, a quarter of the pixels."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.narrow = nn.Conv2d(inputs, inputs // 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.narrow(F.relu(self.norm(x))), 2)


class DenseNet(nn.Module):
    """Dense blocks behind a stem of stride 4.

    Args:
        layers: Of each block.
        growth: Channels that each layer adds.
        classes: Of the classifier.
    """

    def __init__(
        self, layers: Sequence[int] = DENSENET_121, growth: int = 32, classes: int = 1000
    ) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        for index, count in enumerate(layers):
            if index:
                stages.append(Transition(width))
                width //= 2
            stages.append(DenseBlock(count, width, growth))
            width += count * growth
        self.stages = nn.Sequential(*stages)
        self.last = nn.BatchNorm2d(width)
        self.classify = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, 1)
        x = F.relu(self.last(self.stages(x)))
        return self.classify(x.mean((2, 3)))  # type: ignore[no-any-return]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", nargs="+", type=int, default=[4, 8, 6], help="of each block")
    parser.add_argument("--growth", type=int, default=12, help="channels that a layer adds")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--side", type=int, default=64, help="of an image, in pixels")
    parser.add_argument("--budget", default="60%", help="bytes, or a share of the plain step's")
    parser.add_argument("--cache-dir", default=None, help="where measured costs are kept")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train two steps; the exit status is 1 if one of them held more than the budget."""
    options = parse(arguments)
    torch.manual_seed(0)
    model = DenseNet(options.layers, options.growth, classes=10)
    images = torch.randn(options.batch, 3, options.side, options.side)
    labels = torch.randint(10, (options.batch,))

    def loss_fn(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels)

    step = fxremat.optimize(loss_fn, options.budget, cache_dir=options.cache_dir)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        step(images, labels).backward()

    train()  # plans
    report = fxremat.report(step)
    print(
        f"plain step {format_bytes(report.baseline_peak_bytes)}, "
        f"budget {format_bytes(report.budget_bytes)}"
    )
    most_bytes = 0
    for number in (1, 2):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        above_bytes = fxremat.measure_peak(train).peak_bytes  # what is resident
        measured_bytes = above_bytes + report.resident_bytes
        most_bytes = max(most_bytes, measured_bytes)
        print(
            f"step {number}: predicted peak {report.predicted_peak_bytes:,} bytes, "
            f"measured {measured_bytes:,}"
        )
    return int(most_bytes > report.budget_bytes)


if __name__ == "__main__":
    sys.exit(main())
