"""``capture``: a problem without a step, from real or fake tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxremat
from tests.steps import QUICK


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = nn.functional.dropout(nn.functional.gelu(block(x)), 0.1)
        return self.norm(x).square().sum()


X = torch.randn(20, 8)


def captured(**options: Any) -> fxremat.RematProblem:
    return fxremat.capture(Net(), (X,), **{**QUICK, **options})


def test_nothing_runs_and_nothing_changes() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    fxremat.capture(model, (X,), **QUICK)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    assert "_compiled_call_impl" not in model.__dict__
    assert all(p.grad is None for p in model.parameters())


def test_the_problem_repeats_exactly() -> None:
    assert captured() == captured()


def test_fake_tensors_serve() -> None:
    with FakeTensorMode():
        fake = fxremat.capture(Net(), (torch.randn(20, 8),), **{**QUICK, "costs": "roofline"})
    real = captured(costs="roofline")
    assert [op.target for op in fake.operations] == [op.target for op in real.operations]
    assert [s.size_bytes for s in fake.storages] == [s.size_bytes for s in real.storages]
    assert fake.resident_bytes == real.resident_bytes


def test_a_saved_problem_gives_the_same_plans(tmp_path: Path) -> None:
    problem = captured()
    problem.save(tmp_path / "net.json")
    loaded = fxremat.load(tmp_path / "net.json")
    assert loaded == problem
    budgets = [plan.budget_bytes for plan in fxremat.frontier(problem, 3)]
    for budget_bytes in budgets:
        one, other = fxremat.plan(problem, budget_bytes), fxremat.plan(loaded, budget_bytes)
        assert one.schedule == other.schedule
        assert one.peak_bytes == other.peak_bytes <= budget_bytes


def test_operations_name_the_users_line_and_module() -> None:
    problem = captured()
    products = [op for op in problem.forward if "addmm" in op.target]
    assert [op.module for op in products] == ["blocks.0", "blocks.1", "blocks.2"]
    gelus = [op for op in problem.forward if "gelu" in op.target]
    assert all("test_capture.py:" in op.source for op in gelus)


def test_resident_bytes_are_counted_once_for_each_storage() -> None:
    shared = nn.Linear(8, 8, bias=False)
    unused = nn.Linear(8, 8, bias=False)
    problem = fxremat.capture(nn.Sequential(shared, nn.Tanh(), shared), (X,), **QUICK)
    assert problem.resident_bytes == shared.weight.nbytes + X.nbytes

    class WithUnused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = shared, unused

        def forward(self, x: torch.Tensor) -> Any:
            return torch.tanh(self.used(x))

    problem = fxremat.capture(WithUnused(), (X,), **QUICK)
    assert problem.resident_bytes == 2 * shared.weight.nbytes + X.nbytes


def test_a_view_keeps_the_bytes_of_its_base() -> None:
    def sliced(x: torch.Tensor) -> Any:
        return torch.exp(x)[:, :2].square().sum()

    problem = fxremat.capture(sliced, (X.clone().requires_grad_(),), **QUICK)
    (base,) = [s for s in problem.storages if s.name == "exp"]
    assert base.size_bytes == X.nbytes


@pytest.mark.parametrize("gradients", [True, False])
def test_a_step_without_a_backward_is_refused(gradients: bool) -> None:
    model = Net().requires_grad_(False) if gradients else Net()
    with (
        torch.set_grad_enabled(gradients),
        pytest.raises(fxremat.CaptureError, match="nothing to diff"),
    ):
        fxremat.capture(model, (X,), **QUICK)


def test_sizes_that_depend_on_data_are_refused_with_the_line() -> None:
    def compact(x: torch.Tensor) -> Any:
        return x[x > 0].exp().sum()

    with pytest.raises(fxremat.FxrematError) as caught:
        fxremat.capture(compact, (X.clone().requires_grad_(),), **QUICK)
    assert "test_capture.py" in str(caught.value)


def test_sparse_tensors_are_refused_by_name() -> None:
    def sparse(x: torch.Tensor) -> Any:
        return torch.sparse.mm(x.to_sparse(), x.t()).sum()

    with pytest.raises(fxremat.FxrematError) as caught:
        fxremat.capture(sparse, (X.clone().requires_grad_(),), **QUICK)
    assert "test_capture.py" in str(caught.value)


def test_a_captured_problem_is_that_of_the_optimised_step() -> None:
    def views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x * 2).sin().exp()
        return y, y[1:]

    x = torch.randn(9, 5, requires_grad=True)
    problem = fxremat.capture(views, (x,), **QUICK)
    step = fxremat.optimize(views, "1MiB", **QUICK)
    step(x)[0].sum().backward()
    report = fxremat.report(step)
    assert fxremat.plan(problem, "1MiB").peak_bytes == report.predicted_peak_bytes
    assert fxremat.frontier(problem, 2)[-1].peak_bytes == report.floor_bytes


def scattered(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = torch.slice_scatter(x.cos()[10:200], torch.ones(190, 30), 1, 0, 60, 2)
    return rows[:3], rows[3:].t()


def written_in_part(x: torch.Tensor) -> torch.Tensor:
    rows = x.cos()[10:200]
    rows[:, ::2] = 1
    return rows.sin() * torch.select_scatter(x.sin()[10:200], torch.ones(60), 0, 3)


@pytest.mark.parametrize("step", [scattered, written_in_part])
def test_a_second_trace_of_one_step_holds_as_much_as_the_first(step: Any) -> None:
    x = torch.randn(301, 60, requires_grad=True)
    found = []
    for _ in range(3):
        torch._dynamo.reset()  # torch keeps its cache of fake results
        problem = fxremat.capture(step, (x,), **QUICK)
        workspaces = [operation.workspace_bytes for operation in problem.operations]
        found.append(([s.size_bytes for s in problem.storages], workspaces))
    assert found[0] == found[1] == found[2]
