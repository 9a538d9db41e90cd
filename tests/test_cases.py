"""Small models after user reports, at budgets from the baseline down to the floor.

Each says in its docstring what must hold; the harness beside them runs and compares.
"""

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fxremat
from tests.steps import QUICK

NAMES = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("[a-z]*.py"))
FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.0)
ALWAYS_BY_INDUCTOR = ("rng_dropout_mlp", "alias_view_and_base")
INDUCTOR_ATOL = 1e-4  # values are of order one: some 256 epsilons of the largest

harness: Any = importlib.import_module("tests.cases._harness")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def options_of(name: str) -> dict[str, Any]:
    """Options under which a case can be planned at all."""
    return QUICK | ({"fullgraph": False} if name == "flow_break_in_middle" else {})


def case(name: str) -> ModuleType:
    """The module of a case."""
    return importlib.import_module(f"tests.cases.{name}")


def run(name: str, budget: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """What was optimised, and everything that its steps showed."""
    kept: list[Any] = []

    def wrap(fn: Any) -> Any:
        kept.append(fxremat.optimize(fn, budget, **options_of(name), **options))
        return kept[0]

    seen = harness.run(*case(name).make(), wrap=wrap)
    return kept[0], seen


@functools.lru_cache(maxsize=32)
def budgets(name: str) -> tuple[int, ...]:
    """Budgets for all calls of a case: of the one that needs most. [bytes]"""
    fn, _ = run(name, "1TiB")
    report = fxremat.report(fn)
    graphs = [report] if options_of(name) != QUICK else [report, *report.graphs]
    floor = max(graph.floor_bytes for graph in graphs)
    baseline = max(floor, *(graph.baseline_peak_bytes for graph in graphs))
    calls = [
        leaf for call in harness.steps_of(*case(name).make()[1:]) for leaf in harness.leaves(call)
    ]
    kept = {id(t): t.nbytes for t in calls if isinstance(t, torch.Tensor) and t.requires_grad}
    if len(report.graphs) > 1:  # the gradients of earlier calls' arguments are still there
        more = 2 * sum(kept.values())  # they and sums with them
        floor, baseline = floor + more, baseline + more
    return tuple(floor + int(fraction * (baseline - floor)) for fraction in FRACTIONS)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "grad_gradient_penalty"])
def test_a_case_holds_at_every_budget(name: str) -> None:
    notes = case(name).make()[3]
    expected = harness.run(*case(name).make())
    for budget_bytes in sorted(set(budgets(name)), reverse=True):
        holds(name, budget_bytes, expected, notes)


def holds(name: str, budget_bytes: int, expected: dict[str, Any], notes: dict[str, Any]) -> None:
    """Assert that a budget changes nothing that the case shows, and is kept."""
    if name == "grad_backward_twice":  # a graph that is kept needs more than one that is not
        with pytest.raises(fxremat.InfeasibleBudgetError, match="retain_graph"):
            run(name, budget_bytes)
        budget_bytes *= 2
    fn, got = run(name, budget_bytes)
    assert harness.compare(expected, got, notes.get("atol", 0.0)) == []
    report = fxremat.report(fn)
    assert report.predicted_peak_bytes <= report.budget_bytes


def test_a_penalty_on_gradients_is_refused_in_words() -> None:
    with pytest.raises(fxremat.UnsupportedGraphError, match="create_graph"):
        run("grad_gradient_penalty", "1GiB")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ALWAYS_BY_INDUCTOR else pytest.mark.slow)
        for n in NAMES
        if not n.startswith("grad_")
    ],
)
def test_a_case_holds_by_inductor(name: str) -> None:
    notes = case(name).make()[3]
    expected = harness.run(*case(name).make())
    high_bytes, *_, low_bytes = budgets(name)
    middle_bytes = (high_bytes + low_bytes) // 2
    try:
        _, got = run(name, middle_bytes, executor="inductor")
    except fxremat.InfeasibleBudgetError as error:  # its code may hold more than any plan says
        _, got = run(name, 2 * error.floor_bytes, executor="inductor")
    if name == "rng_attention_dropout":  # Inductor decomposes what torch's trace does not
        for seen in (expected, got):
            seen.pop("rng_state")
    assert harness.compare(expected, got, max(INDUCTOR_ATOL, notes.get("atol", 0.0))) == []
