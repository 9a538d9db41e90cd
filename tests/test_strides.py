"""Models in which gradients reach a softmax in another layout than its kernel works in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm, log_softmax, scaled_dot_product_attention, softmax

import fxremat
from fxremat.passes.calls import call_of
from fxremat.passes.costs import cost_key, measure_costs
from fxremat.passes.extract import analyse, calls
from fxremat.passes.strides import RETURNS_CONTIGUOUS, with_real_strides
from fxremat.passes.tangents import permuted_tangents_copied
from tests.joints import joint_graph, real_inputs
from tests.steps import QUICK, Made, budgets_of, captured, leaf, made, measures_as_predicted


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Turned(nn.Module):
    """Gradients reach a softmax in another layout than it computes in; a complex quotient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 6)
        self.quotient = nn.Parameter(torch.randn(1, 16, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.log_softmax(self.inner(x), 1).t().contiguous().sin()
        h = h + torch.softmax(self.inner(x), 0).t().contiguous().cos()
        wave = torch.view_as_real((torch.complex(h, h.sin()).t() / self.quotient).exp())
        result: torch.Tensor = self.outer(h.t() * wave[..., 0]).sum() + wave.sum()
        return result


class Ways(nn.Module):
    """A linear layer, then one of several ways through softmaxes."""

    def __init__(self, way: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.way = nn.Linear(8, 24), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self.inner(x))


def time_first(h: torch.Tensor) -> torch.Tensor:
    return (log_softmax(h, -1).transpose(0, 1).contiguous() * 2).exp()


def one_after_another(h: torch.Tensor) -> torch.Tensor:
    return log_softmax(log_softmax(h[0], 1).t(), 1).t().contiguous().sin()


def mixed(h: torch.Tensor) -> torch.Tensor:
    return softmax(log_softmax(h[0].t(), 1).t(), 1).t().contiguous().sin()


def attention(h: torch.Tensor) -> torch.Tensor:
    q, k, v = h.view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    a = scaled_dot_product_attention(q, k, v, is_causal=True)
    return a * softmax(a, 1) * log_softmax(a, -1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (Turned(), torch.randn(6, 8)),
        lambda: (Ways(time_first), torch.randn(2, 6, 8)),
        pytest.param(
            lambda: (Ways(one_after_another), torch.randn(2, 6, 8)), marks=pytest.mark.slow
        ),
        pytest.param(lambda: (Ways(mixed), torch.randn(2, 6, 8)), marks=pytest.mark.slow),
        pytest.param(lambda: (Ways(attention), torch.randn(2, 6, 8)), marks=pytest.mark.slow),
    ],
    ids=["turned", "time first", "one after another", "mixed", "attention"],
)
def test_bits_and_peaks_hold(make: Any) -> None:
    model, x = make()
    x.requires_grad_()
    plans = fxremat.frontier(fxremat.capture(model, (x,), **QUICK), 2)
    for budget_bytes in (plans[0].budget_bytes, plans[1].peak_bytes):
        torch._dynamo.reset()
        check = fxremat.verify(model, (x,), budget=budget_bytes, repeats=1, **QUICK)
        assert check.ok, check
        assert check.measured_peak_bytes == check.predicted_peak_bytes


def test_fake_tensors_have_the_strides_of_real_ones_afterwards() -> None:
    x = torch.randn(2, 6, 24, requires_grad=True)
    traced = joint_graph(time_first, (x,))
    joint = with_real_strides(traced)
    assert joint is not None
    assert joint is not traced
    assert with_real_strides(joint) is joint
    found: dict[str, torch.Tensor] = {}

    class Recording(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            found[n.name] = result = super().run_node(n)
            return result

    Recording(joint.module).run(*real_inputs(joint))
    for node in joint.graph.nodes:
        if isinstance(found.get(node.name), torch.Tensor):
            assert found[node.name].stride() == node.meta["val"].stride(), node.name
    assert any(node.target in RETURNS_CONTIGUOUS for node in joint.graph.nodes)


def normalised_turned() -> Made:
    """The gradient of a normalisation is contiguous; its fake one lies like the turned input."""

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        turned = x.t() * w
        return batch_norm(turned, None, None, training=True)

    return step, (leaf(6, 12), leaf(12, 6))


def factored() -> Made:
    """The same after a product of matrices whose factor lies by columns, and a random draw."""

    def step(x: torch.Tensor) -> torch.Tensor:
        q, _ = torch.linalg.qr(x)
        scaled = q * torch.rand_like(q)
        return batch_norm(scaled, None, None, training=True)

    return step, (leaf(12, 6),)


@pytest.mark.parametrize("make", [normalised_turned, factored])
@pytest.mark.parametrize("fraction", [1, 0.5, 0])
def test_what_lies_otherwise_than_its_fake_is_planned_as_it_lies(
    make: Callable[[], Made], fraction: float
) -> None:
    budget_bytes = budgets_of(captured(make), fraction)[0]
    if not permuted_tangents_copied():
        measures_as_predicted(make, budget_bytes)
        return
    # Torch expects a tangent that lies like the fake output, and its copy is planned for.
    fn, args = made(make)
    check = fxremat.verify(fn, args, budget=budget_bytes, repeats=1, **QUICK)
    check.raise_if_broken()
    assert check.measured_peak_bytes <= check.predicted_peak_bytes


class Normalised(nn.Module):
    """Normalisations of what lies by columns, which symbolic graphs know as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> Any:
        h = batch_norm(self.inner(x).tanh().t() * 2, None, None, training=True)
        return self.outer(batch_norm(h.t().sin(), None, None, training=True)).exp()


def test_a_symbolic_graph_lies_like_one_of_known_sizes() -> None:
    x = torch.randn(10, 12)
    found = []
    for dynamic in (False, True):
        model = fxremat.optimize(Normalised(), "1MiB", dynamic=dynamic, **QUICK)
        model(x).sum().backward()
        report = fxremat.report(model)
        found.append((report.predicted_peak_bytes, report.floor_bytes))
    assert found[0] == found[1]


def test_strides_that_were_seen_replace_those_of_the_trace() -> None:
    fn, args = made(factored)
    joint = joint_graph(fn, args)
    assert with_real_strides(joint) is joint  # nobody looked
    analysis = analyse(joint)
    table = measure_costs(calls(analysis))

    def seen(node: torch.fx.Node) -> Any:
        return table[cost_key(call_of(node))].strides if node.name in analysis.reads else ()

    real = with_real_strides(joint, seen)
    assert real is not None
    assert real is not joint
    changed = [
        (new.target, new.meta["val"][0].stride())
        for old, new in zip(joint.graph.nodes, real.graph.nodes, strict=True)
        if isinstance(new.meta.get("val"), tuple)
        and new.meta["val"][0].stride() != old.meta["val"][0].stride()
    ]
    assert changed
    assert all("batch_norm" in str(target) and stride == (6, 1) for target, stride in changed)


def test_outputs_that_are_views_of_each_other_are_noted() -> None:
    def views(x: torch.Tensor) -> Any:
        y = x.sin()
        return y, y[1:]

    x = torch.randn(4, 3, requires_grad=True)
    step = fxremat.optimize(views, "1MiB", **QUICK)
    step(x)[0].sum().backward()
    assert any(
        "views of arguments or of one another" in note for note in fxremat.report(step).notes
    )
