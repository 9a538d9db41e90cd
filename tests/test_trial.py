"""The trial of Inductor's code; eager code that holds more than planned stands for Inductor's."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

import fxremat
from fxremat import trial
from fxremat.check import same_bits
from fxremat.passes.boxed import boxed
from fxremat.passes.inductor import Partition
from tests.steps import QUICK

X = torch.randn(50, 8)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Counting(nn.Module):
    """Writes to buffers, draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 4)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(nn.functional.dropout(self.norm(self.a(x)), 0.3))
        for _ in range(4):
            h = h.exp().sin()
        result: torch.Tensor = self.b(h)
        return result


class Hog:
    """Compiles eagerly; while the forward runs, so many bytes more are held."""

    def __init__(self, *extra_bytes: int) -> None:
        self.left = list(extra_bytes)
        self.built = 0

    def __call__(
        self, graph: fx.GraphModule, inputs: Sequence[Any], partition: Partition, identity: str
    ) -> Callable[..., Any]:
        extra_bytes = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        self.built += 1

        def compiler(module: fx.GraphModule, _inputs: object) -> Any:
            return boxed(module)

        make = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
        compiled = make(graph, inputs)

        def call(*args: Any) -> Any:
            held = torch.empty(extra_bytes, dtype=torch.uint8)
            result = compiled(*args)
            del held
            return result

        return call


def optimised(monkeypatch: pytest.MonkeyPatch, hog: Hog, budget_bytes: int) -> nn.Module:
    monkeypatch.setattr(trial, "compile_with_inductor", hog)
    return fxremat.optimize(Counting(), budget_bytes, executor="inductor", **QUICK)


def planned_bytes() -> tuple[int, int]:
    """The baseline and the floor of the model. [bytes]"""
    problem = fxremat.capture(Counting(), (X,), executor="inductor", **QUICK)
    plans = fxremat.frontier(problem, 2)
    return plans[0].peak_bytes, plans[-1].peak_bytes


def test_code_that_holds_what_is_planned_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hog, plain = Hog(0), Counting()
    model = optimised(monkeypatch, hog, planned_bytes()[0])
    for each in (plain, model):
        torch.manual_seed(1)
        each(X).sum().backward()
    assert hog.built == 1
    for (name, a), (_, b) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert same_bits(a, b), name  # the trial has not counted a batch
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert same_bits(p.grad, q.grad)
    torch.manual_seed(1)
    plain(X)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    model(X)
    assert torch.equal(state, torch.get_rng_state())
    assert any("trial of Inductor's code held" in note for note in fxremat.report(model).notes)


def test_code_that_holds_more_is_compiled_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    budget_bytes, floor_bytes = planned_bytes()
    extra_bytes = (budget_bytes - floor_bytes) // 2
    assert extra_bytes > 5000
    hog = Hog(0)
    monkeypatch.setattr(trial, "compile_with_inductor", hog)
    over: list[int] = []
    real = trial.trial_peak_bytes

    def measured(*args: Any) -> int:
        """The first code is above the budget by a known number of bytes."""
        found = real(*args)
        over.append(found)
        plan: fxremat.Plan = args[2].record.plan
        more_bytes = extra_bytes if len(over) == 1 else 0
        return plan.peak_bytes - plan.problem.resident_bytes + more_bytes

    monkeypatch.setattr(trial, "trial_peak_bytes", measured)
    model = optimised(monkeypatch, hog, budget_bytes)
    model(X).sum().backward()
    report = fxremat.report(model)
    assert hog.built == len(over) == 2
    assert report.predicted_peak_bytes <= budget_bytes - extra_bytes
    assert report.budget_bytes == budget_bytes
    assert len(report.graphs) == 1


def test_code_that_can_hold_no_less_raises_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    budget_bytes, _ = planned_bytes()
    model = optimised(monkeypatch, Hog(4 * budget_bytes), budget_bytes)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(fxremat.InfeasibleBudgetError, match="executor='eager'") as caught:
        model(X)
    assert caught.value.budget_bytes == budget_bytes
    assert caught.value.floor_bytes > 4 * budget_bytes
    assert all(same_bits(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    model(X).sum().backward()  # as it was before


def test_inputs_of_a_trial_are_the_parameters_memory_and_copies_of_the_rest() -> None:
    base = torch.arange(24.0)
    parameter = nn.Parameter(torch.randn(3))
    changed = nn.Parameter(torch.randn(3))
    called: list[int] = []
    parameter.register_hook(lambda _: called.append(1))
    rows, turned, wide = base.view(4, 6)[1:], base.view(4, 6).t(), base[:1].expand(5)
    given = [parameter, changed, rows, turned, wide, 7]
    found = trial._stand_ins(given, frozenset({1}))
    assert found[0].data_ptr() == parameter.data_ptr()
    assert found[1].data_ptr() != changed.data_ptr()
    assert found[-1] == 7
    for one, other in zip(given[:-1], found[:-1], strict=True):
        assert isinstance(one, torch.Tensor)
        assert same_bits(one.detach(), other.detach())
        assert one.stride() == other.stride()
        assert one.requires_grad == other.requires_grad
    found[2].zero_()
    assert torch.equal(base, torch.arange(24.0))
    assert found[3][:, 1:].count_nonzero() == 0  # the views still share what they shared
    (found[0] * 2).sum().backward()
    assert not called
    assert parameter.grad is None


@pytest.mark.parametrize("written", [None, frozenset({0})])
def test_parameters_that_the_step_may_write_are_copied(written: frozenset[int] | None) -> None:
    parameter = nn.Parameter(torch.randn(3))
    (found,) = trial._stand_ins([parameter], written)
    assert found.data_ptr() != parameter.data_ptr()
