"""What ``verify`` compares, and the callables that it must be able to take."""

from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.check import same_bits
from fxremat.comparing import Observed, compare, difference_in_words, largest_difference
from fxremat.errors import OverBudgetError, VerificationError
from fxremat.stepstate import StepState, structure
from tests.steps import QUICK

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def seen(value: torch.Tensor | None) -> Observed:
    return Observed({"output 0": value}, {}, {}, {}, {})


@pytest.mark.parametrize(
    ("one", "other", "equal", "difference"),
    [
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), True, 0.0),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False, 0.0),
        (torch.tensor([INF, 1.0]), torch.tensor([INF, 1.5]), False, 0.5),
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.5]), False, 0.5),
        (torch.tensor([NAN]), torch.tensor([1.0]), False, INF),
        (torch.tensor([INF]), torch.tensor([-INF]), False, INF),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), True, 0.0),
        (torch.tensor([True]), torch.tensor([False]), False, 1.0),
        (torch.zeros(0, 3), torch.zeros(0, 3), True, 0.0),
        (torch.zeros(0, 3), torch.zeros(0, 2), False, INF),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float16), False, INF),
        (torch.ones(2, 2).to_sparse(), torch.ones(2, 2).to_sparse(), True, 0.0),
    ],
)
def test_bits_and_differences(
    one: torch.Tensor, other: torch.Tensor, equal: bool, difference: float
) -> None:
    assert same_bits(one, other) is equal
    assert one.numel() == 0 or largest_difference(one, other) == difference
    assert equal or difference_in_words(one, other)


def test_a_difference_of_one_last_bit_is_named_with_its_place() -> None:
    one = torch.full((3, 5), 0.7)
    other = one.clone()
    other[1, 2] = torch.nextafter(other[1, 2], torch.tensor(1.0))
    text = difference_in_words(one, other)
    assert text.startswith("1 of 15 elements differ, the first at [1, 2]: 0.7000000")
    assert "largest difference 5.96e-08" in text


def test_infinite_values_neither_break_nor_widen_the_bound_of_inductor() -> None:
    one = torch.tensor([INF, 1.0, NAN])
    near, far = one.clone(), one.clone()
    near[1] += 1e-6
    far[1] += 1.0
    assert compare(seen(one), seen(near), "inductor").beyond == ()
    assert compare(seen(one), seen(far), "inductor").beyond == ("output 0",)
    assert compare(seen(one), seen(near), "eager").beyond == ("output 0",)


def test_a_structure_shows_types_keys_constants_and_repetitions() -> None:
    t, u = torch.zeros(2), torch.zeros(2)
    assert structure({"a": [t, u], "b": (t, None, 3)}) == (
        "dict{'a': list(tensor 0, tensor 1, ), 'b': tuple(tensor 0, None, 3, ), }"
    )
    different = [(t, u), [t, u], (t, t), (t, u, None), {"a": t, "b": u}, {"a": t, "c": u}]
    assert len({structure(value) for value in different}) == len(different)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.tanh(self.layer(x)) * scale


def test_an_argument_that_repeats_its_elements_can_be_verified() -> None:
    scale = torch.tensor([[0.5, 1.5, 2.5, 3.5]]).expand(5, 4)
    args = (torch.randn(5, 4), scale)
    fxremat.verify(Scaled(), args, budget="1MiB", repeats=1, **QUICK).raise_if_broken()


@pytest.mark.parametrize("part", [slice(None), slice(1, 9, 2)])
def test_an_argument_that_others_computed_keeps_their_graph(part: slice) -> None:
    weight = torch.randn(5, 8, requires_grad=True)
    x = weight.exp()[:, :4] if part == slice(None) else weight.exp()[:, part]
    args = (x, torch.ones(4))
    check = fxremat.verify(Scaled(), args, budget="1MiB", repeats=1, steps=2, **QUICK)
    check.raise_if_broken()
    assert check.measured_peak_bytes == check.predicted_peak_bytes
    assert weight.grad is None
    model = Scaled()
    fxremat.optimize(model, "1MiB", verify=True, **QUICK)(*args).sum().backward()
    assert weight.grad is not None


def test_a_computed_argument_inside_an_object_is_refused_in_words() -> None:
    class Box:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    box = Box(torch.ones(2, requires_grad=True).exp())
    with pytest.raises(VerificationError, match="Detach it"):
        StepState(None, (box,), {}, held=False)


class Replacing(nn.Module):
    """Gives its buffer a new tensor in every forward."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        h = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return torch.tanh(h * self.mean.exp())


def test_a_buffer_that_is_replaced_is_compared_and_put_back() -> None:
    model = Replacing()
    mean = model.mean
    check = fxremat.verify(model, (torch.randn(5, 4),), budget="1MiB", repeats=1, **QUICK)
    check.raise_if_broken()
    assert model.mean is mean
    assert torch.equal(mean, torch.zeros(4))


def test_memory_of_the_loss_that_was_given_is_named_as_such() -> None:
    model = nn.Sequential(nn.Linear(40, 400), nn.Tanh())
    x = torch.randn(50, 40)
    floor_bytes = fxremat.frontier(fxremat.capture(model, (x,), **QUICK), 2)[-1].peak_bytes

    def loss(output: torch.Tensor) -> torch.Tensor:
        return (output.square() + output.exp()).mean()

    check = fxremat.verify(model, (x,), budget=floor_bytes, loss=loss, repeats=1, **QUICK)
    assert "the loss given to verify" in str(check)
    with pytest.raises(OverBudgetError, match="reserve="):
        check.raise_if_broken()


def test_a_function_that_failed_its_verification_does_not_run_in_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise VerificationError("refused")

    monkeypatch.setattr("fxremat.verifying.verify_call", refuse)
    step = fxremat.optimize(torch.tanh, "1MiB", verify=True, **QUICK)
    for _ in range(2):
        with pytest.raises(VerificationError):
            step(torch.randn(3, requires_grad=True))
