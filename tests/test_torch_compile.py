"""``torch.compile(..., backend="fxremat")`` and Inductor as the executor."""

import copy
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import fxremat
import fxremat.backend
from fxremat.backend import compiled_session
from fxremat.check import same_bits
from tests.steps import QUICK, same_gradients


@pytest.fixture(autouse=True)
def _backend() -> None:
    """The backend by its name, also where the package is not installed but on the path."""
    torch._dynamo.reset()
    if "fxremat" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(fxremat.backend.fxremat, name="fxremat")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))


X = torch.randn(60, 8)


def floor_bytes(**options: Any) -> int:
    problem = fxremat.capture(mlp(), (X,), **{**QUICK, **options})
    return fxremat.frontier(problem, 2)[-1].peak_bytes


def step(call: Any) -> torch.Tensor:
    """The output of one seeded step, and the generator's state after it, as one tensor."""
    torch.manual_seed(6)
    output: torch.Tensor = call(X)
    output.square().sum().backward()
    return torch.cat([output.detach().flatten(), torch.get_rng_state().float()])


def test_the_entry_point_names_the_backend() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert 'fxremat = "fxremat.backend:fxremat"' in text
    for found in entry_points(group="torch_dynamo_backends", name="fxremat"):
        assert found.load() is fxremat.backend.fxremat


def test_it_gives_the_same_bits_and_a_report() -> None:
    model, plain = mlp(), mlp()
    budget_bytes = floor_bytes()
    compiled = torch.compile(model, backend="fxremat", options={"budget": budget_bytes, **QUICK})
    assert torch.equal(step(compiled), step(plain))
    assert same_gradients(plain, model)
    report = fxremat.report(compiled)
    assert report.predicted_peak_bytes == report.budget_bytes == budget_bytes
    resident_bytes = sum(t.nbytes for t in (*model.parameters(), X))
    model.zero_grad()
    peak = fxremat.measure_peak(lambda: compiled(X).sum().backward())
    loss_bytes = 8  # the caller's sum and its gradient are not in the graph
    assert resident_bytes + peak.peak_bytes <= budget_bytes + loss_bytes


def test_two_compilations_have_a_report_each() -> None:
    one = torch.compile(mlp(), backend="fxremat", options={"budget": "1MiB", **QUICK})
    two = torch.compile(mlp(), backend="fxremat", options={"budget": "2MiB", **QUICK})
    step(one)
    step(two)
    assert fxremat.report(one).budget_bytes == 1 << 20
    assert fxremat.report(two).budget_bytes == 2 << 20


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (None, fxremat.BudgetError),
        ({}, fxremat.BudgetError),
        ({"budget": 1.5}, fxremat.BudgetError),
        ({"budget": 100}, fxremat.InfeasibleBudgetError),
        ({"budget": "1MiB", "frobnicate": 1}, fxremat.OptionError),
        ({"budgets": "1MiB"}, fxremat.OptionError),
        ({"budget": "1MiB", "solver": "magic"}, fxremat.OptionError),
        ({"budget": "1MiB", "differentiate": "loss"}, fxremat.OptionError),
    ],
)
def test_errors_arrive_as_they_are(options: Any, error: Any) -> None:
    given: Any = {**QUICK, **options} if options else options
    compiled = torch.compile(mlp(), backend="fxremat", options=given)
    with pytest.raises(error) as caught:
        compiled(X)
    if isinstance(caught.value, fxremat.InfeasibleBudgetError):
        assert caught.value.budget_bytes == 100
        assert caught.value.floor_bytes == floor_bytes()


def test_a_compiled_module_that_is_not_ours_bears_no_plan() -> None:
    compiled = torch.compile(mlp(), backend="eager")
    compiled(X)
    with pytest.raises(fxremat.FxrematError, match="bears no plan"):
        fxremat.report(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["optimize", "compile"])
def test_inductor_runs_a_plan_within_its_bound(way: str) -> None:
    model, plain = mlp(), mlp()
    options = {**QUICK, "executor": "inductor"}
    optimised: Any
    if way == "optimize":
        optimised = fxremat.optimize(model, "1MiB", **options)
    else:
        optimised = torch.compile(model, backend="fxremat", options={"budget": "1MiB", **options})
    torch.testing.assert_close(step(optimised), step(plain))
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert fxremat.report(optimised).predicted_peak_bytes <= 1 << 20


@pytest.mark.slow
def test_inductor_is_verified_against_the_unrewritten_graph() -> None:
    model = mlp()
    check = fxremat.verify(model, (X,), budget="95%", executor="inductor", repeats=1, **QUICK)
    assert not check.beyond_bound
    assert check.rng_equal


class Halves(nn.Module):
    """Two halves, between which the graph breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(mlp(), nn.Linear(4, 8)), mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("budget", ["75%", "1MiB"])
def test_a_graph_that_breaks_is_planned_as_one_under_one_budget(budget: str) -> None:
    model = Halves()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="fxremat", options={"budget": budget, **QUICK})
    for _ in range(3):
        model.zero_grad()
        plain.zero_grad()
        for each in (compiled, plain):
            torch.manual_seed(6)
            each(X).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert same_bits(mine.grad, theirs.grad)
    report = fxremat.report(compiled)
    assert any("2 pieces" in note for note in report.notes)
    assert report.predicted_peak_bytes <= report.budget_bytes
    model.zero_grad()
    peak = fxremat.measure_peak(lambda: compiled(X).backward()).peak_bytes
    assert peak + sum(t.nbytes for t in (*model.parameters(), X)) <= report.budget_bytes


class Measured(nn.Module):
    """Two pieces with weights; the second is compiled again once what is between them changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.second = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        mean = float(x.detach().mean())
        return self.second(x * mean).square().mean()  # type: ignore[no-any-return]


def peaks_of(budget_bytes: int, *, measured: bool) -> list[int]:
    """Peaks of steps with other values each; those that are refused are left out. [bytes]"""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Measured(), torch.randn(64, 32)
    outside_bytes = sum(t.nbytes for t in (*model.parameters(), x))
    compiled = torch.compile(model, backend="fxremat", options={"budget": budget_bytes, **QUICK})
    found = []
    for _ in range(4):
        model.zero_grad()
        x.mul_(2)

        def run() -> None:
            compiled(x).backward()

        try:
            if measured:
                found.append(outside_bytes + fxremat.measure_peak(run).peak_bytes)
            else:
                run()
        except fxremat.InfeasibleBudgetError:
            break
    return found


@pytest.mark.parametrize("kib", [64, 72, 80, 96])
def test_a_piece_that_is_compiled_again_knows_of_the_weights_of_the_others(kib: int) -> None:
    peaks_of(kib * 1024, measured=False)  # from now on all costs are known
    found = peaks_of(kib * 1024, measured=True)
    assert kib < 96 or len(found) == 4
    assert max(found[1:], default=0) <= kib * 1024  # torch's trace counts in the first


def test_a_later_piece_counts_what_earlier_ones_were_given() -> None:
    torch.manual_seed(0)
    model, x = Measured(), torch.randn(64, 32)
    compiled = torch.compile(model, backend="fxremat", options={"budget": "1MiB", **QUICK})
    compiled(x)
    session = compiled_session(compiled)
    assert session is not None
    first, second = session.ran
    outside_bytes = sum(t.nbytes for t in (*model.parameters(), x))
    given_bytes = second.plan.problem.resident_bytes - second.piece.earlier_bytes
    assert outside_bytes <= given_bytes <= outside_bytes + 16  # and a number between the pieces
    assert second.piece.earlier_bytes == first.held_bytes > 0


class Scaled(nn.Module):
    """A guard fails for every other ``scale``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.scale = 0

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * self.scale


def compiled_for_many_values(model: Any, net: Scaled, count: int) -> None:
    for scale in range(count):
        net.scale = scale
        model(X).square().sum().backward()


def test_more_values_than_dynamo_recompiles() -> None:
    net, plain = Scaled(), Scaled()
    plain.load_state_dict(net.state_dict())
    compiled = torch.compile(net, backend="fxremat", options={"budget": "1MiB", **QUICK})
    compiled_for_many_values(compiled, net, 12)
    compiled_for_many_values(plain, plain, 12)
    assert same_gradients(net, plain)
    session = compiled_session(compiled)
    assert session is not None
    assert len(session.graphs) == 12


@pytest.mark.parametrize("fullgraph", [True, False, None])
def test_code_that_dynamo_gives_up_on_raises(
    fullgraph: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxremat.passes.recompiles.RECOMPILE_LIMIT", 9)
    monkeypatch.setattr("fxremat.passes.tracing.RECOMPILE_LIMIT", 9)
    net = Scaled()
    if fullgraph is None:
        model = torch.compile(net, backend="fxremat", options={"budget": "1MiB", **QUICK})
    else:
        model = fxremat.optimize(net, "1MiB", fullgraph=fullgraph, **QUICK)
    with pytest.raises(fxremat.CaptureError, match=r"compiled 9 times .*scale == "):
        compiled_for_many_values(model, net, 12)
    net.scale = 3  # what is compiled runs on
    model(X).square().sum().backward()


def test_other_backends_keep_the_limit() -> None:
    net, ran = Scaled(), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        ran.append(graph)
        return graph.forward

    compiled_for_many_values(torch.compile(net, backend=backend), net, 12)
    assert len(ran) == torch._dynamo.config.recompile_limit


class TwoPieces(nn.Module):
    """The second piece has weights that the first does not know of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.last = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.last(h)


def test_the_floor_of_pieces_is_a_budget_that_runs() -> None:
    def compiled(budget: int) -> Any:
        torch._dynamo.reset()
        return torch.compile(TwoPieces(), backend="fxremat", options={"budget": budget, **QUICK})

    roomy = compiled(1 << 30)
    step(roomy)
    floor = fxremat.report(roomy).floor_bytes
    tight = compiled(floor)
    for _ in range(3):
        assert torch.equal(step(tight)[-5056:], step(roomy)[-5056:])
    assert fxremat.report(tight).predicted_peak_bytes <= floor


def test_a_refused_call_is_refused_alike_and_no_part_of_it_is_reported() -> None:
    compiled = torch.compile(TwoPieces(), backend="fxremat", options={"budget": 40_000, **QUICK})
    texts = set()
    for _ in range(3):
        with pytest.raises(fxremat.InfeasibleBudgetError) as refused:
            step(compiled)
        texts.add(str(refused.value))
    assert len(texts) == 1
    with pytest.raises(fxremat.FxrematError, match="has not run"):
        fxremat.report(compiled)


def test_pieces_that_are_planned_together_know_of_all_that_was_given_once() -> None:
    compiled = torch.compile(TwoPieces(), backend="fxremat", options={"budget": "1MiB", **QUICK})
    step(compiled)
    step(compiled)
    session = compiled_session(compiled)
    assert session is not None
    assert len({record.given_bytes for record in session.graphs}) == 1
    assert len({record.given_alone_bytes for record in session.graphs}) == 2
