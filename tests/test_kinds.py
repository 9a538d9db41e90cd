"""Tiny models of many kinds, each with something that recomputation gets wrong elsewhere."""

from typing import Any

import pytest
import torch

import fxremat
from tests import (
    kinds_alias,
    kinds_amp,
    kinds_custom,
    kinds_flow,
    kinds_numeric,
    kinds_ops,
    kinds_quant,
    kinds_rng,
    kinds_state,
)
from tests.kinds_ops import drawing_unseen, writing_to_buffers
from tests.steps import (
    QUICK,
    Make,
    as_traced,
    budgets_of,
    captured,
    hold_at_every_budget,
    made,
    measures_as_predicted,
    owner_of,
    same_at_every_budget,
    weighted_sum,
)

KINDS: tuple[Any, ...] = (
    kinds_alias, kinds_amp, kinds_custom, kinds_flow, kinds_numeric,
    kinds_ops, kinds_quant, kinds_rng, kinds_state,
)  # fmt: skip

# One or two of each kind run always, the others with the slow tests.
ALWAYS = frozenset(
    {
        "view_kept_base_written", "arguments_of_one_storage", "cache_switched_off",
        "own_function_in_full_precision", "marked_dirty", "gradients_not_materialised",
        "drawing_unseen", "writing_to_buffers", "quantised_per_channel", "coins_and_lots",
        "ties_in_order", "results_collected", "scanned_associatively", "rows_of_a_vmap",
    }
)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> None:
    """No graph of an earlier model counts against Dynamo's limits."""
    torch._dynamo.reset()


def of_all(which: str) -> list[Any]:
    """The models of all kinds that stand in one list."""
    makes: list[Make] = [make for kind in KINDS for make in getattr(kind, which)]
    slow = pytest.mark.slow
    return [
        pytest.param(make, id=make.__name__, marks=() if make.__name__ in ALWAYS else slow)
        for make in makes
    ]


@pytest.mark.filterwarnings(
    "ignore:index_reduce\\(\\) is in beta",
    "ignore:.torch.jit.script:DeprecationWarning",  # the import of forward derivatives calls it
)
@pytest.mark.parametrize("make", of_all("HOLD"))
def test_plans_change_no_bit(make: Make) -> None:
    hold_at_every_budget(make)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # says Dynamo of itself
@pytest.mark.parametrize("make", of_all("AS_TRACED"))
def test_plans_change_no_bit_of_what_was_traced(make: Make) -> None:
    hold_at_every_budget(make, reference=as_traced)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("make", of_all("UNMEASURED"))
def test_plans_that_measure_otherwise_change_no_bit(make: Make) -> None:
    same_at_every_budget(make)


@pytest.mark.xfail(strict=True, reason="what is held, or found by verify, is not as predicted")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("make", of_all("UNMEASURED"))
def test_plans_hold_what_they_say(make: Make) -> None:
    measures_as_predicted(make, budgets_of(captured(make), 0)[0])


@pytest.mark.xfail(strict=True, reason="not good yet")
@pytest.mark.parametrize("make", of_all("OPEN"))
def test_plans_change_no_bit_of_harder_models(make: Make) -> None:
    same_at_every_budget(make)


@pytest.mark.parametrize("make", of_all("REFUSED"))
def test_a_refusal_names_the_line_and_a_way_out(make: Make) -> None:
    fn, args = made(make)
    line = f"{make.__module__.split('.')[-1]}.py:"
    with pytest.raises(fxremat.FxrematError) as refused:
        fxremat.optimize(fn, "1GiB", **QUICK)(*args)
    words = str(refused.value)
    assert line in words or "container.py:" in words  # a module of torch called by one of torch
    assert "Remedy" in words or "outside" in words


@pytest.mark.parametrize("make", [drawing_unseen, writing_to_buffers])
def test_operators_of_a_library_run_once_in_a_step(make: Make) -> None:
    budget_bytes = budgets_of(captured(make), 0)[0]
    plain, _ = made(make)
    fn, args = made(make)
    step = fxremat.optimize(fn, budget_bytes, **QUICK)
    calls: list[list[str]] = []
    for call in (plain, step, step):  # the first call of a plan may try its operators
        kinds_ops.CALLS.clear()
        weighted_sum(call(*args)).backward()
        calls.append(list(kinds_ops.CALLS))
        args[0].grad = None
        owner = owner_of(fn)
        assert owner is not None
        owner.zero_grad()
    assert calls[2] == calls[0] != []
