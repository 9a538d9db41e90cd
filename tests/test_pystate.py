"""Steps that change something in Python: verified from one state, which is put back."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.pystate import PythonState
from tests.steps import QUICK

X = torch.randn(30, 4)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Layer(nn.Module):
    """A layer with state of all kinds; subclasses change it in their ways."""

    mask: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.calls = 0
        self.lengths: list[int] = []
        self.tables: dict[Any, torch.Tensor] = {}
        self.earlier: torch.Tensor | None = None
        self.register_buffer("mask", None)


class Counts(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.layer(x).sin() * self.calls


class MakesAMask(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        if self.mask is None:
            self.mask = torch.ones(4, 4).tril()
        return self.layer(x) @ self.mask


class FillsACache(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        if x.shape not in self.tables:
            self.tables[x.shape] = torch.arange(4.0)
        return self.layer(x).sin() * self.tables[x.shape]


class KeepsAList(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        self.lengths.append(len(self.lengths))
        return self.layer(x).sin() + len(self.lengths)


class Remembers(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x).sin()
        if self.earlier is not None:
            y = y + self.earlier
        self.earlier = y.detach().mean(0)
        return y


KINDS = (Counts, MakesAMask, FillsACache, KeepsAList, Remembers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_first_step_that_changes_python_state_is_verified(kind: type[Layer], steps: int) -> None:
    model = kind()
    before = {n: v for n, v in vars(model).items() if not n.startswith("_")}
    check = fxremat.verify(model, (X,), budget="1MiB", steps=steps, repeats=1, **QUICK)
    assert check.ok, str(check)
    assert check.measured_peak_bytes == check.predicted_peak_bytes
    assert {n: v for n, v in vars(model).items() if not n.startswith("_")} == before
    assert not model.lengths
    assert not model.tables
    assert model.mask is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_after_a_verified_one_is_the_first(kind: type[Layer]) -> None:
    plain, model = kind(), fxremat.optimize(kind(), "1MiB", verify=True, **QUICK)
    for _ in range(3):
        assert torch.equal(plain(X), model(X))
    assert plain.calls == model.calls
    assert plain.lengths == model.lengths


CALLS = {"made": 0}
TABLE: torch.Tensor | None = None


def counts_in_a_global(x: torch.Tensor) -> torch.Tensor:
    CALLS["made"] += 1
    return x.sin() * CALLS["made"]


def makes_a_global(x: torch.Tensor) -> torch.Tensor:
    global TABLE
    if TABLE is None:
        TABLE = torch.ones(4, 4).tril()
    return (x @ TABLE).sin()


def counts_in_a_cell() -> Callable[[torch.Tensor], torch.Tensor]:
    calls = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x.sin() * calls

    return step


@pytest.mark.parametrize("step", [counts_in_a_global, makes_a_global, counts_in_a_cell()])
def test_a_function_that_changes_what_it_refers_to_is_verified(
    step: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = X.clone().requires_grad_()
    assert fxremat.verify(step, (x,), budget="1MiB", repeats=1, **QUICK).ok
    assert CALLS == {"made": 0}
    assert TABLE is None


def test_an_argument_that_the_step_extends_is_put_back() -> None:
    def step(x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        kept.append(x.detach() + len(kept))
        return x.sin() * kept[-1]

    kept: list[torch.Tensor] = []
    x = X.clone().requires_grad_()
    assert fxremat.verify(step, (x, kept), budget="1MiB", repeats=1, **QUICK).ok
    assert kept == []


class Outside:
    """State that no trace can see."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


def test_a_step_that_cannot_be_put_back_says_so() -> None:
    hidden = Outside()

    def step(x: torch.Tensor) -> torch.Tensor:
        hidden.calls += 1
        return x.sin() * hidden.calls

    x = X.clone().requires_grad_()
    with pytest.raises(fxremat.VerificationError, match="compiled anew"):
        fxremat.verify(step, (x,), budget="1MiB", repeats=1, **QUICK)


def test_parameters_without_a_shape_are_refused_in_words() -> None:
    with pytest.raises(fxremat.VerificationError, match="weight, bias of LazyLinear"):
        fxremat.verify(nn.LazyLinear(4), (X,), budget="1MiB", **QUICK)


def test_every_kind_of_container_is_put_back_in_place() -> None:
    inner: list[Any] = [1, 2]
    state: dict[str, Any] = {
        "list": inner,
        "set": {1, 2},
        "deque": deque([1, 2]),
        "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(list, a=inner),
    }
    kept = PythonState([state])
    inner.append(3)
    state["set"].add(3)
    state["deque"].appendleft(3)
    state["ordered"].move_to_end("b")
    state["default"]["b"].append(1)
    state["new"] = 1
    state["list"] = []
    kept.put_back()
    assert state["list"] is inner
    assert inner == [1, 2]
    assert state == {
        "list": [1, 2],
        "set": {1, 2},
        "deque": deque([1, 2]),
        "ordered": OrderedDict(b=1, a=2),
        "default": {"a": [1, 2]},
    }


def test_a_state_that_refers_to_itself_ends() -> None:
    loop: list[Any] = []
    loop.append(loop)
    kept = PythonState([loop])
    loop.append(1)
    kept.put_back()
    assert len(loop) == 1
