"""Graphs between graph breaks under one plan, and forwards that wait for their backward."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from tests.steps import QUICK, same_gradients

X = torch.randn(200, 16)
PIECES: dict[str, Any] = {**QUICK, "fullgraph": False}


class Broken(nn.Module):
    """Three pieces, each with values that are cheap to make again."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.ModuleList(nn.Linear(16, 16) for _ in range(2)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.run(0, x)
        torch._dynamo.graph_break()
        x = self.run(1, x)
        torch._dynamo.graph_break()
        return self.run(2, x)

    def run(self, part: int, x: torch.Tensor) -> torch.Tensor:
        for layer in self.parts[part]:  # type: ignore[attr-defined]  # why: it is a ModuleList
            x = nn.functional.dropout(torch.tanh(layer(x)) * x.sin(), 0.1)
        return x


def step(model: nn.Module) -> torch.Tensor:
    """One seeded step from fresh gradients; the generator's state after it."""
    torch.manual_seed(3)
    model.zero_grad()
    model(X).square().sum().backward()
    return torch.get_rng_state()


def measured_bytes(model: nn.Module) -> int:
    """Peak of a warm step with what is resident. [bytes]"""
    model.zero_grad()
    peak = fxremat.measure_peak(lambda: model(X).sum().backward())
    return peak.peak_bytes + sum(t.nbytes for t in (*model.parameters(), X))


def test_pieces_are_planned_together_from_the_second_call_on() -> None:
    torch.manual_seed(0)
    plain = Broken()
    model = fxremat.optimize(copy.deepcopy(plain), "1GiB", **PIECES)
    step(model)
    report = fxremat.report(model)
    assert any("3 pieces" in note for note in report.notes)
    floor_bytes, baseline_bytes = report.floor_bytes, report.baseline_peak_bytes
    assert floor_bytes < baseline_bytes
    for budget_bytes in (baseline_bytes, (floor_bytes + baseline_bytes) // 2, floor_bytes):
        model = fxremat.optimize(copy.deepcopy(plain), budget_bytes, **PIECES)
        for _ in range(3):  # little is kept in the first call; then the plan of all runs
            assert torch.equal(step(plain), step(model))
            assert same_gradients(plain, model)
        assert fxremat.report(model).predicted_peak_bytes <= budget_bytes
        assert measured_bytes(model) <= budget_bytes + 8  # the caller's sum and its gradient
    model = fxremat.optimize(copy.deepcopy(plain), floor_bytes * 4 // 5, **PIECES)
    with pytest.raises(fxremat.InfeasibleBudgetError):
        step(model)


def test_a_percentage_is_of_all_pieces_together() -> None:
    model = fxremat.optimize(Broken(), "90%", **PIECES)
    step(model)
    report = fxremat.report(model)
    assert report.budget_bytes == report.baseline_peak_bytes * 9 // 10
    step(model)
    assert measured_bytes(model) <= report.budget_bytes + 8


def test_forwards_that_wait_are_counted_and_the_number_that_fits_is_named() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    fxremat.optimize(model, "1GiB", **QUICK)
    model(X).sum().backward()
    peak_bytes = fxremat.report(model).predicted_peak_bytes
    fxremat.optimize(model, peak_bytes, **QUICK)
    model.zero_grad()
    waiting = model(X)
    with pytest.raises(fxremat.InfeasibleBudgetError, match="room for 1 at once"):
        model(X)
    waiting.sum().backward()
    model.zero_grad()
    dropped = model(X)  # nothing waits any more
    del dropped
    model(X)


def test_a_budget_too_small_for_the_first_piece_speaks_of_later_ones() -> None:
    model = fxremat.optimize(Broken(), 1000, **PIECES)
    with pytest.raises(fxremat.InfeasibleBudgetError, match="later pieces"):
        step(model)
    roomy = fxremat.optimize(Broken(), "1GiB", **PIECES)
    step(roomy)
    enough = fxremat.optimize(Broken(), fxremat.report(roomy).floor_bytes, **PIECES)
    step(enough)


class Widening(Broken):
    """Its second piece is another one for each width, and needs more the wider it is."""

    width = 0

    def run(self, part: int, x: torch.Tensor) -> torch.Tensor:
        x = super().run(part, x)
        if part != 1 or not self.width:
            return x
        wide = torch.cat([x * k for k in range(self.width)], 1).tanh().exp()
        return wide[:, :16].contiguous()


def refusal(model: nn.Module) -> str:
    """Why a step is refused; nothing of it is held afterwards."""
    with pytest.raises(fxremat.InfeasibleBudgetError) as refused:
        step(model)
    return str(refused.value)


@pytest.mark.slow
def test_a_new_piece_that_does_not_fit_beside_the_plan_of_the_others_fits_the_next_time() -> None:
    model, plain = Widening(), Widening()
    plain.load_state_dict(model.state_dict())
    roomy = fxremat.optimize(copy.deepcopy(model), "1GiB", **PIECES)
    roomy.width = 4
    step(roomy)
    budget_bytes = fxremat.report(roomy).floor_bytes
    fxremat.optimize(model, budget_bytes, **PIECES)
    for _ in range(2):  # the second call follows the plan of all pieces, without the wide one
        step(model)
    model.width = plain.width = 4
    assert "made again" in refusal(model)
    for width in (4, 4, 0, 4):
        model.width = plain.width = width
        assert torch.equal(step(model), step(plain))
        assert same_gradients(model, plain)
        assert measured_bytes(model) <= budget_bytes
    assert "as little as it can" in str(fxremat.report(model))
    model.width = 5
    assert "made again" not in refusal(model)


class Counting(Broken):
    """Its first piece is compiled anew in each call."""

    calls = 0

    def run(self, part: int, x: torch.Tensor) -> torch.Tensor:
        x = super().run(part, x)
        self.calls += part == 0
        return x + self.calls if part == 0 else x


def test_pieces_that_are_compiled_anew_in_each_call_keep_little_and_the_report_says_so() -> None:
    model, plain = Counting(), Counting()
    plain.load_state_dict(model.state_dict())
    fxremat.optimize(model, "60%", **PIECES)
    for _ in range(4):
        assert torch.equal(step(model), step(plain))
        assert same_gradients(model, plain)
    assert "as little as it can" in str(fxremat.report(model))


def test_a_kind_of_call_that_comes_again_is_planned_again() -> None:
    model = fxremat.optimize(Widening(), "60%", **PIECES)
    for width in (0, 0, 4):  # the new kind ends the plan of the first
        model.width = width
        step(model)
    model.width = 0
    step(model)
    assert "as little as it can" in str(fxremat.report(model))
    step(model)
    report = fxremat.report(model)
    assert "as little as it can" not in str(report)
    assert measured_bytes(model) <= report.budget_bytes
