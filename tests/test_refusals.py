"""What cannot be planned is refused briefly: the line, the cause, one remedy that applies."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu

import fxremat
from fxremat.check import same_bits
from tests.steps import QUICK, leaf

Case = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
LENGTH, LINES = 900, 12


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def branching() -> tuple[Any, tuple[Any, ...]]:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if x.sum() > 0 else x.cos()

    return step, (leaf(3),)


def chosen_rows() -> tuple[Any, tuple[Any, ...]]:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sin()

    return step, (leaf(30),)


def sized_by_a_value() -> tuple[Any, tuple[Any, ...]]:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin()[: int(x.abs().max().item())]

    return step, (leaf(3),)


def own_generator() -> tuple[Any, tuple[Any, ...]]:
    generator = torch.Generator()

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(3, generator=generator)

    return step, (leaf(3),)


def seeded() -> tuple[Any, tuple[Any, ...]]:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return x * torch.rand(3)

    return step, (leaf(3),)


def batch_norm_that_averages() -> tuple[Any, tuple[Any, ...]]:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    return net, (torch.randn(6, 4),)


def backward_hook() -> tuple[Any, tuple[Any, ...]]:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    net[0].register_full_backward_hook(lambda *_: None)
    return net, (torch.randn(6, 4),)


def sparse() -> tuple[Any, tuple[Any, ...]]:
    return lambda x, s: torch.sparse.mm(s, x).sin(), (leaf(3, 3), torch.eye(3).to_sparse())


def jagged() -> tuple[Any, tuple[Any, ...]]:
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    rows = torch.nested.nested_tensor(parts, layout=torch.jagged)
    return lambda x, n: (n * 2).values().sum() * x.sum(), (leaf(3, 3), rows)


def region_called_twice() -> tuple[Any, tuple[Any, ...]]:
    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    return lambda x: region(region(x)).sum(), (leaf(3, 3),)


def kept_elsewhere() -> tuple[Any, tuple[Any, ...]]:
    def step(x: torch.Tensor) -> torch.Tensor:
        with save_on_cpu():
            return x.exp().sin()

    return step, (leaf(3),)


def backward_inside() -> tuple[Any, tuple[Any, ...]]:
    layer = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> Any:
        layer(x).sum().backward()
        return layer(x).sum()

    return step, (torch.randn(6, 4),)


class Tagged(torch.Tensor):
    """A tensor with a name."""


def subclass() -> tuple[Any, tuple[Any, ...]]:
    return nn.Linear(4, 4), (torch.randn(6, 4).as_subclass(Tagged),)


@pytest.mark.filterwarnings("ignore:.*prototype", "ignore:invoke_subgraph traced multiple")
@pytest.mark.parametrize(
    ("case", "remedy"),
    [
        (branching, "torch.where"),
        (chosen_rows, "torch.where"),
        (sized_by_a_value, "fixed size"),
        (own_generator, "default generator"),
        (seeded, "seed before"),
        (batch_norm_that_averages, "momentum"),
        (backward_hook, "remove the hook"),
        (sparse, "to_dense"),
        (jagged, "pad it"),
        (region_called_twice, "take the mark away"),
        (kept_elsewhere, "take that context away"),
        (backward_inside, "outside"),
        (subclass, "plain tensors"),
    ],
)
def test_a_refusal_is_short_and_names_a_remedy(case: Case, remedy: str) -> None:
    fn, args = case()
    module = fn if isinstance(fn, nn.Module) else nn.Module()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    generator = torch.get_rng_state()
    with pytest.raises((fxremat.CaptureError, fxremat.UnsupportedGraphError)) as refused:
        fxremat.optimize(fn, "1MiB", **QUICK)(*args)
    words = str(refused.value)
    assert remedy in words.partition("Remedy:")[2]
    assert len(words) <= LENGTH
    assert len(words.splitlines()) <= LINES
    assert torch.equal(generator, torch.get_rng_state())
    assert all(same_bits(before[n], t) for n, t in module.state_dict().items())
    assert "_compiled_call_impl" not in vars(fn)


def test_backwards_through_two_outputs_of_one_forward_are_refused_or_kept() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin().exp(), y.cos().exp()

    planned = fxremat.optimize(step, "1MiB", **QUICK)
    x, y = leaf(3), leaf(3)
    one, other = planned(x, y)
    one.sum().backward()
    with pytest.raises(fxremat.UnsupportedGraphError, match="retain_graph=True in the first"):
        other.sum().backward()
    x.grad = y.grad = None
    one, other = planned(x, y)
    one.sum().backward(retain_graph=True)
    other.sum().backward()
    twins = [t.detach().clone().requires_grad_() for t in (x, y)]
    for output in step(*twins):
        output.sum().backward()
    assert same_bits(x.grad, twins[0].grad)
    assert same_bits(y.grad, twins[1].grad)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch itself calls it
@pytest.mark.parametrize("warm", [False, True])
def test_dual_numbers_are_refused_before_and_after_a_step(warm: bool) -> None:
    model = fxremat.optimize(nn.Linear(4, 4), "1MiB", **QUICK)
    x = torch.randn(6, 4)
    if warm:
        model(x).sum().backward()
    with (
        forward_ad.dual_level(),
        pytest.raises(fxremat.UnsupportedGraphError, match=r"fxremat\.restore"),
    ):
        model(forward_ad.make_dual(x, x))


def test_a_dual_level_without_tangents_changes_nothing() -> None:
    model = fxremat.optimize(nn.Linear(4, 4), "1MiB", **QUICK)
    with forward_ad.dual_level():
        model(torch.randn(6, 4)).sum().backward()
    assert model.weight.grad is not None
