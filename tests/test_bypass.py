"""Where something keeps a plan from running: the plan runs all the same, or an error says why."""

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.check import same_bits
from fxremat.passes.bypass import frames_traced
from fxremat.passes.tracing import tracing
from tests.steps import QUICK, same_gradients

X = torch.randn(50, 8)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = mlp(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.inner(x))


class Pieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.last(h).t(), h[0]


def planned() -> nn.Sequential:
    return fxremat.optimize(mlp(), "1MiB", **QUICK)


def step(call: Callable[..., Any], x: torch.Tensor = X) -> None:
    call(x).square().sum().backward()


def compiled_loss(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def loss(x: torch.Tensor) -> Any:
        return call(x).square().mean()

    compiled: Callable[..., Any] = torch.compile(loss, **options)
    return compiled


# Dynamo is told not to trace.


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "fail_on_recompile"])
def test_a_stance_under_which_nothing_is_traced_raises_in_words(stance: str) -> None:
    model = planned()
    with torch.compiler.set_stance(stance), pytest.raises(fxremat.CaptureError, match=stance):
        model(X)
    step(model)  # plain by now: its first call raised
    with pytest.raises(fxremat.FxrematError, match=stance):
        fxremat.report(model)


def test_a_forced_stance_raises_before_anything_runs_and_leaves_an_older_plan() -> None:
    model = fxremat.optimize(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5)), "1MiB", **QUICK)
    step(model)
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with torch.compiler.set_stance("force_eager"):
        with pytest.raises(fxremat.CaptureError, match="force_eager"):
            model(X)
        assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
        assert torch.equal(generator, torch.get_rng_state())
        with torch.no_grad():
            model(X)  # no training: there is nothing to plan
    step(model)
    assert fxremat.report(model).differentiated


def test_a_new_shape_that_stays_eager_raises_and_an_old_one_runs_its_plan() -> None:
    model = planned()
    step(model)
    with torch.compiler.set_stance("eager_on_recompile"):
        step(model)
        assert fxremat.report(model).saved_bytes > 0
        with pytest.raises(fxremat.CaptureError, match="eager_on_recompile"):
            model(torch.randn(7, 8))


def test_a_disabled_dynamo_raises_in_words() -> None:
    model = planned()
    with (
        torch._dynamo.config.patch(disable=True),
        pytest.raises(fxremat.CaptureError, match="TORCHDYNAMO_DISABLE"),
    ):
        model(X)


def test_a_function_that_dynamo_must_skip_calls_the_plan() -> None:
    model = planned()
    torch.compiler.disable(step)(model)
    assert fxremat.report(model).saved_bytes > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracing_by_others_is_refused_in_words() -> None:
    model = planned()
    with pytest.raises(fxremat.CaptureError, match=r"torch\.jit\.trace"):
        torch.jit.trace(model, (X,), check_trace=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pieces_are_traced_after_torch_refused_a_whole_graph() -> None:
    whole = torch.compile(nn.Linear(8, 4), backend="eager", fullgraph=True)
    plain, model = Pieces(), Pieces()
    plain.load_state_dict(model.state_dict())
    with frames_traced():  # puts torch's switch back in the end
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace"):
            torch.jit.trace(whole, (X,), check_trace=False)
        fxremat.optimize(model, "1MiB", fullgraph=False, **QUICK)
        for net in (model, plain):
            net(X)[0].sum().backward()
    assert same_gradients(model, plain)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_transforms_of_torch_func_are_refused(transform: Callable[..., Any]) -> None:
    model = planned()
    with pytest.raises(fxremat.CaptureError, match="functorch"):
        transform(lambda x: model(x).sum())(X)


def test_an_export_goes_through_and_the_report_stays() -> None:
    model = planned()
    step(model)
    saved_bytes = fxremat.report(model).saved_bytes
    program = torch.export.export(model, (X,)).module()
    assert torch.equal(program(X), mlp()(X))
    assert fxremat.report(model).saved_bytes == saved_bytes


def test_noop_nothing_is_computed() -> None:
    model = fxremat.optimize(nn.Identity(), "1MiB", **QUICK)
    x = X.clone().requires_grad_() * 2
    assert model(x) is x


# Somebody else compiles what is around.


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("before", [True, False])
def test_a_plan_runs_inside_what_others_compile(backend: str, before: bool) -> None:
    plain, model = Outer(), Outer()
    model.load_state_dict(plain.state_dict())
    if before:  # code for a plain module of the same class must not serve
        step(compiled_loss(model, backend=backend))
        model.zero_grad()
    fxremat.optimize(model.inner, "1MiB", **QUICK)
    step(compiled_loss(model, backend=backend))
    step(compiled_loss(plain, backend=backend))
    assert same_gradients(plain, model)
    assert fxremat.report(model.inner).saved_bytes > 0


def test_a_planned_function_runs_inside_what_others_compile() -> None:
    model = mlp()
    fn: Any = fxremat.optimize(lambda x: model(x).exp(), "1MiB", **QUICK)
    step(compiled_loss(fn, backend="eager"))
    assert fxremat.report(fn).saved_bytes > 0


def test_one_whole_graph_around_a_plan_is_refused_by_torch_in_our_words() -> None:
    model = planned()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="fxremat"):
        compiled_loss(model, backend="eager", fullgraph=True)(X)
    fxremat.restore(model)
    compiled_loss(model, backend="eager", fullgraph=True)(X)


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_a_plan_inside_a_plan_is_refused(first: str) -> None:
    model = Outer()
    fxremat.optimize(model if first == "outer" else model.inner, "1MiB", **QUICK)
    step(model)
    fxremat.optimize(model if first == "inner" else model.inner, "1MiB", **QUICK)
    with pytest.raises(fxremat.OptionError, match="Outer contains Sequential"):
        model(X)
    fxremat.restore(model.inner)
    fxremat.optimize(model, "1MiB", **QUICK)
    step(model)
    assert fxremat.report(model).saved_bytes > 0


def test_a_function_that_calls_a_planned_module_is_refused() -> None:
    model = planned()
    fn: Any = fxremat.optimize(lambda x: model(x).exp(), "1MiB", **QUICK)
    with pytest.raises(fxremat.OptionError, match="contains Sequential"):
        fn(X)


def test_a_module_that_is_compiled_is_refused_and_one_compiled_later_is_told() -> None:
    model = mlp()
    model.compile(backend="eager")
    with pytest.raises(fxremat.OptionError, match=r"module\.compile\(\)"):
        fxremat.optimize(model, "1MiB", **QUICK)
    model = planned()
    step(model)
    model.compile(backend="eager")
    with pytest.raises(fxremat.FxrematError, match=r"compiled with module\.compile\(\)"):
        fxremat.report(model)


def test_what_torch_compile_returned_can_be_optimised() -> None:
    model, plain = mlp(), mlp()
    compiled: Any = torch.compile(model, backend="eager")
    fxremat.optimize(compiled, "1MiB", **QUICK)
    step(compiled)
    step(plain)
    assert same_gradients(plain, model)
    assert fxremat.report(compiled).saved_bytes > 0


# Graph breaks that leave operators outside of every graph.


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        torch._dynamo.graph_break()
        return x.exp()


def test_operators_outside_of_the_pieces_are_refused_unless_something_is_reserved() -> None:
    plain, model = nn.Sequential(*mlp(), Breaks()), nn.Sequential(*mlp(), Breaks())
    options = {**QUICK, "fullgraph": False}
    fxremat.optimize(model, "1MiB", **options)
    with pytest.raises(fxremat.CaptureError, match=r"AddmmBackward0.*reserve="):
        model(X)
    fxremat.optimize(model, "1MiB", reserve="64KiB", **options)
    step(model)
    step(plain)
    assert same_gradients(plain, model)
    assert fxremat.report(model).resident_bytes > 64 << 10


def test_noop_pieces_that_leave_nothing_outside() -> None:
    model = fxremat.optimize(Pieces(), "1MiB", fullgraph=False, **QUICK)
    model(X.clone().requires_grad_() * 2)[0].sum().backward()
    assert len(fxremat.report(model).graphs) == 2


# Other ways to call.


def test_parameters_given_for_one_call_get_the_gradients() -> None:
    model, plain = planned(), mlp()
    given = {n: p.detach().mul(2).requires_grad_() for n, p in model.named_parameters()}
    twins = {n: p.detach().clone().requires_grad_() for n, p in given.items()}
    step(lambda x: torch.func.functional_call(model, given, (x,)))
    step(lambda x: torch.func.functional_call(plain, twins, (x,)))
    assert all(same_bits(given[n].grad, twins[n].grad) for n in given)
    assert all(p.grad is None for p in model.parameters())
    assert fxremat.report(model).saved_bytes > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_run_and_the_next_step_is_planned(mode: Any) -> None:
    model = planned()
    with mode():
        assert torch.equal(model(X), mlp()(X))
    assert not fxremat.report(model).differentiated
    step(model)
    assert fxremat.report(model).differentiated


def test_data_parallel_without_devices_passes_through() -> None:
    model, plain = planned(), mlp()
    step(nn.DataParallel(model))
    step(plain)
    assert same_gradients(plain, model)
    assert fxremat.report(model).saved_bytes > 0


def test_one_module_can_be_called_from_several_threads() -> None:
    model, plain = planned(), mlp()
    step(model)
    found: list[Any] = []

    def work() -> None:
        for _ in range(5):
            loss = model(X).square().sum()
            found.append(torch.autograd.grad(loss, list(model.parameters())))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    expected = torch.autograd.grad(plain(X).square().sum(), list(plain.parameters()))
    assert len(found) == 15
    assert all(same_bits(a, b) for got in found for a, b in zip(got, expected, strict=True))


def test_settings_are_put_back_whichever_thread_leaves_last() -> None:
    before = torch._dynamo.config.recompile_limit, list(warnings.filters)
    came, left = threading.Event(), threading.Event()

    def second() -> None:
        with tracing():
            came.set()
            left.wait(timeout=60)

    thread = threading.Thread(target=second)
    with tracing():
        thread.start()
        assert came.wait(timeout=60)
    left.set()
    thread.join(timeout=60)
    assert (torch._dynamo.config.recompile_limit, list(warnings.filters)) == before
