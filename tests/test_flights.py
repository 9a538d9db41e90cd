"""Several forwards before their backwards, and backwards that find gradients: all are counted."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
import fxremat.backend
from fxremat.errors import InfeasibleBudgetError, OverBudgetError
from fxremat.passes.seeding import unit
from tests.steps import QUICK

X = torch.randn(4, 16)


class Net(nn.Module):
    """More parameters than activations, so that gradients make the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().sum()  # type: ignore[no-any-return]


def one_backward_for_two(net: Any) -> None:
    (net(X) + net(X)).backward()


def one_backward_for_three(net: Any) -> None:
    (net(X) + net(X) - net(X)).backward()


def a_backward_each(net: Any) -> None:
    first, second = net(X), net(X)
    first.backward()
    second.backward()


def the_earlier_one_last(net: Any) -> None:
    first, second = net(X), net(X)
    second.backward()
    first.backward()


def twice_through_one_graph(net: Any) -> None:
    loss = net(X)
    loss.backward(retain_graph=True)
    loss.backward()


def gradients_made_between(net: Any) -> None:
    loss = net(X)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    loss.backward()


STEPS: dict[Callable[[Any], None], int] = {
    one_backward_for_two: 2,
    one_backward_for_three: 3,
    a_backward_each: 2,
    the_earlier_one_last: 2,
}
LATE = (twice_through_one_graph, gradients_made_between)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    unit(torch.device("cpu"))


def warm(step: Callable[[Any], None], net: Any) -> None:
    step(net)
    net.zero_grad()


def measured_bytes(step: Callable[[Any], None], net: nn.Module) -> int:
    """Peak of a step, parameters and argument included."""
    resident_bytes = sum(p.nbytes for p in net.parameters()) + X.nbytes
    return resident_bytes + fxremat.measure_peak(lambda: step(net)).peak_bytes


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("gradients", ["auto", "held"])
def test_a_plan_for_several_forwards_counts_the_gradients_of_those_that_have_run_back(
    step: Callable[[Any], None], gradients: str
) -> None:
    options = QUICK | {"in_flight": STEPS[step], "gradients": gradients}
    problem = fxremat.capture(Net(), (X,), **options)
    for plan in fxremat.frontier(problem, 2):
        torch._dynamo.reset()
        net = fxremat.optimize(Net(), plan.budget_bytes, **options)
        warm(step, net)
        if gradients == "held":
            step(net)  # the next one finds gradients
        assert measured_bytes(step, net) <= fxremat.report(net).predicted_peak_bytes
        assert fxremat.report(net).predicted_peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_forward_too_many_is_refused_with_a_peak_that_is_enough(
    step: Callable[[Any], None],
) -> None:
    net = fxremat.optimize(Net(), "46kB", **QUICK)
    with pytest.raises(InfeasibleBudgetError, match="room for 1 at once") as refused:
        step(net)
    torch._dynamo.reset()
    budget_bytes = refused.value.floor_bytes
    enough = fxremat.optimize(Net(), budget_bytes, **QUICK)
    if STEPS[step] == 3:  # one more than the refusal spoke of
        with pytest.raises(InfeasibleBudgetError, match="room for 2 at once"):
            step(enough)
        return
    warm(step, enough)
    assert measured_bytes(step, enough) <= budget_bytes


@pytest.mark.parametrize("step", LATE, ids=lambda step: step.__name__)
def test_gradients_that_came_since_the_forward_are_counted_when_the_backward_starts(
    step: Callable[[Any], None],
) -> None:
    net = fxremat.optimize(Net(), "46kB", **QUICK)
    with pytest.raises(OverBudgetError, match="since its forward") as refused:
        step(net)
    torch._dynamo.reset()
    enough = fxremat.optimize(Net(), refused.value.measured_bytes, **QUICK)
    warm(step, enough)
    plain = Net()
    plain.load_state_dict(enough.state_dict())
    step(plain)
    for mine, theirs in zip(enough.parameters(), plain.parameters(), strict=True):
        mine.grad = None
        assert theirs.grad is not None
    assert measured_bytes(step, enough) <= refused.value.measured_bytes
    for mine, theirs in zip(enough.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("step", LATE, ids=lambda step: step.__name__)
def test_they_are_counted_under_torch_compile_as_well(step: Callable[[Any], None]) -> None:
    net = Net()
    compiled = torch.compile(
        net, backend=fxremat.backend.fxremat, options={"budget": "46kB", **QUICK}
    )

    def whole(call: Any) -> None:
        """The same step on the compiled module, whose parameters are those of the module."""
        step(type("Call", (), {"__call__": lambda _, x: call(x), "parameters": net.parameters})())

    with pytest.raises(OverBudgetError, match="since its forward"):
        whole(compiled)


def test_a_kept_graph_of_pieces_is_held_to_the_budget() -> None:
    class Halves(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.layers[:2](x)
            torch._dynamo.graph_break()
            return self.layers[2:](first).square().sum()  # type: ignore[no-any-return]

    model = Halves()
    x = torch.randn(512, 16)
    roomy = fxremat.optimize(model, "1GiB", fullgraph=False, **QUICK)
    roomy(x).backward()
    budget_bytes = fxremat.report(roomy).floor_bytes
    fxremat.restore(model)
    model.zero_grad()
    torch._dynamo.reset()
    tight = fxremat.optimize(model, budget_bytes, fullgraph=False, **QUICK)
    warm(lambda net: net(x).backward(), tight)
    loss = tight(x)
    with pytest.raises(InfeasibleBudgetError, match="retain_graph=True"):
        loss.backward(retain_graph=True)


def test_the_number_of_forwards_that_fit_is_right() -> None:
    problem = fxremat.capture(Net(), (X,), in_flight=3, **QUICK)
    budget_bytes = fxremat.frontier(problem, 2)[0].peak_bytes
    net = fxremat.optimize(Net(), budget_bytes, **QUICK)
    losses = [net(X) for _ in range(3)]
    with pytest.raises(InfeasibleBudgetError, match="room for 3 at once"):
        losses.append(net(X))
    sum(losses).backward()


def test_threads_do_not_take_each_others_calls_for_pieces_of_one() -> None:
    net = fxremat.optimize(Net(), "1MiB", in_flight=2, **QUICK)
    warm(lambda n: n(X).backward(), net)
    barrier = threading.Barrier(2)
    failures: list[Exception] = []

    def train() -> None:
        try:
            for _ in range(3):
                barrier.wait(60)
                loss = net(X)
                barrier.wait(60)
                loss.backward()
        except Exception as error:  # noqa: BLE001  # whatever it is, the test shows it
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_gradients_of_the_arguments_of_earlier_calls_are_counted() -> None:
    inputs = [torch.randn(64, 16, requires_grad=True) for _ in range(3)]
    problem = fxremat.capture(Net(), (inputs[0],), **QUICK)
    budget_bytes = fxremat.frontier(problem, 2)[-1].peak_bytes + inputs[0].nbytes
    net = fxremat.optimize(Net(), budget_bytes, **QUICK)
    outside_bytes = sum(t.nbytes for t in net.parameters()) + inputs[0].nbytes

    def step(x: torch.Tensor) -> None:
        net(x).backward()
        net.zero_grad()

    step(inputs[0])
    step(inputs[1])
    inputs[0].grad = inputs[1].grad = None

    def both() -> None:
        step(inputs[0])
        step(inputs[1])

    assert fxremat.measure_peak(both).peak_bytes + outside_bytes <= budget_bytes
    with pytest.raises(fxremat.FxrematError, match="gradients"):
        step(inputs[2])
