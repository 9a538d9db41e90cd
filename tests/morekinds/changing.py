"""Kinds of change from step to step: shapes, scalars, modes, types, what is trained."""

from typing import Any

import torch
from torch import nn

from tests.morekinds.program import (
    Call,
    Kind,
    Named,
    clear,
    descend,
    leaves,
    state_of,
    training,
    with_args,
)
from tests.steps import leaf, weighted_sum


class Mixer(nn.Module):
    """Attention over a sequence of any length, with a mask made from that length."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.drop = nn.Linear(width, width), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        where = torch.arange(x.shape[1])
        score = (q @ k.mT).masked_fill(where[:, None] < where, float("-inf"))
        return x + self.drop(self.out(score.softmax(-1) @ v))


def sized(*sizes: tuple[int, ...]) -> list[Call]:
    return [with_args(leaf(*size)) for size in sizes]


def last_batch_smaller() -> Kind:
    return training(Mixer(), *sized((3, 5, 8), (3, 5, 8), (2, 5, 8), (1, 5, 8)))


def sequences_change() -> Kind:
    return training(Mixer(), *sized((2, 5, 8), (2, 1, 8), (2, 3, 8)))


def empty_batch() -> Kind:
    net = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 2))
    return training(net, *sized((5, 6), (0, 6), (5, 6)))


def image_sizes() -> Kind:
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    return training(net, *sized((2, 2, 8, 8), (2, 2, 12, 10), (1, 2, 9, 11)))


class Repeated(nn.Module):
    """As many rounds, and as much of them, as two numbers say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.skipped = -1

    def forward(self, x: torch.Tensor, rounds: int, scale: float = 1.0, act: str = "tanh") -> Any:
        for number in range(rounds):
            if number != self.skipped:
                x = getattr(torch, act)(self.layer(x)) * scale
        return x


def numbers_change() -> Kind:
    calls = [
        with_args(leaf(5, 6), 1), with_args(leaf(5, 6), 3), with_args(leaf(5, 6), 2, 0.5),
        with_args(leaf(5, 6), 2, 0.25, act="exp"), with_args(leaf(5, 6), 2, act="sin"),
    ]  # fmt: skip
    return training(Repeated(), *calls)


def layers_are_skipped() -> Kind:
    net = Repeated()

    def skip(number: int) -> None:
        net.skipped = number

    return training(net, *[with_args(leaf(5, 6), 3)] * 3, between=skip)


def lists_change() -> Kind:
    net = nn.Linear(6, 6)

    def step(parts: list[torch.Tensor]) -> Any:
        return sum(net(part).tanh().sum(0) for part in parts), [p.sin() for p in parts]

    calls = [with_args([leaf(2 + i, 6) for i in range(n)]) for n in (1, 3, 2)]
    return training(step, *calls, module=net)


def modes_change() -> Kind:
    net = nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3)
    )

    def toggle(number: int) -> None:
        net.train(number != 1)

    return training(net, *sized((5, 6), (5, 6), (5, 6)), between=toggle)


def only_a_part_trains() -> Kind:
    """A fine-tune: the backbone's norms stay in evaluation mode though the rest trains."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))

    def freeze(number: int) -> None:
        net.train()
        net[1].eval()
        net[1].requires_grad_(number % 2 == 1)

    return training(net, *sized((5, 6), (5, 6), (5, 6)), between=freeze)


def layers_freeze_and_thaw() -> Kind:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def freeze(number: int) -> None:
        net.requires_grad_(True)
        for layer in list(net)[: 2 * number]:
            layer.requires_grad_(False)

    calls = [with_args(torch.randn(5, 6)) for _ in range(3)]
    return training(net, *calls, calls[0], between=lambda number: freeze(number % 3))


def types_change() -> Kind:
    net = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    types = (torch.float32, torch.float64, torch.bfloat16)

    def to(number: int) -> None:
        net.to(types[number])

    calls = [with_args(torch.randn(5, 6, dtype=kind)) for kind in types]
    return training(net, *calls, between=to, traced=True)


def inputs_need_gradients_or_not() -> Kind:
    calls = [with_args(torch.randn(2, 5, 8).requires_grad_(number != 1)) for number in range(3)]
    return training(Mixer(), *calls)


def evaluation_between_steps() -> Kind:
    net = Mixer()

    def program(call: Any) -> Named:
        for number, size in enumerate((4, 4, 3)):
            net.train()
            output = call(torch.randn(size, 5, 8))
            yield f"{number} out", output
            weighted_sum(output).backward()
            yield from state_of(net, f"{number} ")
            descend(net)
            net.eval()
            with torch.no_grad():
                yield f"{number} no_grad", call(torch.randn(size, 5, 8))
            with torch.inference_mode():
                yield f"{number} inference", call(torch.randn(2, 4, 8)).clone()

    return Kind(net, program)


def truncated_recurrence() -> Kind:
    cell, head = nn.LSTMCell(4, 6), nn.Linear(6, 2)
    both = nn.ModuleList([cell, head])

    def step(x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
        for t in range(x.shape[0]):
            h, c = cell(x[t], (h, c))
        return head(h).square().sum(), h, c

    def program(call: Any) -> Named:
        h, c = torch.zeros(3, 6), torch.zeros(3, 6)
        for number, length in enumerate((4, 4, 2)):
            loss, h, c = call(torch.randn(length, 3, 4), h, c)
            yield f"{number} out", (loss, h, c)
            loss.backward()
            yield from state_of(both, f"{number} ")
            descend(both)
            h, c = h.detach(), c.detach()

    return Kind(step, program, both)


def weights_are_loaded() -> Kind:
    net = Mixer()
    other = {name: value.clone().mul_(0.7) for name, value in net.state_dict().items()}

    def change(number: int) -> None:
        if number == 1:
            net.load_state_dict(other)
        elif number == 2:
            net.load_state_dict({n: v.clone() for n, v in other.items()}, assign=True)
        elif number == 3:
            for parameter in net.parameters():
                parameter.data = parameter.data * 0.5

    return training(net, *sized(*[(2, 5, 8)] * 4), between=change)


def optimizers_step() -> Kind:
    net = Mixer()

    def program(call: Any) -> Named:
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for number in range(3):
            x = torch.randn(4, 5, 8)
            loss = weighted_sum(call(x))
            (loss * 1024).backward()
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(1024)
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            yield f"{number}", (loss, norm)
            yield from state_of(net, f"{number} ")
            optimizer.zero_grad()
            clear(leaves(x))

    return Kind(net, program)


CASES = (
    last_batch_smaller, sequences_change, empty_batch, image_sizes, numbers_change,
    layers_are_skipped, lists_change, modes_change, only_a_part_trains, layers_freeze_and_thaw,
    types_change, inputs_need_gradients_or_not, evaluation_between_steps, truncated_recurrence,
    weights_are_loaded, optimizers_step,
)  # fmt: skip
