"""Dropout under a plan is eager's: the same bits, the same draws, the same tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fxremat
from fxremat.check import same_bits
from tests.kinds_rng import (
    dropped_and_written,
    dropped_with_scales_that_round,
    nothing_or_everything_dropped,
)
from tests.steps import QUICK, Make, differing, hold_at_every_budget, leaf, run

SHAPES = {"dropout3d": (2, 3, 2, 2, 2), "dropout1d": (2, 3, 4)}
NAMES = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_every_dropout_shows_what_eager_shows(name: str, p: float, training: bool) -> None:
    def step(x: torch.Tensor) -> Any:
        return getattr(functional, name)(x.sin(), p, training=training) * x

    def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return step, (leaf(*SHAPES.get(name, (2, 3, 4, 5))),)

    assert differing(run(make), run(make, lambda f: fxremat.optimize(f, "100%", **QUICK))) == []


@pytest.mark.parametrize(
    "make",
    [nothing_or_everything_dropped, dropped_and_written, dropped_with_scales_that_round],
    ids=lambda make: make.__name__,
)
def test_plans_keep_the_bits_of_dropouts_that_torch_traces_otherwise(make: Make) -> None:
    hold_at_every_budget(make)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_probability_gives_the_bits_of_eager(dtype: torch.dtype) -> None:
    probabilities = [i / 40 for i in range(41)]

    def step(*values: torch.Tensor) -> Any:
        return [functional.dropout(x, p) for x, p in zip(values, probabilities, strict=True)]

    def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return step, tuple(leaf(5, 7, dtype=dtype) for _ in probabilities)

    assert differing(run(make), run(make, lambda f: fxremat.optimize(f, "100%", **QUICK))) == []


@pytest.mark.parametrize("p", [0.0, 0.15, 0.5, 1.0])
def test_an_empty_tensor_draws_nothing(p: float) -> None:
    def step(x: torch.Tensor) -> Any:
        return x.sin() + functional.dropout(x[:0].exp(), p).sum()

    def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return step, (leaf(5, 7),)

    assert differing(run(make), run(make, lambda f: fxremat.optimize(f, "100%", **QUICK))) == []


def test_a_call_without_gradients_draws_as_eager_does() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0), nn.Dropout(0.15))
    x, states = torch.randn(3, 4), []
    outputs = []
    calls: tuple[Callable[..., Any], ...] = (
        model.forward,
        fxremat.optimize(model, "1MiB", **QUICK),
    )
    for call in calls:
        torch.manual_seed(3)
        with torch.no_grad():
            outputs.append(call(x))
        states.append(torch.get_rng_state())
    assert same_bits(*outputs)
    assert same_bits(*states)


def test_torch_has_its_own_dropout_back_after_a_trace() -> None:
    before = dict(torch.ops.aten.dropout.default.py_kernels)
    step: Any = fxremat.optimize(lambda x: functional.dropout(x, 0.15), "1MiB", **QUICK)
    step(leaf(3, 4)).sum().backward()
    assert torch.ops.aten.dropout.default.py_kernels == before


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "movedim": lambda x: x.movedim(0, -1),
    "transpose": lambda x: x.transpose(1, 2),
    "slices": lambda x: x[..., ::2],
    "expanded": lambda x: x[:1].expand(3, *x.shape[1:]),
}
DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.15),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.1, True),
    "feature_alpha_dropout": lambda x: functional.feature_alpha_dropout(x, 0.1, True),
    "rrelu": lambda x: torch.rand_like(functional.rrelu(x, training=True)) * x,
    "rrelu of evaluation": lambda x: functional.rrelu(x),
    "alpha_dropout of evaluation": lambda x: functional.alpha_dropout(x, 0.1, False),
    "rand_like": lambda x: torch.rand_like(x) * x,
    "gumbel_softmax": lambda x: functional.gumbel_softmax(x),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) * x,
}
REFUSED = {
    (draw, layout) for draw in ("alpha_dropout", "rrelu") for layout in ("movedim", "transpose")
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("draw", DRAWS)
def test_draws_for_strided_memory_are_those_of_eager_or_refused(
    draw: str, layout: str, dtype: torch.dtype
) -> None:
    def step(x: torch.Tensor) -> Any:
        return DRAWS[draw](LAYOUTS[layout](x))

    def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return step, (leaf(2, 3, 4, 6, dtype=dtype),)

    def optimised(fn: Any) -> Any:
        return fxremat.optimize(fn, "100%", **QUICK)

    if (draw, layout) in REFUSED:
        with pytest.raises(fxremat.UnsupportedGraphError, match=r"contiguous\(\)"):
            run(make, optimised)
        return
    assert differing(run(make), run(make, optimised)) == []
