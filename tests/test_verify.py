"""``verify``: it must see what is wrong, and leave everything as it found it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
import fxremat.passes.rewrite as rewrite_module
from fxremat.check import same_bits
from fxremat.errors import GradientsDifferError, OverBudgetError
from fxremat.schedule import expand
from tests.steps import QUICK, same_gradients


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(torch.tanh(self.drop(torch.tanh(self.norm(self.a(x))))))


X = torch.randn(200, 8)


def floor_bytes(model: Any, **options: Any) -> int:
    problem = fxremat.capture(model, (X,), **{**QUICK, **options})
    return fxremat.frontier(problem, 2)[-1].peak_bytes


def test_a_good_plan_passes_and_its_peak_is_predicted_to_the_byte() -> None:
    model = Net()
    check = fxremat.verify(model, (X,), budget=floor_bytes(model), steps=3, repeats=2, **QUICK)
    assert check.ok
    assert check.outputs_equal
    assert check.gradients_equal
    assert check.buffers_equal
    assert check.inputs_equal
    assert check.rng_equal
    assert check.max_abs_diff == {}
    assert check.measured_peak_bytes == check.predicted_peak_bytes <= check.budget_bytes
    assert check.extra_calls > 0
    assert check.baseline_step_s > 0
    assert check.step_s > 0
    assert check.step_spread >= 0
    assert "bitwise equal" in str(check)


def test_everything_is_put_back() -> None:
    model = Net()
    model(X).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in gradients]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    x = X.clone()
    fxremat.verify(model, (x,), budget="1MiB", steps=2, repeats=1, **QUICK)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(same_bits(p.grad, v) for p, v in zip(model.parameters(), values, strict=True))
    assert torch.equal(generator, torch.get_rng_state())
    assert torch.equal(x, X)
    assert "_compiled_call_impl" not in model.__dict__


def test_a_function_with_existing_gradients_is_compared_from_the_same_start() -> None:
    model = Net()
    model(X).sum().backward()
    gradient = model.a.weight.grad

    def loss(x: torch.Tensor) -> Any:
        return model(x).square().mean()

    check = fxremat.verify(loss, (X,), budget=floor_bytes(loss), repeats=1, **QUICK)
    check.raise_if_broken()
    assert model.a.weight.grad is gradient


def test_a_loss_of_the_callers_is_used() -> None:
    seen: list[torch.Size] = []

    def loss(output: torch.Tensor) -> Any:
        seen.append(output.shape)
        return output.square().mean()

    check = fxremat.verify(Net(), (X,), budget="1MiB", loss=loss, repeats=1, **QUICK)
    check.raise_if_broken()
    assert set(seen) == {torch.Size([200, 4])}


@pytest.fixture
def _wrong_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay of tanh computes a sine instead."""
    replay = rewrite_module._Writer._replay

    def wrong(self: Any, step: Any) -> None:
        replay(self, step)
        for node in self.graph.nodes:
            if node.target is torch.ops.aten.tanh.default and "_replay" in node.name:
                node.target = torch.ops.aten.sin.default

    monkeypatch.setattr(rewrite_module._Writer, "_replay", wrong)


@pytest.mark.usefixtures("_wrong_replays")
def test_wrong_gradients_are_found_and_named() -> None:
    model = Net()
    check = fxremat.verify(model, (X,), budget="1MiB", solver="recompute_all", repeats=1, **QUICK)
    assert not check.ok
    assert not check.gradients_equal
    assert check.outputs_equal
    assert check.rng_equal
    assert "gradient of parameter a.weight" in check.max_abs_diff
    with pytest.raises(GradientsDifferError, match="gradients differ") as caught:
        check.raise_if_broken()
    assert any("a.weight" in line for line in caught.value.details)


@pytest.mark.usefixtures("_wrong_replays")
def test_the_option_raises_in_the_first_call_and_leaves_the_model_plain() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fxremat.optimize(model, "1MiB", solver="recompute_all", verify=True, **QUICK)
    with pytest.raises(fxremat.VerificationError):
        model(X)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model(X).sum().backward()
    with pytest.raises(fxremat.FxrematError, match="GradientsDifferError"):
        fxremat.report(model)


def test_the_option_lets_a_good_plan_run_from_an_untouched_state() -> None:
    model, plain = Net(), Net()
    fxremat.optimize(model, floor_bytes(model), verify=True, **QUICK)
    for net in (model, plain):
        torch.manual_seed(2)
        net(X).sum().backward()
    assert same_gradients(plain, model)
    assert same_bits(model.norm.running_mean, plain.norm.running_mean)


def test_a_peak_above_the_budget_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewrite that saves everything, whatever the plan says."""
    rewrite = rewrite_module.rewrite

    def save_all(analysis: Any, problem: fxremat.RematProblem, _: object, **options: Any) -> Any:
        assert options == {"decomposed": False}
        return rewrite(analysis, problem, expand(problem, problem.candidates))

    monkeypatch.setattr("fxremat.pipeline.rewrite", save_all)
    model = Net()
    check = fxremat.verify(model, (X,), budget=floor_bytes(model), repeats=1, **QUICK)
    assert check.gradients_equal
    assert not check.ok
    with pytest.raises(OverBudgetError) as caught:
        check.raise_if_broken()
    assert caught.value.measured_bytes > caught.value.budget_bytes


def test_a_step_without_a_backward_is_refused() -> None:
    with pytest.raises(fxremat.FxrematError, match=r"backward|differentiate"):
        fxremat.verify(Net().requires_grad_(False), (X,), budget="1MiB", **QUICK)


def test_an_infeasible_budget_raises_before_anything_runs() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    least_bytes = floor_bytes(model)
    with pytest.raises(fxremat.InfeasibleBudgetError) as caught:
        fxremat.verify(model, (X,), budget=least_bytes - 1, **QUICK)
    assert caught.value.floor_bytes == least_bytes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rrelu": lambda y: nn.functional.rrelu(y, training=True),
    "dropout": lambda y: nn.functional.dropout(y, 0.3),
    "multinomial": lambda y: y.gather(1, torch.multinomial(y.detach().abs() + 0.1, 3)),
    "poisson": lambda y: y + torch.poisson(y.detach().abs()),
    "native": lambda y: y * torch.native_dropout(y.detach(), 0.3, True)[1],
}


PAIRS = [("rrelu", "dropout"), ("rrelu", "native"), ("multinomial", "rrelu"), ("poisson", "rrelu")]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_unrewritten_step_draws_no_more_than_eager(pair: tuple[str, str]) -> None:
    """Draws in its forward that fx counts as impure must not stay in its backward."""
    layer, x = nn.Linear(8, 8), torch.randn(16, 8, requires_grad=True)

    def step(x: torch.Tensor) -> Any:
        y = layer(x).tanh()
        for name in pair:
            y = DRAWS[name](y)
        return y.sin().sum()

    check = fxremat.verify(step, (x,), budget="1MiB", repeats=1, **QUICK)
    check.raise_if_broken()
