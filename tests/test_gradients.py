"""Gradients that exist when a step begins, kept graphs, and double backward."""

from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.errors import OverBudgetError
from tests.steps import QUICK, same_gradients


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))


X = torch.randn(50, 8)


def floor_of(fn: Any, *args: Any, **options: Any) -> int:
    problem = fxremat.capture(fn, args, **{**QUICK, **options})
    return fxremat.frontier(problem, 2)[-1].peak_bytes


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def test_gradients_that_were_said_to_be_freed_but_exist_are_noticed() -> None:
    floor_bytes = floor_of(mlp(), X, gradients="freed")
    model = fxremat.optimize(mlp(), floor_bytes, gradients="freed", **QUICK)
    model(X).sum().backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(OverBudgetError, match="gradients='freed' left out") as caught:
        model(X)
    assert caught.value.measured_bytes > caught.value.budget_bytes
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(after) == len(before) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    model.zero_grad()
    model(X).sum().backward()


def test_accumulated_gradients_are_planned_for() -> None:
    parameter_bytes = sum(p.nbytes for p in mlp().parameters())
    budget_bytes = floor_of(mlp(), X) + parameter_bytes
    model = fxremat.optimize(mlp(), budget_bytes, **QUICK)
    model(X).sum().backward()
    first = fxremat.report(model)
    peak = fxremat.measure_peak(lambda: model(X).sum().backward())
    second = fxremat.report(model)
    assert second.resident_bytes == first.resident_bytes + parameter_bytes
    loss_bytes = 2 * X.element_size()  # the caller's sum and its gradient are not in the graph
    held_bytes = first.resident_bytes + parameter_bytes
    assert held_bytes + peak.peak_bytes <= budget_bytes + loss_bytes


def test_a_report_counts_the_gradients_that_the_call_found() -> None:
    model = fxremat.optimize(mlp(), "1GiB", **QUICK)
    model(X).sum().backward()
    first = fxremat.report(model)
    model(X).sum().backward()
    second = fxremat.report(model)
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    for name in ("resident_bytes", "predicted_peak_bytes", "baseline_peak_bytes", "floor_bytes"):
        assert getattr(second, name) == getattr(first, name) + parameter_bytes
    model.zero_grad()
    fxremat.optimize(model, second.floor_bytes, **QUICK)
    for _ in range(2):
        model(X).sum().backward()
        assert fxremat.report(model).predicted_peak_bytes <= second.floor_bytes


def test_gradients_that_do_not_fit_raise_before_the_step() -> None:
    model = mlp()
    floor_bytes = floor_of(model, X)
    fxremat.optimize(model, floor_bytes, **QUICK)
    model(X).sum().backward()
    with pytest.raises(fxremat.InfeasibleBudgetError) as caught:
        model(X)
    assert caught.value.floor_bytes == floor_bytes + sum(p.nbytes for p in model.parameters())
    model.zero_grad()
    model(X).sum().backward()


def test_gradients_of_a_functions_parameters_count_as_well() -> None:
    model = mlp()

    def loss(x: torch.Tensor) -> Any:
        return model(x).square().sum()

    floor_bytes = floor_of(loss, X)
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    held = fxremat.capture(loss, (X,), gradients="held", **QUICK)
    assert fxremat.frontier(held, 2)[-1].peak_bytes == floor_bytes + parameter_bytes
    step = fxremat.optimize(loss, floor_bytes, **QUICK)
    step(X).backward()
    with pytest.raises(fxremat.InfeasibleBudgetError):
        step(X)
    model.zero_grad()
    step(X).backward()


def test_backward_twice_through_one_graph() -> None:
    model, plain = fxremat.optimize(mlp(), "1MiB", **QUICK), mlp()
    for net in (model, plain):
        torch.manual_seed(4)
        output = net(X)
        output[:, 0].sum().backward(retain_graph=True)
        output[:, 1].sum().backward(retain_graph=True)
        output[:, 0].sum().backward()
    assert same_gradients(plain, model)


def test_double_backward_is_refused() -> None:
    model = fxremat.optimize(mlp(), "1MiB", **QUICK)
    x = X.clone().requires_grad_()
    output = model(x).sum()

    def penalty() -> None:
        (gradient,) = torch.autograd.grad(output, x, create_graph=True)
        gradient.sum().backward()

    with pytest.raises((fxremat.FxrematError, RuntimeError), match=r"double backward|create_graph"):
        penalty()


def test_parameters_that_are_unfrozen_later_get_gradients() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    fxremat.optimize(model, "1MiB", **QUICK)
    for _ in range(2):
        model(torch.randn(5, 8)).sum().backward()
    model.requires_grad_(True)
    model.zero_grad()
    model(torch.randn(5, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_frozen_parameter_of_a_function_that_is_unfrozen_later_gets_its_gradient() -> None:
    model, plain = mlp().eval(), mlp().eval()
    for net in (model, plain):
        net[0].requires_grad_(False)
    step: Any = fxremat.optimize(lambda x: model(x).sin(), "1MiB", **QUICK)
    for unfrozen in (False, True, False):
        for net, call in ((model, step), (plain, lambda x: plain(x).sin())):
            net.zero_grad()
            net[0].requires_grad_(unfrozen)
            call(X).sum().backward()
        assert (model[0].weight.grad is not None) == unfrozen
        assert same_gradients(plain, model)


def test_the_same_parameters_compile_a_function_once() -> None:
    model = mlp()
    step: Any = fxremat.optimize(lambda x: model(x).sin(), "1MiB", **QUICK)
    for _ in range(3):
        step(X).sum().backward()
    assert len(fxremat.report(step).graphs) == 1


def test_the_gradients_that_exist_are_planned_for_and_no_others() -> None:
    floor_bytes = floor_of(mlp(), X)
    (bias,) = [p for n, p in mlp().named_parameters() if n == "0.bias"]
    model = fxremat.optimize(mlp(), floor_bytes + bias.nbytes, **QUICK)
    dict(model.named_parameters())["0.bias"].grad = torch.zeros_like(bias)
    model(X).sum().backward()
    first = fxremat.report(model)
    assert first.predicted_peak_bytes == first.floor_bytes == first.budget_bytes
    with pytest.raises(fxremat.InfeasibleBudgetError) as caught:
        model(X)
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    assert caught.value.floor_bytes == floor_bytes + parameter_bytes
    assert fxremat.report(model).floor_bytes == floor_bytes + bias.nbytes
    model.zero_grad()
    model(X).sum().backward()
    assert fxremat.report(model).floor_bytes == floor_bytes


def test_the_gradient_that_a_new_argument_has_counts() -> None:
    floor_bytes = floor_of(mlp(), X.clone().requires_grad_())
    model = fxremat.optimize(mlp(), floor_bytes, **QUICK)
    model(X.clone().requires_grad_()).sum().backward()
    model.zero_grad()
    x = X.clone().requires_grad_()
    x.grad = torch.zeros_like(x)
    with pytest.raises(fxremat.InfeasibleBudgetError) as caught:
        model(x)
    assert caught.value.floor_bytes == floor_bytes + x.nbytes


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_a_graph_can_be_kept_after_one_that_was_not(executor: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp() * x.cos()

    planned = fxremat.optimize(step, "1MiB", executor=executor, **QUICK)
    x = X.clone().requires_grad_()
    planned(x).sum().backward()
    first, x.grad = x.grad, None
    loss = planned(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert first is not None
    assert x.grad is not None
    assert torch.equal(x.grad, first + first)
