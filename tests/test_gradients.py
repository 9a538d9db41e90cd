"""Gradients that autograd copies when it stores them count at the end of the step."""

from collections.abc import Callable

import pytest
import torch

import fxremat


def expanded(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Both gradients are one number, expanded."""
    return (x * 1.0 + b).sum()


def shared(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Both arguments get the same gradient."""
    return (x + b).sin().sum()


def transposed(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The gradient of b comes out transposed."""
    return (x.t() + b.t()).sin().sum()


@pytest.mark.parametrize("fn", [expanded, shared, transposed])
def test_measured_peak_includes_the_copies(fn: Callable[..., torch.Tensor]) -> None:
    x = torch.randn(101, 103, requires_grad=True)
    b = torch.randn(101, 103, requires_grad=True)
    check = fxremat.verify(
        fn, (x, b), budget="400%", loss=lambda out: out, repeats=1, cache_dir=False
    )
    assert check.ok
    assert check.measured_peak_bytes == check.predicted_peak_bytes
