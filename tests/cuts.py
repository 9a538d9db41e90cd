"""Pairs of arguments: of their own memory, or cut from one tensor or array."""

from collections.abc import Callable

import numpy as np
import torch

Pair = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Makes two tensors, the same ones each time."""


def separate() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(17, 8), torch.full((17, 8), 2.0)


def rows(first: int, second: int, count: int = 40) -> Pair:
    def cut() -> tuple[torch.Tensor, torch.Tensor]:
        base = torch.arange(count * 8.0).view(count, 8) / 100
        return base[first : first + 17], base[second : second + 17]

    return cut


def interleaved() -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.arange(17 * 16.0).view(17, 16) / 100
    return base[:, :8], base[:, 8:]


def from_one_array() -> tuple[torch.Tensor, torch.Tensor]:
    base = np.arange(320, dtype=np.float32).reshape(40, 8)
    return torch.from_numpy(base[:17]), torch.from_numpy(base[3:20])
