"""What stock models do inside their forward that Dynamo does not trace by itself."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fxremat
from tests.steps import (
    QUICK,
    Made,
    Make,
    bound,
    differing,
    hold_at_every_budget,
    leaf,
    run,
    same_gradients,
)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Starting(nn.Module):
    """Makes its input a leaf, as speech models do."""

    def __init__(self, beside: bool = False) -> None:
        super().__init__()
        self.conv, self.beside = nn.Conv1d(1, 6, 5), beside

    def forward(self, x: torch.Tensor) -> Any:
        h = x[:, None]
        if torch.is_grad_enabled():
            h.requires_grad = True
        y = self.conv(h).sigmoid().exp()
        return (y, h.sin()) if self.beside else y


def starting() -> Made:
    return Starting(), (torch.randn(3, 40),)


def test_a_computed_value_may_be_made_a_leaf() -> None:
    hold_at_every_budget(starting)


def test_a_leaf_that_alone_makes_an_output_differentiable_is_refused() -> None:
    model = fxremat.optimize(Starting(beside=True), "1MiB", **QUICK)
    with pytest.raises(fxremat.CaptureError, match="only because of that"):
        model(torch.randn(3, 40))


def test_what_is_not_trained_may_make_leaves() -> None:
    torch.manual_seed(0)
    model, x = Starting(), torch.randn(3, 40)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(expected, fxremat.optimize(model, "1MiB", **QUICK)(x))


def test_a_size_that_depends_on_values_is_refused_in_few_words() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if torch.nonzero(x > 0).size(0) > 3 else x.cos()

    planned = fxremat.optimize(step, "1MiB", **QUICK)
    with pytest.raises(fxremat.CaptureError, match="fullgraph=False") as refused:
        planned(leaf(9))
    words = str(refused.value)
    assert "test_stock.py" in words
    assert "TORCH" not in words
    assert len(words) < 1000


def resampled(mode: str) -> Make:
    def make() -> Made:
        conv = nn.Conv2d(2, 3, 3)

        def step(x: torch.Tensor) -> Any:
            h = functional.interpolate(conv(x).sin(), size=(17, 11), mode=mode)
            return functional.interpolate(h.exp(), scale_factor=2, mode=mode).cos()

        return bound(step, conv), (leaf(2, 2, 8, 7),)

    return make


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest", "nearest-exact", "area"])
def test_resampling_keeps_the_bits_of_eager(mode: str) -> None:
    hold_at_every_budget(resampled(mode), fractions=(0.5, 0))


def test_resampling_is_traced_by_others_as_before() -> None:
    x = torch.randn(1, 2, 5, 5, requires_grad=True)
    stretch: Callable[[Any], Any] = lambda x: functional.interpolate(  # noqa: E731
        x, scale_factor=2, mode="bilinear"
    )
    before = torch.compile(stretch, backend="aot_eager")(x)
    fxremat.optimize(stretch, "1MiB", **QUICK)(x)
    torch._dynamo.reset()
    assert torch.equal(before, torch.compile(stretch, backend="aot_eager")(x))


def drawing_from_numpy(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * torch.from_numpy(np.random.rand(5)).float()).exp()


def test_draws_of_numpy_are_refused_in_one_graph() -> None:
    step = fxremat.optimize(drawing_from_numpy, "1MiB", **QUICK)
    with pytest.raises(fxremat.CaptureError, match="fullgraph=False"):
        step(leaf(5))


def test_draws_of_numpy_stay_those_of_numpy_in_pieces() -> None:
    def wrap(planned: bool) -> Callable[[Any], Any]:
        np.random.seed(3)
        options = {**QUICK, "fullgraph": False}
        return lambda fn: fxremat.optimize(fn, "1MiB", **options) if planned else fn

    def make() -> Made:
        return drawing_from_numpy, (leaf(5),)

    assert differing(run(make, wrap(planned=False)), run(make, wrap(planned=True))) == []


def bert(**settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 44, "max_position_embeddings": 32,
    }  # fmt: skip
    return transformers.BertModel(transformers.BertConfig(**sizes, **settings)).train()


def test_hooks_are_installed_in_the_first_call_that_asks() -> None:
    """They are in a lock, which Dynamo does not enter."""
    plain, model = bert(hidden_dropout_prob=0.0), bert(hidden_dropout_prob=0.0)
    ids = torch.arange(34).view(2, 17)
    with torch.no_grad():
        expected = plain.eval()(ids, output_hidden_states=True).hidden_states
        got = fxremat.optimize(model.eval(), "1GiB", **QUICK)(ids, output_hidden_states=True)
    assert len(expected) == len(got.hidden_states) == 3
    assert all(torch.equal(a, b) for a, b in zip(expected, got.hidden_states, strict=True))


def hidden_states(model: Any, **asked: bool) -> tuple[torch.Tensor, ...]:
    """Everything that a step with all collected outputs shows, but for the gradients."""
    torch.manual_seed(2)
    model.zero_grad()
    output = model(input_ids=torch.arange(34).view(2, 17), **asked)
    found = (*(output.hidden_states or ()), *(output.attentions or ()), output.pooler_output)
    sum(part.sin().sum() for part in found).backward()
    return (*found, torch.get_rng_state())


@pytest.mark.slow
def test_hidden_states_and_attentions_are_collected() -> None:
    asked = {"output_hidden_states": True, "output_attentions": True}
    plain, model = (bert(attn_implementation="eager") for _ in range(2))
    fxremat.optimize(model, "90%", **QUICK)
    for _ in range(2):
        expected, got = hidden_states(plain, **asked), hidden_states(model, **asked)
        assert len(got) == len(expected) == 3 + 2 + 2
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        assert same_gradients(plain, model)
    assert len(fxremat.report(model).graphs) == 1


@pytest.mark.slow
def test_hidden_states_may_be_asked_for_later() -> None:
    plain, model = bert(), bert()
    fxremat.optimize(model, "1GiB", **QUICK)
    for asked in (False, True, True):
        expected = hidden_states(plain, output_hidden_states=asked)
        got = hidden_states(model, output_hidden_states=asked)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert len(fxremat.report(model).graphs) == 2
