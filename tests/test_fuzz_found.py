"""What random programs have found, a small program for each cause."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.passes.tangents import permuted_tangents_copied
from tests.steps import QUICK


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def assert_exact(fn: Callable[..., Any], *args: torch.Tensor) -> None:
    """The step without recomputation holds what is predicted, and shows the right bits."""
    check = fxremat.verify(fn, args, budget="100%", repeats=1, **QUICK)
    assert not any(check.differing.values())
    assert check.measured_peak_bytes <= check.predicted_peak_bytes
    if not permuted_tangents_copied():  # else a copy is counted that may not be made
        assert check.measured_peak_bytes == check.predicted_peak_bytes


def row(x: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(301, 60)
    h[:1] = x
    return h.sum(1)


def late_rows(x: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(301, 60)
    h[100:].copy_(x)
    return h.sum(1)


def diagonal(x: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(301, 60)
    h.diagonal().copy_(x[0])
    return h.sum(1)


def every_second(x: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(301, 60)
    h[:, ::2] = x[:, ::2]
    return h.sum(1)


@pytest.mark.parametrize("step", [row, late_rows, diagonal, every_second])
def test_a_copy_into_a_view_allocates_the_whole_storage(
    step: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert_exact(step, leaf(1, 60))


@pytest.mark.parametrize(
    "step",
    [
        lambda x: (x.view(-1)[:1], x.sin().sum()),
        lambda x: (x, torch.tanh(x)),
    ],
    ids=["a view", "itself"],
)
def test_the_gradient_of_an_output_that_is_an_argument_is_counted_or_said(
    step: Callable[[torch.Tensor], Any],
) -> None:
    assert_exact(step, leaf(301, 40))


def test_the_tangent_of_a_part_has_the_size_of_the_part() -> None:
    assert_exact(lambda x: torch.tanh(x)[:1], leaf(301, 40))


def test_an_expanded_output_can_be_verified() -> None:
    assert_exact(lambda x: x.sin().sum(0, keepdim=True).expand(5, 40), leaf(301, 40))


class Counting(nn.Module):
    """It counts its calls; the way is a parameter of the tests."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(500))


class Augmented(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x.sin()


class ViewReturned(Counting):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        view = self.steps[1:]
        self.steps.add_(0.5)
        return x.sin(), view


class Effect(Counting):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.steps.mul_(0.9)
        h = x.sin()
        return h, torch.linalg.inv(h.t() @ h + 3 * torch.eye(6)).detach()


@pytest.mark.parametrize("kind", [Augmented, ViewReturned, Effect])
def test_the_new_value_of_a_buffer_is_not_held_by_the_caller(kind: type[nn.Module]) -> None:
    assert_exact(kind(), leaf(67, 6))


def test_randomness_that_nobody_reads_is_drawn_as_eager_draws_it() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.rand_like(x)
        return x.tanh()

    states = []
    for call in (step, fxremat.optimize(step, "100%", **QUICK)):
        torch.manual_seed(3)
        call(leaf(8, 8)).sum().backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_step_with_randomness_that_nobody_reads_can_be_verified() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + torch.randn_like(x)
        nn.functional.dropout(y, 0.5)
        return y.tanh() * torch.rand_like(x)

    assert_exact(step, leaf(8, 8))


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(6),
        nn.BatchNorm1d(6).eval(),
        nn.LayerNorm(6),
        nn.GroupNorm(2, 6),
        nn.Conv1d(6, 6, 1),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_a_gradient_that_nobody_asked_for_holds_nothing(norm: nn.Module) -> None:
    shape = (40, 6) if isinstance(norm, nn.LayerNorm | nn.BatchNorm1d) else (8, 6, 5)
    assert_exact(norm, torch.randn(shape))


def expanded_beside_detached(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x.tanh() * 2
    return h.expand(40, *h.shape), h.detach()


def part_beside_detached(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x.tanh() * 2
    return h.detach(), h[:2]


@pytest.mark.parametrize("fn", [expanded_beside_detached, part_beside_detached])
def test_a_view_beside_a_detached_one_is_within_its_prediction(fn: Callable[..., Any]) -> None:
    check = fxremat.verify(fn, (leaf(8, 3),), budget="100%", repeats=1, **QUICK)
    assert not any(check.differing.values())
    assert check.measured_peak_bytes <= check.predicted_peak_bytes


def rescaled(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def averaged(x: torch.Tensor) -> torch.Tensor:
    return x - torch.cumsum(x.double(), 1).float()


def convolved(x: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(4, 1, 3)
    out: torch.Tensor = torch.nn.functional.conv1d(x[:, None], weight, padding=1)
    return out.sum(1)


@pytest.mark.parametrize("branch", [rescaled, averaged, convolved])
def test_what_operators_hold_inside_of_a_branch_is_counted(
    branch: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            chosen = torch.cond(x.sum() > 1e6, torch.cos, branch, (x.detach(),))
        scaled: torch.Tensor = torch.tanh(x) * chosen.mean()
        return scaled

    check = fxremat.verify(step, (leaf(301, 60),), budget="100%", repeats=1, **QUICK)
    assert not any(check.differing.values())
    assert check.measured_peak_bytes <= check.predicted_peak_bytes
    assert check.measured_peak_bytes > 301 * 60 * 4 * 3  # the branch is where the peak is


def twice(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = x.tile(2)
    return h.float(), h


def twice_clamped(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = torch.maximum(x, x.detach() * 2)
    same = h.contiguous()
    h.clamp_(min=-1.0)
    return same, h


def three_times(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = x.tile(2)
    return h.float(), h, h.contiguous()


@pytest.mark.parametrize("step", [twice, twice_clamped, three_times])
def test_one_output_under_several_names_has_as_many_tangents(
    step: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
) -> None:
    check = fxremat.verify(step, (leaf(67, 60),), budget="100%", repeats=1, **QUICK)
    assert not any(check.differing.values())
    assert check.measured_peak_bytes <= check.predicted_peak_bytes
    problem = fxremat.capture(step, (leaf(67, 60),), **QUICK)
    least = fxremat.plan(problem, "100%").peak_bytes
    again = fxremat.verify(step, (leaf(67, 60),), budget=least, repeats=1, **QUICK)
    assert again.measured_peak_bytes == again.predicted_peak_bytes


def test_the_gradient_of_a_number_is_there_while_autograd_copies_gradients() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("...i,ji->...j", x, self.weight).view(-1)[:1]

    assert_exact(Net(), leaf(5))


def turned(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    v = (x * 2).t()
    return v, v.detach()


def last_rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    v = (x * 2).chunk(2, 0)[-1]
    return v.view_as(v).detach(), v


def one_column(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    v = (x * 2).unbind(1)[1]
    return v, v.detach(), v[1:]


@pytest.mark.parametrize("step", [turned, last_rows, one_column])
def test_a_view_beside_its_own_detached_self_is_the_same_view(
    step: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
) -> None:
    x = leaf(6, 6)
    expected = step(x)
    for found, value in zip(fxremat.optimize(step, "100%", **QUICK)(x), expected, strict=True):
        assert torch.equal(found, value)
        assert found.requires_grad == value.requires_grad
    assert not any(fxremat.verify(step, (x,), budget="100%", **QUICK).differing.values())


@pytest.mark.parametrize("order", [1, -1], ids=["the number last", "the number first"])
def test_the_gradient_of_a_number_that_is_a_view_of_another_output_is_counted(order: int) -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x.diag().std(1, keepdim=True)
        return (h, h.view(-1)[:1])[::order]

    for share in ("100%", "1GiB"):
        check = fxremat.verify(step, (leaf(12),), budget=share, repeats=1, **QUICK)
        assert not any(check.differing.values())
        assert check.measured_peak_bytes <= check.predicted_peak_bytes
