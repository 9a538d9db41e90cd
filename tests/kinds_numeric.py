"""Tiny models of losses, linear algebra and samplings, after what users report."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.steps import Made, Make, bound, leaf


def nan_and_infinity() -> Made:
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> Any:
        h = layer(x)
        safe = torch.where(h > 0, h.log(), h.exp())
        score = safe.masked_fill(x < 0, float("-inf")).softmax(-1)
        return torch.nan_to_num(score) * safe, (h / 0).sin(), h.sqrt()

    return bound(step, layer), (leaf(21, 8),)


def sequence_losses() -> Made:
    layer = nn.Linear(6, 5)

    def step(x: torch.Tensor, targets: torch.Tensor) -> Any:
        logp = layer(x.sin()).log_softmax(-1)
        ctc = functional.ctc_loss(logp, targets, torch.full((3,), 9), torch.tensor([3, 2, 3]))
        return ctc, functional.cross_entropy(
            logp.flatten(0, 1), torch.arange(27) % 5, label_smoothing=0.1, ignore_index=2
        )

    return bound(step, layer), (leaf(9, 3, 6), torch.randint(1, 5, (3, 3)))


def mapped_over_a_batch() -> Made:
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> Any:
        def one(row: torch.Tensor) -> torch.Tensor:
            return torch.sin(layer.weight @ row).exp() * row.sum()

        return torch.vmap(one)(x.tanh())

    return bound(step, layer), (leaf(21, 8),)


def solved() -> Made:
    def step(x: torch.Tensor) -> Any:
        square = x @ x.t() + 3 * torch.eye(5)
        lower = torch.linalg.cholesky(square)
        turned = torch.linalg.inv(square) @ x.sin()
        values, vectors = torch.linalg.eigh(square)
        return lower.exp(), turned, torch.logdet(square), values, (vectors**2).sin()

    return step, (leaf(5, 7),)


def system_solved() -> Made:
    def step(x: torch.Tensor) -> Any:
        return torch.linalg.solve(x @ x.t() + 3 * torch.eye(5), x.sin()).exp()

    return step, (leaf(5, 7),)


def sampled_grids() -> Made:
    conv = nn.Conv2d(2, 2, 3, padding=1)

    def step(x: torch.Tensor, grid: torch.Tensor) -> Any:
        h = functional.interpolate(conv(x), scale_factor=2, mode="bilinear")
        h = functional.grid_sample(h.sin(), grid.tanh(), align_corners=False)
        return functional.pad(functional.pixel_unshuffle(h, 2), (1, 1, 1, 1), mode="reflect").exp()

    return bound(step, conv), (leaf(2, 2, 6, 6), leaf(2, 4, 4, 2))


def bags_of_words() -> Made:
    bag = nn.EmbeddingBag(11, 6, mode="mean")
    words = nn.Embedding(11, 6, padding_idx=0, scale_grad_by_freq=True)

    def step(ids: torch.Tensor, offsets: torch.Tensor) -> Any:
        return bag(ids, offsets).sin(), words(ids).exp()

    return bound(step, bag, words), (torch.randint(0, 11, (17,)), torch.tensor([0, 4, 9]))


HOLD = (nan_and_infinity, system_solved, sampled_grids)
# AOTAutograd adds up gradients in another order than eager.
AS_TRACED: tuple[Make, ...] = (mapped_over_a_batch,)
# The bits hold; what the floor's plan holds is a few bytes more than was predicted.
UNMEASURED: tuple[Make, ...] = (bags_of_words, solved)
OPEN: tuple[Make, ...] = ()
# Refused in words that name the line.
REFUSED: tuple[Make, ...] = (sequence_losses,)
