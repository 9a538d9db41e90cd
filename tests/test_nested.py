"""Plans that replay operations more than once, run for real."""

import pytest
import torch
from torch import nn

import fxremat
from fxremat.plans import Plan, make_plan
from tests.steps import QUICK


class Residual(nn.Module):
    """Blocks whose inside is no larger than what goes from one to the next."""

    def __init__(self, blocks: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 16))
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Unrolled(nn.Module):
    """A cell that is called step by step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[1], 8)
        for step in range(self.steps):
            h, c = self.cell(x[step], (h, c))
        return h.sum()


CASES: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "residual": (Residual(16, 0.0), torch.randn(1024, 16)),
    "dropout": (Residual(12, 0.2), torch.randn(1024, 16)),
    "recurrence": (Unrolled(16), torch.randn(16, 512, 8)),
}


ALWAYS = (("rotor", "dropout"),)


@pytest.mark.parametrize(
    ("solver", "kind"),
    [
        pytest.param(solver, kind, marks=() if (solver, kind) in ALWAYS else pytest.mark.slow)
        for solver in ("rotor", "revolve", "halving")
        for kind in CASES
    ],
)
def test_nested_replays_keep_the_bits_and_hold_what_is_predicted(solver: str, kind: str) -> None:
    torch._dynamo.reset()
    model, x = CASES[kind]
    problem = fxremat.capture(model, (x,), **QUICK)
    block = fxremat.plan(problem, "1GiB", solver="block").peak_bytes
    least: Plan | None = None
    for percent in range(5, 101, 5):
        budget = problem.resident_bytes + percent * (block - problem.resident_bytes) // 100
        solution = fxremat.SOLVERS[solver](problem, budget, time_limit_s=60.0)
        if solution.schedule is not None:
            least = make_plan(problem, budget, solution)
            break
    assert least is not None
    forward_ns = sum(operation.cost_ns for operation in problem.forward)
    assert least.recompute_ns > forward_ns  # something runs for a third time
    assert least.peak_bytes < block
    options = QUICK | {"solver": solver}
    check = fxremat.verify(model, (x,), budget=least.peak_bytes, steps=2, repeats=1, **options)
    assert not any(check.differing.values())
    assert check.rng_equal
    assert check.measured_peak_bytes == check.predicted_peak_bytes
