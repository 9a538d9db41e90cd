"""Bytes that no tensor shows: copies of gradients, results that hold more than they show."""

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


def mean_square(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The reduced loss keeps its elementwise result."""
    return torch.nn.functional.mse_loss(x.sin(), b)


def cross_entropy(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The same of another loss."""
    return torch.nn.functional.binary_cross_entropy(x.sigmoid(), b.sigmoid().detach())


@pytest.mark.parametrize("fn", [mean_square, cross_entropy])
def test_results_that_hold_more_than_they_show_are_charged(
    fn: Callable[..., torch.Tensor],
) -> None:
    x = torch.randn(101, 103, requires_grad=True)
    b = torch.randn(101, 103)
    check = fxremat.verify(
        fn, (x, b), budget="400%", loss=lambda out: out, repeats=1, cache_dir=False
    )
    assert check.ok
    assert check.measured_peak_bytes == check.predicted_peak_bytes
