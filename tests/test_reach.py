"""Gradients of what the loss does not use: ``None`` as in eager, so that optimizers pass it by."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.check import same_bits
from tests.steps import QUICK


class Heads(nn.Module):
    """A trunk with two heads, a view of a hidden value, and a scale that only one head uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
        self.first, self.second = nn.Linear(8, 3), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.trunk(x)
        return {
            "first": self.first(hidden).sigmoid(),
            "second": self.second(hidden) * self.scale,
            "rows": hidden[:2],
        }


LOSSES: dict[str, Callable[[dict[str, torch.Tensor]], torch.Tensor]] = {
    "first": lambda out: out["first"].square().sum(),
    "second": lambda out: out["second"].square().sum(),
    "rows": lambda out: out["rows"].sum(),
    "two": lambda out: out["first"].sum() * out["second"].sum(),
    "all": lambda out: out["first"].sum() * out["second"].sum() + out["rows"].cos().sum(),
}


def trained(
    loss: Callable[[Any], torch.Tensor], wrap: Callable[[Any], Any] = lambda net: net
) -> tuple[nn.Module, torch.Tensor]:
    """Two steps of an optimizer that would shrink a head with a gradient of zeros."""
    torch.manual_seed(0)
    net = Heads()
    call = wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    x = torch.randn(20, 6, requires_grad=True)
    for _ in range(2):
        optimizer.zero_grad()
        x.grad = None
        loss(call(x)).backward()
        optimizer.step()
    return net, x


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(same_bits(a, b) and same_bits(a.grad, b.grad) for a, b in pairs)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("fraction", [0, 1])
def test_an_output_that_the_loss_does_not_use_gives_no_gradient(
    loss: Callable[[Any], torch.Tensor], fraction: int
) -> None:
    problem = fxremat.capture(Heads(), (torch.randn(20, 6, requires_grad=True),), **QUICK)
    budget_bytes = fxremat.frontier(problem, 2)[-fraction].peak_bytes
    (plain, x), (net, y) = (
        trained(loss),
        trained(loss, lambda net: fxremat.optimize(net, budget_bytes, gradients="freed", **QUICK)),
    )
    assert same(plain, net)
    assert same_bits(x.grad, y.grad)


def test_two_backwards_through_different_outputs_of_one_forward() -> None:
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        net = Heads()
        call: Any = fxremat.optimize(net, "1MiB", **QUICK) if planned else net
        output = call(torch.randn(20, 6))
        output["first"].sum().backward(retain_graph=True)
        assert net.scale.grad is None
        output["second"].sum().backward()
        found.append(net)
    assert same(*found)


def test_a_part_before_the_optimised_one_gets_no_gradient_either() -> None:
    def step(wrap: Callable[[Any], Any]) -> list[nn.Linear]:
        torch.manual_seed(0)
        before = [nn.Linear(4, 4), nn.Linear(4, 4)]

        def both(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return a.tanh() * 2, b.sigmoid() * 3

        x = torch.randn(5, 4)
        first, _ = wrap(both)(before[0](x), before[1](x))
        first.sum().backward()
        return before

    plain = step(lambda fn: fn)
    planned = step(lambda fn: fxremat.optimize(fn, "1MiB", **QUICK))
    assert all(same(a, b) for a, b in zip(plain, planned, strict=True))
    assert plain[1].weight.grad is None


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_verify_expects_the_same_of_the_reference(loss: Callable[[Any], torch.Tensor]) -> None:
    check = fxremat.verify(
        Heads(), (torch.randn(20, 6),), budget="1MiB", loss=loss, repeats=1, **QUICK
    )
    check.raise_if_broken()
    assert check.gradients_equal


def hooked(kind: str, net: Heads) -> list[float]:
    """Put a hook on a parameter that only the second head uses; what it has seen."""
    seen: list[float] = []
    if kind == "gradient":
        add: Any = net.scale.register_hook
        add(lambda gradient: seen.append(float(gradient.sum())))
    else:
        net.scale.register_post_accumulate_grad_hook(lambda scale: seen.append(float(scale.sum())))
    return seen


@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
def test_a_hook_that_eager_would_not_run_is_refused_and_the_remedy_works(kind: str) -> None:
    net = fxremat.optimize(Heads(), "1MiB", **QUICK)
    seen = hooked(kind, net)
    x = torch.randn(20, 6)
    output = net(x)
    (output["first"].sum() + output["second"].sum()).backward()
    assert len(seen) == 1
    net.zero_grad()
    output = net(x)
    with pytest.raises(fxremat.UnsupportedGraphError, match="differentiate="):
        output["first"].sum().backward()
    net.zero_grad()
    fxremat.optimize(net, "1MiB", differentiate="first", **QUICK)
    net(x)["first"].sum().backward()
    assert len(seen) == 1
    assert net.scale.grad is None
    assert net.first.weight.grad is not None


def test_a_hook_on_an_input_that_is_not_reached_is_refused() -> None:
    def both(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.tanh(), b.sigmoid()

    step = fxremat.optimize(both, "1MiB", **QUICK)
    first, second = (torch.randn(5, requires_grad=True) * 2 for _ in range(2))
    hook: Any = second.register_hook
    hook(lambda gradient: gradient * 2)
    with pytest.raises(fxremat.UnsupportedGraphError, match="hook"):
        step(first, second)[0].sum().backward()
    step(first, second)[1].sum().backward()


class Detached(nn.Module):
    """A part that no gradient comes to, whatever the loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.used(x).sum() + self.unused(x).detach().sum()
        return loss


def test_verify_runs_no_hook_that_eager_does_not_run() -> None:
    net, seen = Detached(), list[float]()
    hook: Any = net.unused.weight.register_hook
    hook(lambda gradient: seen.append(float(gradient.sum())))
    fxremat.verify(net, (torch.randn(4, 3),), budget="1MiB", repeats=1, **QUICK).raise_if_broken()
    assert seen == []
