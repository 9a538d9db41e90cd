"""In-place writes that a graph would make otherwise than eager are refused; all others hold."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import fxremat
from tests.steps import QUICK

Write = Callable[[torch.Tensor], object]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def after(write: Write) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        h = x.detach() * 2
        write(h)
        return h * x

    return step


def set_row(h: torch.Tensor) -> None:
    h[0].expand(4, 10)[1] = 3.0


def add_to_expanded(h: torch.Tensor) -> None:
    row = h[0].expand(4, 10)
    row += 1.0


DRAWS: list[Write] = [
    lambda h: h[:, :5].normal_(),
    lambda h: nn.init.normal_(h[:, ::2]),
    lambda h: h.t().bernoulli_(0.3),
    lambda h: h[:, :5].exponential_(),
    lambda h: functional.dropout(h.t(), 0.3, inplace=True),
    lambda h: functional.alpha_dropout(h.t(), 0.3, True, True),
    lambda h: nn.Dropout(0.3, inplace=True)(h.t()),
]
SHARED: list[Write] = [
    lambda h: h[0].expand(4, 10).zero_(),
    lambda h: torch.broadcast_to(h[0], (4, 10)).fill_(0.9),
    lambda h: h[0].expand(4, 10)[:, 2].fill_(0.9),
    lambda h: h[0].expand(4, 10).unbind(0)[1].zero_(),
    lambda h: h[0].expand(4, 10).chunk(2, 1)[0].zero_(),
    set_row,
    add_to_expanded,
]
HOLD: list[Write] = [
    lambda h: h[2:5].normal_(),
    lambda h: h[:, :5].uniform_(),
    lambda h: functional.dropout(h, 0.3, inplace=True),
    lambda h: functional.dropout(h.t(), 0.3, False, True),
    lambda h: functional.relu(h.t(), inplace=True),
    lambda h: h[0].expand(4, 10).clone().zero_(),
    lambda h: h[:, :5].copy_(torch.randn_like(h[:, :5])),
    lambda h: h.t().mul_(2),
    lambda h: h[0].expand(4, 10).unsqueeze_(0),
]


@pytest.mark.parametrize("write", DRAWS)
def test_a_draw_into_a_view_that_is_not_contiguous_is_refused(write: Write) -> None:
    with pytest.raises(fxremat.UnsupportedGraphError, match="not contiguous") as refused:
        fxremat.optimize(after(write), "1GiB", **QUICK)(torch.randn(10, 10, requires_grad=True))
    assert re.search(r"(test_writes|init)\.py:\d+ ", str(refused.value))
    assert "Remedy" in str(refused.value)


@pytest.mark.parametrize("write", SHARED)
def test_a_write_into_an_expanded_tensor_is_refused(write: Write) -> None:
    with pytest.raises(fxremat.UnsupportedGraphError, match="share one place") as refused:
        fxremat.optimize(after(write), "1GiB", **QUICK)(torch.randn(10, 10, requires_grad=True))
    assert "test_writes.py:" in str(refused.value)


@pytest.mark.parametrize("write", HOLD)
def test_other_writes_have_the_bits_of_eager(write: Write) -> None:
    x = torch.randn(10, 10, requires_grad=True)
    step, states, results = after(write), [], []
    for call in (step, fxremat.optimize(step, "1GiB", **QUICK)):
        torch.manual_seed(3)
        results.append(call(x))
        states.append(torch.get_rng_state())
    assert torch.equal(*results)
    assert torch.equal(*states)


def test_an_output_viewed_without_gradients_is_refused() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            flat = x.view(-1)
        return flat[:1], x * 2

    with pytest.raises(fxremat.UnsupportedGraphError, match="no_grad"):
        fxremat.optimize(step, "1GiB", **QUICK)(torch.randn(10, 10, requires_grad=True))


@pytest.mark.parametrize(
    "step",
    [
        lambda x: (x * 2).unfold(0, 2, 1),
        lambda x: torch.as_strided(x.sum(0), (2, 2), (1, 1)),
        lambda x: (x * 2)[:, :4].unfold(1, 3, 1).transpose(0, 2),
    ],
)
def test_an_output_whose_windows_overlap_is_refused(step: Write) -> None:
    x = torch.randn(10, 10, requires_grad=True)
    with pytest.raises(fxremat.UnsupportedGraphError, match="share one place"):
        fxremat.optimize(step, "1GiB", **QUICK)(x)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: (x * 2).unfold(0, 2, 2),
        lambda x: (x * 2).unfold(0, 2, 1).contiguous(),
        lambda x: x.sum(0)[None].expand(3, 10),
        lambda x: (x * 2).t()[1:, ::2],
    ],
)
def test_gradients_of_other_views_are_those_of_eager(step: Write) -> None:
    x = torch.randn(10, 10, requires_grad=True)
    gradients: list[torch.Tensor] = []
    for call in (step, fxremat.optimize(step, "1GiB", **QUICK)):
        output = call(x)
        assert isinstance(output, torch.Tensor)
        weights = torch.arange(output.numel()).mul(0.37).cos().view(output.shape)
        gradients += torch.autograd.grad((output * weights).sum(), x)
    assert torch.equal(*gradients)
