"""The options of ``optimize``: what each does to the bytes, and how a wrong one is refused."""

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fxremat
from fxremat.check import same_bits
from tests.problems import random_problem
from tests.steps import QUICK, same_gradients


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


X = torch.randn(40, 8)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)
    )


def floor_and_baseline(**options: Any) -> tuple[int, int]:
    problem = fxremat.capture(mlp(), (X,), **{**QUICK, **options})
    plans = fxremat.frontier(problem, 2)
    return plans[-1].peak_bytes, plans[0].budget_bytes


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("executor", "jit"), ("solver", "magic"), ("costs", "guessed"), ("outputs", "kept"),
        ("gradients", "maybe"), ("in_flight", 0), ("in_flight", 1.0), ("in_flight", True),
        ("time_limit_s", 0), ("time_limit_s", "long"), ("reserve", "lots"), ("reserve", 1.5),
        ("reserve", -1), ("reserve", "60%"), ("differentiate", ()), ("differentiate", 1.5),
        ("differentiate", True), ("verify", 3), ("fullgraph", None), ("progress", 3),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_refused_at_once(option: str, value: Any) -> None:
    model = mlp()
    with pytest.raises(fxremat.OptionError, match=option) as caught:
        fxremat.optimize(model, "1MiB", **{option: value})
    assert caught.value.option == option
    assert caught.value.value == value
    assert "_compiled_call_impl" not in model.__dict__


@pytest.mark.parametrize("option", ["executor", "solver", "costs", "outputs", "gradients"])
def test_a_refusal_lists_the_names_that_exist(option: str) -> None:
    with pytest.raises(fxremat.OptionError) as caught:
        fxremat.capture(mlp(), (X,), None, **{option: "nothing"})
    assert caught.value.known
    assert all(str(name) in str(caught.value) for name in caught.value.known)


def test_unknown_options_and_budgets_are_refused() -> None:
    with pytest.raises(fxremat.OptionError, match="frobnicate"):
        fxremat.capture(mlp(), (X,), frobnicate=3)
    with pytest.raises(fxremat.BudgetError, match="two things"):
        fxremat.optimize(mlp(), 1.5)  # type: ignore[arg-type]
    with pytest.raises(fxremat.OptionError, match="callable"):
        fxremat.optimize(3, "1MiB")  # type: ignore[type-var]


# differentiate


@dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor
    count: int


class Named(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor
    number: int


torch.utils._pytree.register_dataclass(Result)


def as_model_output(loss: torch.Tensor, logits: torch.Tensor, count: int) -> Any:
    from transformers.utils.generic import ModelOutput

    global _Output
    if _Output is None:

        @dataclass
        class Output(ModelOutput):
            loss: torch.Tensor | None = None
            logits: torch.Tensor | None = None

        _Output = Output
    return _Output(loss=loss, logits=logits)


_Output: Any = None

PACKERS: dict[str, Any] = {
    "dict": lambda *parts: dict(zip(("loss", "logits", "count"), parts, strict=True)),
    "ordered": lambda *parts: OrderedDict(zip(("loss", "logits", "count"), parts, strict=True)),
    "tuple": lambda *parts: parts,
    "list": lambda *parts: list(parts),
    "named": Named,
    "dataclass": Result,
    "model_output": as_model_output,
}


class Heads(nn.Module):
    """A loss and large logits, packed in some way."""

    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.body, self.head, self.pack = mlp(), nn.Linear(8, 64), pack

    def forward(self, x: torch.Tensor) -> Any:
        return self.pack(self.body(x).square().mean(), self.head(x), 7)


def entry(output: Any, position: int) -> Any:
    """An entry of any of the packed outputs."""
    names = ("loss", "logits")
    if isinstance(output, dict):
        return output[names[position]]
    return (
        output[position] if isinstance(output, tuple | list) else getattr(output, names[position])
    )


NAMED = ("dict", "ordered", "named", "dataclass", "model_output")
PLACED = ("tuple", "list", "named", "dict", "model_output")


@pytest.mark.parametrize(
    ("packing", "key", "chosen"),
    [
        *((packing, "loss", (0,)) for packing in NAMED),
        *((packing, 1, (1,)) for packing in PLACED),
        ("dict", ("loss", "logits"), (0, 1)),
        ("tuple", (0,), (0,)),
        ("tuple", -3, (0,)),
        ("tuple", (1, 0), (0, 1)),
    ],
)
def test_only_the_chosen_entries_need_gradients(
    packing: str, key: Any, chosen: tuple[int, ...]
) -> None:
    model, plain = Heads(PACKERS[packing]), Heads(PACKERS[packing])
    model.load_state_dict(plain.state_dict())
    fxremat.optimize(model, "1MiB", differentiate=key, **QUICK)
    expected, got = plain(X), model(X)
    assert type(got) is type(expected)
    for position in (0, 1):
        assert torch.equal(entry(expected, position), entry(got, position))
        assert entry(got, position).requires_grad == (position in chosen)
    sum(entry(expected, position).sum() for position in chosen).backward()
    sum(entry(got, position).sum() for position in chosen).backward()
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert same_bits(a.grad, b.grad), name


@pytest.mark.parametrize(
    ("packing", "key", "known"),
    [
        ("dict", "nope", ("loss", "logits", "count")),
        ("dict", "keys", ("loss", "logits", "count")),
        ("dict", "count", ("loss", "logits", "count")),
        ("dict", ("loss", "nope"), ("loss", "logits", "count")),
        ("tuple", 3, ("0", "1", "2")),
        ("tuple", "loss", ("0", "1", "2")),
        ("list", "append", ("0", "1", "2")),
        ("named", "nope", ("loss", "logits", "number")),
        ("model_output", "to_tuple", ("loss", "logits")),
        ("model_output", "hidden_states", ("loss", "logits")),
    ],
)
def test_an_unknown_entry_lists_those_that_exist(
    packing: str, key: Any, known: tuple[str, ...]
) -> None:
    model = fxremat.optimize(Heads(PACKERS[packing]), "1MiB", differentiate=key, **QUICK)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(fxremat.OptionError) as caught:
        model(X)
    assert caught.value.known == known
    assert all(name in str(caught.value) for name in known)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert "_compiled_call_impl" not in model.__dict__
    model(X)


def test_an_unused_output_costs_a_tangent_unless_it_is_detached() -> None:
    model = Heads(PACKERS["dict"])
    everything = fxremat.capture(model, (X,), **QUICK)
    loss_only = fxremat.capture(model, (X,), differentiate="loss", **QUICK)
    tangents_bytes = [
        sum(s.size_bytes for s in problem.storages if s.kind == "tangent")
        for problem in (everything, loss_only)
    ]
    logits_bytes = 40 * 64 * 4
    assert tangents_bytes[0] == tangents_bytes[1] + logits_bytes
    assert (
        fxremat.frontier(loss_only, 2)[0].peak_bytes < fxremat.frontier(everything, 2)[0].peak_bytes
    )
    floor_bytes = fxremat.frontier(loss_only, 2)[-1].peak_bytes
    check = fxremat.verify(
        model, (X,), budget=floor_bytes, differentiate="loss", repeats=1, **QUICK
    )
    check.raise_if_broken()
    assert check.measured_peak_bytes == check.predicted_peak_bytes


# bytes


@pytest.mark.parametrize(
    ("reserve", "reserve_bytes"), [(1000, 1000), ("1KiB", 1024), ("2 kB", 2000)]
)
def test_a_reserve_is_resident(reserve: Any, reserve_bytes: int) -> None:
    without = fxremat.capture(mlp(), (X,), **QUICK)
    reserved = fxremat.capture(mlp(), (X,), reserve=reserve, **QUICK)
    assert reserved.resident_bytes == without.resident_bytes + reserve_bytes


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_is_reserved_for_before_it_has_a_state(kind: Any) -> None:
    model = mlp()
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=1e-3, **options)
    parameters = [p.detach().clone() for p in model.parameters()]
    before = fxremat.capture(model, (X,), **QUICK).resident_bytes
    reserved = fxremat.capture(model, (X,), reserve=optimizer, **QUICK).resident_bytes
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters(), strict=True))
    model(X).sum().backward()
    optimizer.step()
    held = [
        v
        for state in optimizer.state.values()
        for v in state.values()
        if isinstance(v, torch.Tensor)
    ]
    assert reserved - before == sum(tensor.nbytes for tensor in held) > 0


def test_released_outputs_leave_room() -> None:
    held, released = floor_and_baseline(), floor_and_baseline(outputs="released")
    assert released[1] < held[1]
    check = fxremat.verify(mlp(), (X,), budget=released[0], outputs="released", repeats=1, **QUICK)
    check.raise_if_broken()
    assert check.measured_peak_bytes == check.predicted_peak_bytes == released[0]


def test_a_second_forward_in_flight_holds_what_it_saves() -> None:
    single = fxremat.capture(mlp(), (X,), **QUICK)
    double = fxremat.capture(mlp(), (X,), in_flight=2, **QUICK)
    one, two = fxremat.frontier(single, 2)[0], fxremat.frontier(double, 2)[0]
    assert two.peak_bytes >= one.peak_bytes + one.saved_bytes
    plain, model = mlp(), fxremat.optimize(mlp(), two.peak_bytes, in_flight=2, **QUICK)
    (plain(X) - plain(X + 1)).sum().backward()
    (model(X) - model(X + 1)).sum().backward()
    assert same_gradients(plain, model)


def test_held_gradients_are_resident_and_measured() -> None:
    model = mlp()
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    freed, held = floor_and_baseline(gradients="freed"), floor_and_baseline(gradients="held")
    assert held[0] == freed[0] + parameter_bytes
    check = fxremat.verify(model, (X,), budget=held[0], gradients="held", repeats=1, **QUICK)
    check.raise_if_broken()
    assert check.measured_peak_bytes == check.predicted_peak_bytes == held[0]


def test_a_percentage_is_of_the_baseline() -> None:
    floor_bytes, baseline_bytes = floor_and_baseline()
    percent = 100 * floor_bytes // baseline_bytes + 1  # the least that is above the floor
    model = fxremat.optimize(mlp(), f"{percent}%", **QUICK)
    model(X).sum().backward()
    report = fxremat.report(model)
    assert report.baseline_peak_bytes == baseline_bytes
    assert report.budget_bytes == percent * baseline_bytes // 100
    assert floor_bytes <= report.predicted_peak_bytes <= report.budget_bytes


@pytest.mark.parametrize("solver", sorted(fxremat.SOLVERS))
def test_every_solver_can_be_asked_for(solver: str) -> None:
    model, plain = mlp(), mlp()
    fxremat.optimize(model, "1MiB", solver=solver, **QUICK)
    model(X).sum().backward()
    plain(X).sum().backward()
    assert fxremat.report(model).solver == solver
    assert same_gradients(plain, model)


@pytest.mark.parametrize("costs", ["measured", "roofline", "uniform"])
def test_costs_come_from_where_the_option_says(costs: str) -> None:
    problem = fxremat.capture(mlp(), (X,), **{**QUICK, "costs": costs})
    assert problem.costs == costs
    assert problem.step_ns > 0
    assert [op.workspace_bytes for op in problem.operations] == [
        op.workspace_bytes for op in fxremat.capture(mlp(), (X,), **QUICK).operations
    ]


@pytest.mark.parametrize("call", [fxremat.capture, partial(fxremat.verify, budget="1MiB")])
def test_arguments_that_are_not_in_a_tuple_are_refused_in_words(call: Any) -> None:
    with pytest.raises(fxremat.OptionError, match=r"args is a Tensor: .*\(x,\)"):
        call(nn.Linear(8, 4), X)
    with pytest.raises(fxremat.OptionError, match="kwargs is a Tensor"):
        call(nn.Linear(8, 4), (), X)


def test_measure_peak_wants_something_to_call() -> None:
    with pytest.raises(fxremat.OptionError, match="takes a callable, not int"):
        fxremat.measure_peak(3)  # type: ignore[arg-type]  # why: it is the fault under test


def test_a_reserve_that_cannot_be_read_is_not_told_of_percentages() -> None:
    with pytest.raises(fxremat.OptionError, match="reserve 'x' cannot be read") as caught:
        fxremat.optimize(nn.Linear(8, 4), "1MiB", reserve="x")
    assert "%" not in str(caught.value)


def test_problems_and_plans_print_in_one_line() -> None:
    problem = fxremat.capture(nn.Linear(8, 4), (X,), costs="uniform", cache_dir=False)
    assert str(problem).startswith("RematProblem('Linear': 1 forward and")
    plan = fxremat.plan(problem, "1MiB")
    assert str(plan).startswith("Plan('Linear': peak")
    assert all("\n" not in str(thing) and len(str(thing)) < 300 for thing in (problem, plan))


def test_calls_without_a_backward_need_not_return_what_is_differentiated() -> None:
    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            logits = self.layer(x)
            if labels is None:
                return {"logits": logits}
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    model = fxremat.optimize(Labelled(), "1MiB", differentiate="loss", **QUICK)
    labels = torch.arange(40) % 4
    for _ in range(2):
        model(X, labels)["loss"].backward()
        with torch.no_grad():
            assert torch.equal(model(X)["logits"], model.layer(X))
    with pytest.raises(fxremat.OptionError, match="entries that exist: logits"):
        model(X)


@pytest.mark.parametrize(
    "call",
    [
        lambda: fxremat.optimize(nn.Linear(2, 2), "1MiB", excutor="eager"),
        lambda: fxremat.plan("step.json", "60%"),  # type: ignore[arg-type]
        lambda: fxremat.frontier(None, 4),  # type: ignore[arg-type]
        lambda: fxremat.frontier(random_problem(0), points="5"),  # type: ignore[arg-type]
        lambda: fxremat.frontier(random_problem(0), points=2.5),  # type: ignore[arg-type]
        lambda: fxremat.load(None),  # type: ignore[arg-type]
    ],
)
def test_what_is_of_another_kind_is_refused_in_words(call: Any) -> None:
    with pytest.raises(fxremat.FxrematError, match=r"excutor|problem|frontier|path"):
        call()
