"""Tangents that are laid out otherwise than torch expects: copies of them are counted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxremat
from fxremat.errors import OverBudgetError
from fxremat.passes.tangents import copied_tangent, permuted_tangents_copied, tangents_held
from tests.steps import QUICK, budgets_of, captured, leaf

Step = Callable[[torch.Tensor, torch.Tensor], Any]


def permuted(w: torch.Tensor, x: torch.Tensor) -> Any:
    return (w @ x.t()).permute(1, 0) * 2.0


def permuted_and_plain(w: torch.Tensor, x: torch.Tensor) -> Any:
    product = w @ x.t()
    return product.permute(1, 0) * 2.0, product.sin()


def every_other_column(w: torch.Tensor, x: torch.Tensor) -> Any:
    return (w @ x.t())[:, ::2]


def channels_last(w: torch.Tensor, x: torch.Tensor) -> Any:
    return (w @ x.t()).view(1, 4, 3, 14).contiguous(memory_format=torch.channels_last).sin()


@pytest.mark.parametrize("step", [permuted, permuted_and_plain, every_other_column, channels_last])
def test_no_copy_of_a_tangent_is_left_out(step: Step) -> None:
    torch._dynamo.reset()
    args = leaf(12, 8), torch.randn(14, 8)
    for plan in fxremat.frontier(fxremat.capture(step, args, **QUICK), 2):
        budget_bytes = plan.budget_bytes
        check = fxremat.verify(step, args, budget=budget_bytes, repeats=1, **QUICK)
        assert not any(check.differing.values())
        assert check.measured_peak_bytes <= check.predicted_peak_bytes <= budget_bytes
        if not permuted_tangents_copied():
            assert check.measured_peak_bytes == check.predicted_peak_bytes


def test_only_tangents_of_permuted_outputs_are_copied_if_any() -> None:
    plain, images = torch.empty(3, 4), torch.empty(2, 3, 4, 5)
    assert not copied_tangent(plain)
    assert not copied_tangent(images.contiguous(memory_format=torch.channels_last))
    assert copied_tangent(plain.t()) is permuted_tangents_copied()


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a column": lambda h: h.unbind(-1)[1],
    "every other row": lambda h: h[::2],
    "every other column": lambda h: h[..., ::2],
    "a diagonal": lambda h: h.diagonal(),
    "a turned part": lambda h: h[1:, 2:].transpose(0, 1),
}


@pytest.mark.parametrize("part", PARTS)
def test_the_tangent_of_a_part_may_span_as_much_as_the_part(part: str) -> None:
    torch._dynamo.reset()

    def step(x: torch.Tensor) -> torch.Tensor:
        return PARTS[part]((x * 2).exp().sin())

    x = leaf(24, 40)
    problem = fxremat.capture(step, (x,), **QUICK)
    budget_bytes = fxremat.frontier(problem, 2)[-1].peak_bytes
    check = fxremat.verify(step, (x,), budget=budget_bytes, repeats=1, **QUICK)
    check.raise_if_broken()
    assert check.measured_peak_bytes <= budget_bytes


def three_outputs(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x + y, x * 2, (x * y).tanh()


@pytest.mark.skipif(tangents_held(), reason="this torch holds all tangents: they are planned for")
@pytest.mark.parametrize("way", ["backward", "autograd.backward", "autograd.grad"])
def test_gradients_that_the_caller_hands_over_are_counted(way: str) -> None:
    torch._dynamo.reset()
    args = leaf(48, 40), leaf(48, 40)
    outside_bytes = sum(t.nbytes for t in args)

    def run(call: Any, *, given: bool) -> None:
        outputs = call(*args)
        if not given:
            sum((output * 2).sum() for output in outputs).backward()
        elif way == "backward":
            outputs[2].backward(torch.ones_like(outputs[2]))
        elif way == "autograd.backward":
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        else:
            torch.autograd.grad(outputs, args, [torch.ones_like(output) for output in outputs])
        args[0].grad = args[1].grad = None

    floor_bytes = budgets_of(captured(lambda: (three_outputs, args)), 0)[0]
    tight = fxremat.optimize(three_outputs, floor_bytes, **QUICK)
    run(tight, given=False)
    with pytest.raises(OverBudgetError, match="was given gradients") as caught:
        run(tight, given=True)
    args[0].grad = args[1].grad = None
    assert caught.value.measured_bytes > caught.value.budget_bytes == floor_bytes

    more_bytes = int(str(caught.value).partition("reserve=")[2].partition(",")[0])
    roomy = fxremat.optimize(three_outputs, floor_bytes + more_bytes, reserve=more_bytes, **QUICK)
    run(roomy, given=True)
    peak_bytes = fxremat.measure_peak(lambda: run(roomy, given=True)).peak_bytes
    assert peak_bytes + outside_bytes <= floor_bytes + more_bytes
