"""Steps that write to an input, called again with inputs that lie otherwise to each other."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxremat
from fxremat.check import same_bits
from fxremat.passes.aliases import spans_of
from tests.cuts import Pair, from_one_array, interleaved, rows, separate
from tests.steps import QUICK, Made, leaf

Step = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Writing(nn.Module):
    """Writes to an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.mul_(2)
        return x * self.weight


def add(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    y.add_(1)
    return x.sin() + z


def multiply(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    y.add_(1)
    return (x * z).sin() * y


def results(call: Step, where: Pair) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    x, (y, z) = leaf(17, 8), where()
    output = call(x, y, z)
    (output * torch.arange(136).mul(0.37).cos().view(17, 8)).sum().backward()
    return [output, x.grad, y, z]


@pytest.mark.parametrize("step", [add, multiply])
@pytest.mark.parametrize(
    ("first", "later"),
    [
        (separate, rows(0, 3)),
        (separate, rows(3, 3)),
        (separate, from_one_array),
        (rows(0, 20), rows(0, 3)),
        (rows(0, 3), separate),
        (rows(0, 3), rows(0, 5)),
        (rows(0, 3), rows(2, 5)),
        (rows(0, 3), rows(0, 20)),
        (rows(0, 3), rows(0, 3, 50)),
    ],
)
def test_arguments_that_overlap_otherwise_later_are_refused_before_anything_runs(
    step: Step, first: Pair, later: Pair
) -> None:
    optimised = fxremat.optimize(step, "1MiB", dynamic=False, **QUICK)
    assert all(map(same_bits, results(step, first), results(optimised, first)))
    x, (y, z) = leaf(17, 8), later()
    kept = y.clone()
    with pytest.raises(fxremat.UnsupportedGraphError, match=r"argument 1 and argument 2 .*traced"):
        optimised(x, y, z)
    assert torch.equal(y, kept)
    assert all(map(same_bits, results(step, first), results(optimised, first)))


@pytest.mark.parametrize(
    ("step", "first", "later"),
    [
        (add, separate, rows(0, 20)),
        (add, separate, rows(20, 0)),
        (multiply, rows(0, 20), separate),
        (multiply, rows(0, 20), rows(22, 1)),
        (multiply, rows(0, 3), rows(0, 3)),
        (multiply, interleaved, interleaved),
        (multiply, interleaved, rows(0, 3)),  # other strides have a graph of their own
    ],
)
def test_arguments_that_lie_apart_otherwise_later_hold(
    step: Step, first: Pair, later: Pair
) -> None:
    optimised = fxremat.optimize(step, "1MiB", **QUICK)
    for where in (first, later, first):
        assert all(map(same_bits, results(step, where), results(optimised, where)))


def test_an_argument_that_is_saved_and_joins_a_written_storage_is_refused() -> None:
    optimised = fxremat.optimize(multiply, "1MiB", **QUICK)
    results(optimised, separate)
    with pytest.raises(fxremat.UnsupportedGraphError, match="writes to argument 1, and argument 2"):
        results(optimised, rows(0, 20))


def test_arguments_that_come_to_overlap_a_parameter_or_buffer_are_refused() -> None:
    module = nn.BatchNorm1d(8)
    running_mean = module.get_buffer("running_mean")
    optimised: Any = fxremat.optimize(lambda x, y: module(x) * y, "1MiB", **QUICK)
    optimised(leaf(17, 8), torch.ones(8)).sum().backward()
    with pytest.raises(fxremat.UnsupportedGraphError, match="running_mean"):
        optimised(leaf(17, 8), running_mean.detach())

    writing: Any = fxremat.optimize(Writing(), "1MiB", **QUICK)
    writing(leaf(17, 8), torch.ones(8)).sum().backward()
    with pytest.raises(fxremat.UnsupportedGraphError, match="weight"):
        writing(leaf(17, 8), writing.weight.detach())


def test_an_array_seen_twice_is_refused_in_the_first_call() -> None:
    with pytest.raises(fxremat.UnsupportedGraphError, match="without torch knowing"):
        results(fxremat.optimize(add, "1MiB", **QUICK), from_one_array)


def test_steps_that_write_nothing_may_be_given_any_memory() -> None:
    def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return (x * z).sin() * y

    optimised = fxremat.optimize(step, "1MiB", **QUICK)
    for where in (separate, rows(0, 3), from_one_array, rows(5, 3)):
        assert all(map(same_bits, results(step, where), results(optimised, where)))


def test_other_sizes_get_graphs_of_their_own() -> None:
    def cut(count: int) -> Made:
        base = torch.randn(2 * count, 8)
        return multiply, (leaf(count, 8), base[:count], base[count:])

    optimised = fxremat.optimize(multiply, "1MiB", **QUICK)
    for count in (3, 5, 7, 11):
        torch.manual_seed(count)
        step, args = cut(count)
        expected = step(*args)
        torch.manual_seed(count)
        assert torch.equal(expected, optimised(*cut(count)[1]))


def test_a_piece_without_a_backward_is_watched_as_well() -> None:
    def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        y.add_(1)
        w = z * 2
        torch._dynamo.graph_break()
        return x.sin() * w

    optimised = fxremat.optimize(step, "1MiB", fullgraph=False, **QUICK)
    results(optimised, separate)
    with pytest.raises(fxremat.UnsupportedGraphError, match="y and z"):
        results(optimised, rows(0, 3))


def test_tensors_without_memory_are_not_taken_for_overlapping() -> None:
    def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        y.add_(1)
        return (x * z).sin() * y

    with FakeTensorMode():
        fakes = [torch.randn(17, 8, requires_grad=True), *separate()]
    with torch.device("meta"):
        metas = [torch.randn(17, 8), torch.randn(17, 8), torch.randn(17, 8).t()[1:]]
    for tensors in (fakes, metas):
        ends = sorted((s.start, s.end) for s in spans_of(tensors) if s is not None)
        assert len(ends) == 3
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))
    found = fxremat.capture(step, fakes, costs="uniform")
    x, y, z = (torch.randn(17, 8) for _ in range(3))
    assert found.operations == fxremat.capture(step, (x.requires_grad_(), y, z), **QUICK).operations
