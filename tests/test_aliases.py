"""Steps that write to an input in whose storage other inputs lie, apart or overlapping."""

from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.check import same_bits
from tests.cuts import Pair, interleaved, rows
from tests.steps import QUICK, Made, bound, hold_at_every_budget, leaf


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Flat(nn.Module):
    """A parameter and two buffers cut from one tensor; the buffers given are written to."""

    b: torch.Tensor
    c: torch.Tensor

    def __init__(self, *written: str) -> None:
        super().__init__()
        flat = torch.randn(80)
        self.a = nn.Parameter(flat[:64].view(8, 8))
        self.register_buffer("b", flat[64:72])
        self.register_buffer("c", flat[72:])
        self.written = written

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for name in self.written:
                getattr(self, name).mul_(0.9)
        return (x @ self.a).sin() * self.b + (x @ self.a).cos() * self.c


def parameter_of_an_argument() -> Made:
    flat = torch.randn(64 + 17 * 8)
    layer = nn.Linear(8, 8, bias=False)
    layer.weight = nn.Parameter(flat[:64].view(8, 8))

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        y.mul_(0.9)
        return layer(x).sin() * y

    return bound(step, layer), (leaf(17, 8), flat[64:].view(17, 8))


def buffer_of_an_argument(*, written: bool) -> Made:
    module = nn.Linear(8, 8)
    module.register_buffer("scale", torch.randn(2, 17, 8))
    one, other = module.get_buffer("scale")
    module.register_buffer("scale", one)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.no_grad():
            (y if written else module.get_buffer("scale")).mul_(0.9)
        return module(x).sin() * y * module.get_buffer("scale")

    return bound(step, module), (leaf(17, 8), other)


def two_arguments(where: Pair) -> Made:
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        y.mul_(0.5)
        return layer(x).sin() * z * y

    return bound(step, layer), (leaf(17, 8), *where())


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: (Flat("c"), (leaf(17, 8),)), id="parameter beside a written buffer"),
        pytest.param(lambda: (Flat("b", "c"), (leaf(17, 8),)), id="parameter beside two"),
        pytest.param(parameter_of_an_argument, id="parameter beside a written argument"),
        pytest.param(
            lambda: buffer_of_an_argument(written=True), id="buffer beside a written argument"
        ),
        pytest.param(
            lambda: buffer_of_an_argument(written=False), id="argument beside a written buffer"
        ),
        pytest.param(lambda: two_arguments(rows(0, 20)), id="arguments apart"),
        pytest.param(lambda: two_arguments(rows(0, 3)), id="arguments that overlap"),
        pytest.param(lambda: two_arguments(rows(3, 3)), id="arguments that are equal"),
        pytest.param(lambda: two_arguments(interleaved), id="arguments interleaved"),
    ],
)
def test_inputs_in_a_storage_that_is_written_have_the_bits_of_eager(make: Any) -> None:
    hold_at_every_budget(make, fractions=(1, 0))


@pytest.mark.parametrize("retain", [False, True])
def test_a_write_after_the_forward_is_refused_as_in_eager(retain: bool) -> None:
    x = leaf(17, 8)
    for planned, error in ((False, RuntimeError), (True, fxremat.UnsupportedGraphError)):
        module = Flat("c")
        call: Any = fxremat.optimize(module, "1MiB", **QUICK) if planned else module
        loss = call(x).sum()
        if retain:
            loss.backward(retain_graph=True)
        with torch.no_grad():
            module.a.mul_(2)
        with pytest.raises(error, match=r"modified|since the forward"):
            loss.backward()


def test_pieces_with_inputs_in_a_storage_that_is_written_hold() -> None:
    def gradients(wrap: Any) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        module, x = Flat("c"), leaf(17, 8)

        def step(x: torch.Tensor) -> Any:
            y = module(x)
            torch._dynamo.graph_break()
            return y.cos() * y

        call = wrap(step)
        for _ in range(2):
            call(x).sum().backward()
        return [x.grad, module.a.grad, module.get_buffer("c")]

    got = gradients(lambda step: fxremat.optimize(step, "1MiB", fullgraph=False, **QUICK))
    assert all(map(same_bits, gradients(lambda step: step), got))
