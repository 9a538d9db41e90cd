"""Stock models at budgets down to the floor: no bit changes, and the peak is the predicted one.

``make models`` runs the whole sweep, the usual run of the suite two budgets of two models.
"""

import pytest
import torch

import fxremat
from tests.models import MODELS, made
from tests.steps import CACHE, budgets_of

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

QUICK_MODELS = ("gpt2",)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def hold(name: str, budget_bytes: int, steps: int) -> None:
    """Assert that a model keeps its bits and its budget."""
    model, args, kwargs = made(name)
    check = fxremat.verify(
        model, args, kwargs, budget=budget_bytes, steps=steps, repeats=1, cache_dir=CACHE
    )
    check.raise_if_broken()
    assert check.ok
    assert check.max_abs_diff == {}
    assert check.measured_peak_bytes == check.predicted_peak_bytes <= budget_bytes


def infeasible_below(name: str, floor_bytes: int) -> None:
    """Assert that one byte less raises before anything runs."""
    model, args, kwargs = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    fxremat.optimize(model, floor_bytes - 1, cache_dir=CACHE)
    with pytest.raises(fxremat.InfeasibleBudgetError, match=f"{floor_bytes:,}") as caught:
        model(*args, **kwargs)
    assert caught.value.floor_bytes == floor_bytes
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())


def problem_of(name: str) -> fxremat.RematProblem:
    model, args, kwargs = made(name)
    return fxremat.capture(model, args, kwargs, cache_dir=CACHE)


@pytest.mark.parametrize("name", QUICK_MODELS)
def test_half_way_to_the_floor_and_at_the_floor(name: str) -> None:
    half_bytes, floor_bytes = budgets_of(problem_of(name), 0.5, 0)
    hold(name, half_bytes, steps=2)
    hold(name, floor_bytes, steps=2)
    infeasible_below(name, floor_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_five_budgets(name: str) -> None:
    budgets = budgets_of(problem_of(name), 1, 0.75, 0.5, 0.25, 0)
    for budget_bytes in budgets:
        torch._dynamo.reset()
        hold(name, budget_bytes, steps=3)
    infeasible_below(name, budgets[-1])
