"""The order of the backward: less is held, the values stay the same to the bit."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fxremat.passes.effects import is_random
from fxremat.passes.extract import analyse
from fxremat.passes.place import Item, Sizes, ordered, place
from fxremat.solvers.floor import core_of, least
from fxremat.solvers.search import Clock
from tests.joints import joint_graph
from tests.steps import Made, apply, bound, captured, hold_at_every_budget, leaf, made


def random_items(seed: int) -> tuple[list[Item], Sizes]:
    """A backward of random reads: of what a forward made, of a tangent, and of its own results."""
    draw = random.Random(seed)
    forward = draw.randint(2, 8)
    size_bytes = [draw.randint(0, 40) for _ in range(forward + 1)]
    items: list[Item] = []
    maker: dict[int, int] = {}
    for position in range(draw.randint(3, 14)):
        reads = tuple(sorted(draw.sample(range(len(size_bytes)), k=draw.randint(1, 3))))
        after = frozenset(maker[g] for g in reads if g in maker)
        maker[len(size_bytes)] = position
        items.append(Item(reads, (len(size_bytes),), after, fixed=draw.random() < 0.1))
        size_bytes.append(draw.randint(0, 40))
    kept = frozenset(draw.sample(sorted(maker), k=2))
    return items, Sizes(size_bytes, {g: draw.randint(0, 60) for g in range(forward)}, kept)


def held(items: Sequence[Item], sizes: Sizes, order: Sequence[int], replayed: bool) -> list[int]:
    """Bytes held while each item runs, reckoned storage by storage."""
    live = []
    number = len(order)
    made = {g for item in items for g in item.creates}
    for spot, position in enumerate(order):
        total = beside = 0
        for g, size_bytes in enumerate(sizes.size_bytes):
            readers = [p for p in range(number) if g in items[order[p]].reads]
            first, last = min(readers, default=-1), max(readers, default=-1)
            if g in made:
                first = next(p for p in range(number) if g in items[order[p]].creates)
                last = max(last, first)
            elif not (replayed and g in sizes.beside_bytes):
                first = 0
            if g in sizes.kept:
                last = number
            total += size_bytes if first <= spot <= last else 0
            if replayed and g in sizes.beside_bytes and readers and spot == first:
                beside = max(beside, sizes.beside_bytes[g])
        creates = sum(sizes.size_bytes[g] for g in items[position].creates)
        live.append(max(total, total - creates + beside))
    return live


@pytest.mark.parametrize("seed", range(150))
def test_neither_reading_of_a_random_backward_holds_more(seed: int) -> None:
    items, sizes = random_items(seed)
    order = ordered(items, sizes)
    assert sorted(order) == list(range(len(items)))
    for spot, position in enumerate(order):
        assert items[position].after <= set(order[:spot])
    for spot in (p for p, item in enumerate(items) if item.fixed):
        assert order[spot] == spot
        assert set(order[:spot]) == set(range(spot))
    before = [max(held(items, sizes, range(len(items)), replayed)) for replayed in (False, True)]
    after = [max(held(items, sizes, order, replayed)) for replayed in (False, True)]
    assert after[0] <= before[0]
    assert after[1] <= before[1]


def test_random_backwards_do_get_better() -> None:
    better = 0
    for seed in range(150):
        items, sizes = random_items(seed)
        order = ordered(items, sizes)
        better += max(held(items, sizes, order, True)) < max(
            held(items, sizes, range(len(items)), True)
        )
    assert better > 10


class Layers(nn.Module):
    """Linear layers, much larger in the batch than in the weights."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(m for _ in range(layers) for m in (nn.Linear(32, 32), nn.ReLU()))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def layers() -> Made:
    """A step of such layers."""
    return Layers(), (leaf(512, 32),)


def least_bytes() -> int:
    """The least peak of such a step where values are replayed just before they are read."""
    core, search = core_of(captured(layers))
    return least(core, search, Clock(60.0)).peak_bytes


def test_the_least_peak_of_linear_layers_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    placed_bytes = least_bytes()
    monkeypatch.setattr("fxremat.pipeline.place", lambda analysis: analysis.joint)
    assert placed_bytes < least_bytes()


def test_the_gradients_keep_their_bits() -> None:
    hold_at_every_budget(layers)


def test_the_gradient_of_a_weight_comes_before_that_of_the_input() -> None:
    joint = joint_graph(Layers(2), (leaf(64, 32),))
    given = [node.name for node in joint.graph.nodes if node.name.startswith("mm")]
    assert given == ["mm", "mm_1", "mm_2", "mm_3"]  # first what goes on to the input
    placed = [n.name for n in place(analyse(joint)).graph.nodes if n.name.startswith("mm")]
    assert placed == ["mm_1", "mm", "mm_2", "mm_3"]  # the last two have only inputs of the step


class Jitter(torch.autograd.Function):
    """Its backward draws random numbers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.rand_like(grad)


def jittered() -> Made:
    """Layers with such functions between them."""
    first, second = Layers(1), Layers(1)

    def step(x: torch.Tensor) -> torch.Tensor:
        inner = apply(Jitter, first(x))
        result: torch.Tensor = apply(Jitter, second(inner)) + apply(Jitter, inner.sin())
        return result

    return bound(step, first, second), (leaf(256, 32),)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's trace does
def test_a_backward_draws_its_random_numbers_in_order() -> None:
    fn, args = made(jittered)
    analysis = analyse(joint_graph(fn, args))
    drawn = [n.name for n in place(analysis).graph.nodes if is_random(n)]
    assert drawn == [n.name for n in analysis.joint.graph.nodes if is_random(n)]
    assert len(drawn) == 3
    hold_at_every_budget(jittered)
