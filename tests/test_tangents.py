"""Tangents that are laid out otherwise than torch expects: copies of them are counted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxremat
from fxremat.passes.tangents import copied_tangent, permuted_tangents_copied
from tests.steps import QUICK, leaf

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
