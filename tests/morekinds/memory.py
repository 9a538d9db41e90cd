"""Kinds of bytes: equal and unequal, shared, empty, in chains and in fans."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # why: everybody calls it so

import fxremat
from tests.morekinds.program import Kind, Named, descend, state_of, training, with_args
from tests.steps import QUICK, leaf


def equal_chain() -> Kind:
    def step(x: torch.Tensor) -> Any:
        for _ in range(4):
            x = x.sin().exp().tanh()
        return x

    return training(step, with_args(leaf(64)))


def one_value_dwarfs_the_rest() -> Kind:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        wide = (x[:, None] * w).tanh().exp()
        return wide.sin().sum(1).tanh() * x

    return training(step, with_args(leaf(3, 7), leaf(64, 7)))


def fan_out() -> Kind:
    def step(x: torch.Tensor) -> Any:
        h = torch.tanh(x @ x.t())
        return sum((h * h.roll(i, 0)).exp().cos().sum() for i in range(5))

    return training(step, with_args(leaf(11, 11)))


def fan_in() -> Kind:
    def step(x: torch.Tensor) -> Any:
        return torch.cat([(x * i).sin().exp() for i in range(8)], -1).square().softmax(-1)

    return training(step, with_args(leaf(5, 11)))


def broadcast_values() -> Kind:
    def step(x: torch.Tensor, b: torch.Tensor) -> Any:
        wide = b.exp().expand(6, 7, 5)
        return (x * wide).tanh().exp() * wide.transpose(0, 1).reshape(6, 7, 5)

    return training(step, with_args(leaf(6, 7, 5), leaf(5)))


def in_place_chain() -> Kind:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU6(inplace=True),
        nn.Dropout2d(0.3, inplace=True), nn.Hardswish(inplace=True),
    )  # fmt: skip
    return training(net, with_args(leaf(2, 2, 7, 7)), with_args(leaf(2, 2, 7, 7)))


def zero_bytes() -> Kind:
    def step(x: torch.Tensor) -> Any:
        none = x[:0].exp()
        return torch.cat([none, x.tanh(), none.sin()]).exp() + none.sum()

    return training(step, with_args(leaf(5, 6)))


def constants() -> Kind:
    table = torch.randn(40, 6)
    where = torch.arange(40).remainder(7)

    def step(x: torch.Tensor) -> Any:
        return (x[where] * table).tanh().exp() + torch.linspace(0, 1, 6) * torch.eye(6)[2]

    return training(step, with_args(leaf(7, 6)))


def types_are_mixed() -> Kind:
    net = nn.Linear(6, 6)

    def step(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = net(x).tanh()
            return (net(h).float().exp() * h.double()).to(torch.float16)

    return training(step, with_args(leaf(5, 6)), with_args(leaf(5, 6)), module=net, traced=True)


def reductions() -> Kind:
    def step(x: torch.Tensor) -> Any:
        return (
            x.logsumexp(-1), x.norm(dim=0), x.prod(1), x.std(0), x.amax(1), x.median(1).values,
            x.cumprod(1), x.var(1, unbiased=False), x.kthvalue(2, 1).values, x.logcumsumexp(0),
        )  # fmt: skip

    return training(step, with_args(leaf(5, 7)))


def losses() -> Kind:
    net = nn.Linear(6, 7)

    def step(x: torch.Tensor, where: torch.Tensor, y: torch.Tensor) -> Any:
        h = net(x)
        return (
            F.cross_entropy(h, where, label_smoothing=0.1, ignore_index=3)
            + F.huber_loss(h, y) + F.smooth_l1_loss(h, y) + F.poisson_nll_loss(h, y.exp())
            + F.kl_div(h.log_softmax(-1), y.softmax(-1), reduction="batchmean")
            + F.multi_margin_loss(h, where) + F.binary_cross_entropy_with_logits(h, y.sigmoid())
            + F.triplet_margin_loss(h, y, y.roll(1, 0)) + F.cosine_embedding_loss(
                h, y, torch.ones(len(x)))
        )  # fmt: skip

    calls = with_args(leaf(5, 6), torch.tensor([0, 3, 6, 1, 2]), torch.randn(5, 7))
    return training(step, calls, module=net)


def solved_and_decomposed() -> Kind:
    def step(x: torch.Tensor) -> Any:
        spread = x @ x.t() + 6 * torch.eye(6)
        root = torch.linalg.cholesky(spread)
        return (
            torch.linalg.solve(spread, x), root.logdet(), torch.linalg.eigvalsh(spread),
            torch.linalg.svdvals(x), torch.linalg.inv(root), torch.linalg.slogdet(spread),
        )  # fmt: skip

    return training(step, with_args(leaf(6, 6)), traced=True)


def pictures() -> Kind:
    def step(x: torch.Tensor, grid: torch.Tensor) -> Any:
        big = F.interpolate(x, scale_factor=2, mode="bilinear")
        low, where = F.max_pool2d_with_indices(big, [2, 2])
        up = F.max_unpool2d(low, where, [2, 2])
        seen = F.grid_sample(x.sin(), grid.tanh(), align_corners=False)
        return F.pixel_shuffle(up.tanh(), 2), F.pad(seen, (1, 1, 0, 2), "reflect"), F.unfold(x, 3)

    return training(step, with_args(leaf(2, 4, 5, 6), leaf(2, 3, 3, 2)), traced=True)


def outputs_are_released() -> Kind:
    def step(x: torch.Tensor) -> Any:
        h = x.sin().exp().tanh()
        return (h * h.cos()).exp()

    return training(step, with_args(leaf(8, 8)), outputs="released")


def budgets_one_after_another() -> Kind:
    net = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Dropout(0.3), nn.Linear(24, 6))

    def program(call: Any) -> Named:
        planned = net._compiled_call_impl is not None
        for number, budget in enumerate(("1GiB", "100%", "97%", "64 KiB", "1MB")):
            if planned and number:
                fxremat.optimize(net, budget, **QUICK)
            x = leaf(9, 6)
            call(x).square().sum().backward()
            yield f"{number}", x.grad
            yield from state_of(net, f"{number} ")
            descend(net)

    return Kind(net, program, fractions=(0.5,))


CASES = (
    equal_chain, one_value_dwarfs_the_rest, fan_out, fan_in, broadcast_values, in_place_chain,
    zero_bytes, constants, types_are_mixed, reductions, losses,
    solved_and_decomposed, pictures, outputs_are_released, budgets_one_after_another,
)  # fmt: skip
