"""The contract of ``optimize``: what comes back, what stays as it was, and what errors leave."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.check import same_bits
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


def test_the_same_module_comes_back_with_the_same_class_and_keys() -> None:
    model = mlp()
    keys, hooks = list(model.state_dict()), dict(model.__dict__)
    assert fxremat.optimize(model, "1GiB", **QUICK) is model
    model(X).sum().backward()
    assert type(model) is nn.Sequential
    assert list(model.state_dict()) == keys
    assert set(model.__dict__) - set(hooks) == {"_compiled_call_impl"}


@pytest.mark.parametrize("make", [mlp, lambda: nn.Linear(8, 4), lambda: nn.LayerNorm(8)])
def test_torchs_own_classes_are_planned_too(make: Any) -> None:
    model = fxremat.optimize(make(), "1MiB", **QUICK)
    model(X).sum().backward()
    assert fxremat.report(model).predicted_peak_bytes > fxremat.report(model).resident_bytes


def test_copies_and_loaded_modules_are_plain() -> None:
    model = fxremat.optimize(mlp(), "1MiB", **QUICK)
    model(X).sum().backward()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        other(X).sum().backward()
        with pytest.raises(fxremat.FxrematError, match="bears no plan"):
            fxremat.report(other)


def test_training_and_evaluation_work_as_before() -> None:
    model, plain = mlp(), mlp()
    fxremat.optimize(model, "1MiB", **QUICK)
    model.eval()
    plain.eval()
    assert torch.equal(model(X), plain(X))
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))
        assert not model(X).requires_grad
    report = fxremat.report(model)
    assert report.saved_bytes == report.recompute_ns == 0
    assert "Nothing to differentiate" in str(report)
    model.train()
    model(X).sum().backward()
    assert fxremat.report(model).saved_bytes > 0


def test_restore_gives_the_module_and_the_function_back() -> None:
    model = mlp()
    before = set(model.__dict__)
    fxremat.optimize(model, "1MiB", **QUICK)
    assert fxremat.restore(model) is model
    assert set(model.__dict__) == before
    assert fxremat.restore(model) is model

    def loss(x: torch.Tensor) -> Any:
        return model(x).sum()

    assert fxremat.restore(fxremat.optimize(loss, "1MiB", **QUICK)) is loss
    assert fxremat.restore(loss) is loss


def test_optimising_again_replaces_the_plan() -> None:
    model = fxremat.optimize(mlp(), "1MiB", **QUICK)
    model(X).sum().backward()
    fxremat.optimize(model, "2MiB", **QUICK)
    with pytest.raises(fxremat.FxrematError, match="has not run"):
        fxremat.report(model)
    model(X).sum().backward()
    assert fxremat.report(model).budget_bytes == 2 << 20

    def loss(x: torch.Tensor) -> Any:
        return x.exp().sum()

    again = fxremat.optimize(fxremat.optimize(loss, "1MiB", **QUICK), "3MiB", **QUICK)
    again(X.clone().requires_grad_()).backward()
    assert fxremat.report(again).budget_bytes == 3 << 20
    assert fxremat.restore(again) is loss


def test_more_modules_than_dynamo_recompiles() -> None:
    models = [fxremat.optimize(nn.Linear(8, 4), "1MiB", **QUICK) for _ in range(10)]
    for model in models:
        model(X).sum().backward()
    assert all(fxremat.report(model).graphs for model in models)


def test_more_shapes_than_dynamo_recompiles() -> None:
    model, plain = fxremat.optimize(nn.Linear(8, 4), "1MiB", **QUICK), nn.Linear(8, 4)
    plain.load_state_dict(model.state_dict())
    for length in range(1, 13):
        x = torch.randn(length, 8)
        assert torch.equal(model(x), plain(x))
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
    assert same_gradients(model, plain)
    assert len(fxremat.report(model).graphs) == 12


def test_functions_and_bound_methods() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def loss(self, x: torch.Tensor) -> Any:
            """The loss."""
            return self.layer(x).tanh().sum()

    net = Net()
    step = fxremat.optimize(net.loss, "1MiB", **QUICK)
    assert step.__doc__ == "The loss."
    net.loss(X).backward()
    expected = gradients(net)
    net.zero_grad()
    step(X).backward()
    assert all(same_bits(a, b) for a, b in zip(expected, gradients(net), strict=True))
    resident_bytes = sum(t.nbytes for t in (*net.parameters(), X))
    assert fxremat.report(step).resident_bytes == resident_bytes


def test_a_module_inside_another_can_be_optimised_by_itself() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = mlp(), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.inner(x))

    outer = Outer()
    fxremat.optimize(outer.inner, "1MiB", **QUICK)
    outer(X).sum().backward()
    assert fxremat.report(outer.inner).saved_bytes > 0
    with pytest.raises(fxremat.FxrematError, match="bears no plan"):
        fxremat.report(outer)


def test_hooks_of_the_module_run_once() -> None:
    model, calls = nn.Linear(8, 4), []
    model.register_forward_hook(lambda module, args, output: calls.append("forward"))
    fxremat.optimize(model, "1MiB", **QUICK)
    model(X).sum().backward()
    model.zero_grad()
    calls.clear()
    model(X).sum().backward()
    assert calls == ["forward"]


def test_optional_keywords_and_outputs_that_are_no_tensors() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(
            self, x: torch.Tensor, *, mask: torch.Tensor | None = None, scale: float = 1.0
        ) -> tuple[Any, ...]:
            y = self.layer(x) * scale
            return (
                (y if mask is None else y.masked_fill(mask, 0.0)),
                None,
                x.shape[0],
                "done",
                mask is None,
            )

    plain = Net()
    model = fxremat.optimize(copy.deepcopy(plain), "1MiB", **QUICK)
    mask = torch.rand(50, 8) > 0.5
    for kwargs in ({}, {"mask": mask}, {"scale": 0.25}, {"mask": mask, "scale": 3.0}, {}):
        expected, got = plain(X, **kwargs), model(X, **kwargs)
        assert torch.equal(expected[0], got[0])
        assert expected[1:] == got[1:]
        for output in (expected, got):
            output[0].sum().backward()
        assert same_gradients(plain, model)


# Errors of the first call.


def test_a_budget_of_the_floor_works_and_one_byte_less_raises() -> None:
    floor_bytes = floor_of(mlp(), X)
    model = fxremat.optimize(mlp(), floor_bytes, **QUICK)
    model(X).sum().backward()
    report = fxremat.report(model)
    assert report.floor_bytes == report.predicted_peak_bytes == floor_bytes
    fxremat.optimize(model, floor_bytes - 1, **QUICK)
    model.zero_grad()
    with pytest.raises(fxremat.InfeasibleBudgetError, match=f"{floor_bytes:,}") as caught:
        model(X)
    assert caught.value.floor_bytes == floor_bytes
    assert caught.value.budget_bytes == floor_bytes - 1


def test_an_error_in_the_first_call_changes_nothing_and_leaves_the_model_plain() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.BatchNorm1d(8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return nn.functional.dropout(self.layer(self.norm(x)), 0.5)

    model = Counted()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    fxremat.optimize(model, 1000, **QUICK)
    with pytest.raises(fxremat.InfeasibleBudgetError):
        model(X)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    with pytest.raises(fxremat.FxrematError, match="InfeasibleBudgetError"):
        fxremat.report(model)
    assert "_compiled_call_impl" not in model.__dict__
    model(X).sum().backward()


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x).relu()
        if h.sum().item() > 0:  # the line that the error names
            h = h * 2
        return self.b(h)


def test_a_graph_break_names_the_line_and_the_remedy() -> None:
    model = fxremat.optimize(Breaks(), "1MiB", **QUICK)
    with pytest.raises(fxremat.CaptureError) as caught:
        model(X)
    assert "if h.sum().item() > 0" in str(caught.value)
    assert "test_install.py" in str(caught.value)
    assert "fullgraph=False" in str(caught.value)
    assert "Hint" not in str(caught.value)
    assert "Developer debug" not in str(caught.value)
    model(X).sum().backward()
    with pytest.raises(fxremat.FxrematError, match="CaptureError"):
        fxremat.report(model)


def test_pieces_between_graph_breaks_are_planned_when_asked_for() -> None:
    plain = Breaks()
    model = fxremat.optimize(copy.deepcopy(plain), "1MiB", fullgraph=False, **QUICK)
    assert torch.equal(model(X), plain(X))
    model(X).sum().backward()
    plain(X).sum().backward()
    assert same_gradients(plain, model)
    assert len(fxremat.report(model).graphs) > 1


def test_pieces_between_graph_breaks_share_one_budget() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.ModuleList(nn.Linear(16, 16) for _ in range(3)) for _ in "ab")

        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.a:
                x = torch.tanh(layer(x))
            torch._dynamo.graph_break()
            for layer in self.b:
                x = torch.tanh(layer(x))
            return x

    model, x = Deep(), torch.randn(200, 16)
    resident_bytes = sum(t.nbytes for t in (*model.parameters(), x))
    fxremat.optimize(model, "1GiB", fullgraph=False, **QUICK)
    model(x).sum().backward()
    pieces = fxremat.report(model).graphs
    assert len(pieces) == 2
    model.zero_grad()
    peak = fxremat.measure_peak(lambda: model(x).sum().backward())
    assert resident_bytes + peak.peak_bytes <= fxremat.report(model).predicted_peak_bytes
    model.zero_grad()
    alone_bytes = max(piece.floor_bytes for piece in pieces) - pieces[0].saved_bytes
    fxremat.optimize(model, alone_bytes, fullgraph=False, **QUICK)
    with pytest.raises(fxremat.InfeasibleBudgetError):
        model(x)


def test_errors_of_the_users_own_pass_through() -> None:
    model = fxremat.optimize(nn.Linear(8, 4), "1MiB", **QUICK)
    with pytest.raises(fxremat.CaptureError, match=r"\[3, 5\] X \[8, 4\]") as caught:
        model(torch.randn(3, 5))
    text = str(caught.value)
    assert "linear.py" in text  # the line
    assert "without fxremat" in text  # the remedy
    assert "install.py" not in text
    assert "graph break" not in text
    model(X).sum().backward()


def test_later_shapes_that_do_not_fit_raise_before_they_run() -> None:
    model = fxremat.optimize(mlp(), floor_of(mlp(), X), **QUICK)
    model(X).sum().backward()
    model.zero_grad()
    longer = torch.randn(500, 8)
    generator = torch.get_rng_state()
    with pytest.raises(fxremat.InfeasibleBudgetError):
        model(longer)
    assert torch.equal(generator, torch.get_rng_state())
    model(X).sum().backward()
    assert fxremat.report(model).predicted_peak_bytes <= fxremat.report(model).budget_bytes


def test_hooks_added_after_the_first_call_are_seen() -> None:
    model, plain = (
        nn.Sequential(nn.Linear(5, 7), nn.GELU()),
        nn.Sequential(nn.Linear(5, 7), nn.GELU()),
    )
    plain.load_state_dict(model.state_dict())
    fxremat.optimize(model, "1MiB", cache_dir=False)
    x = torch.randn(3, 5)
    model(x)
    for module in (model, plain):
        module[1].register_forward_hook(lambda _module, _inputs, output: output * 2)
    assert torch.equal(model(x), plain(x))
    for module in (model, plain):
        module.register_forward_pre_hook(lambda _module, inputs: (inputs[0] + 1,))
    assert torch.equal(model(x), plain(x))
