"""What cannot be kept is refused in words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from tests.steps import QUICK, leaf


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))


def sparse_weight() -> Callable[..., Any]:
    words = nn.Embedding(9, 6, sparse=True)
    return lambda ids: words(ids).tanh()


def backward_inside(x: torch.Tensor) -> torch.Tensor:
    x.tanh().sum().backward()
    return x


def printing(x: torch.Tensor) -> torch.Tensor:
    print(x.sum())  # noqa: T201  # why: that is what is refused
    return x.tanh()


IDS = torch.tensor([1, 2, 2])
REFUSED: tuple[tuple[str, Callable[..., Any], Callable[[Callable[..., Any]], Any], str], ...] = (
    (
        "a Hessian", net(), lambda step: torch.autograd.functional.hessian(
            lambda x: step(x).sum(), torch.randn(2, 6)), "create_graph=True",
    ),
    ("sparse gradients", sparse_weight(), lambda step: step(IDS), "sparse_coo"),
    ("sparse inputs", lambda s: s @ torch.ones(6, 2, requires_grad=True),
     lambda step: step(torch.eye(6).to_sparse()), "sparse"),
    ("a backward inside", backward_inside, lambda step: step(leaf(5, 6)), "a backward inside"),
    ("printing", printing, lambda step: step(leaf(5, 6)), "print"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "use", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_is_not_supported_is_named(
    fn: Callable[..., Any], use: Callable[[Callable[..., Any]], Any], words: str
) -> None:
    step = fxremat.optimize(fn, "1GiB", **QUICK)
    with pytest.raises(fxremat.FxrematError, match=words):
        use(step)


def test_module_backward_hooks_are_refused_before_anything_runs() -> None:
    model = net()
    model[0].register_full_backward_hook(lambda module, inner, outer: None)
    fxremat.optimize(model, "1GiB", **QUICK)
    with pytest.raises(fxremat.CaptureError, match="full backward hook"):
        model(leaf(5, 6))


@pytest.mark.parametrize("budget", [1, 1000, "1KiB", "0.1%"])
def test_a_budget_far_below_the_floor_names_the_floor(budget: int | str) -> None:
    model = fxremat.optimize(net(), budget, **QUICK)
    with pytest.raises(fxremat.InfeasibleBudgetError) as caught:
        model(leaf(5, 6))
    floor_bytes = caught.value.floor_bytes
    assert f"{floor_bytes:,}" in str(caught.value)
    fxremat.optimize(model, floor_bytes, **QUICK)
    model(leaf(5, 6)).sum().backward()
    assert fxremat.report(model).predicted_peak_bytes == floor_bytes
