"""Calls of many sizes: static graphs for two of them, then a symbolic one planned for each size."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fxremat
from fxremat.backend import fxremat as backend
from fxremat.check import same_bits
from tests.steps import QUICK, weighted_sum

Sizes = tuple[int, ...]
Data = Callable[[Sizes], tuple[Any, ...]]

LENGTHS: tuple[Sizes, ...] = ((3, 16), (3, 20), (3, 24), (2, 12), (3, 33), (3, 24), (3, 20))


def tokens(sizes: Sizes) -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return (torch.randint(0, 50, sizes, generator=generator),)


def features(sizes: Sizes) -> tuple[torch.Tensor]:
    """Leaves of the batch and length, and of 16 features each."""
    generator = torch.Generator().manual_seed(sum(sizes))
    return (torch.randn(*sizes, 16, generator=generator, requires_grad=True),)


class Decoder(nn.Module):
    """Blocks of attention with dropout, and a loss over a small vocabulary."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
            for _ in range(blocks)
        )
        self.head = nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(
            self.head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        )


class Halving(nn.Module):
    """Convolutions over lengths that are halved, so that sizes are computed from symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(16, 16, 3, padding=1)
        self.second = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(self.norm(self.first(x.transpose(1, 2))))
        x = x[:, :, ::2]
        x = torch.tanh(self.second(x)) * x.shape[2]
        padded = functional.pad(x, (0, 64 - x.shape[2]))  # shrinks as the length grows
        loss: torch.Tensor = padded.softmax(1).square().sum()
        return loss


class Equals(nn.Module):
    """Results that have one size at some lengths and differ at others."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.wide(x) @ x.transpose(1, 2)  # as wide as the sequence is long
        mixed = scores.softmax(-1) @ self.wide(x).relu()
        both = torch.arange(x.shape[1]).cos().sum() + torch.arange(x.shape[2]).cos().sum()
        loss: torch.Tensor = (mixed.sigmoid() * both).cumsum(1).square().sum()
        return loss


class Joined(nn.Module):
    """Two inputs of lengths that vary apart, one of them by name, and a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, *, others: list[torch.Tensor], scale: float = 2.0) -> Any:
        mixed = torch.cat([self.inner(part).tanh() for part in (x, *others)], dim=1)
        return {
            "loss": (functional.dropout(mixed, 0.2) * scale).cos().sum(),
            "length": mixed.shape[1],
        }


def steps(
    make: Callable[[], nn.Module],
    data: Data,
    lengths: tuple[Sizes, ...],
    wrap: Callable[[Any], Any],
) -> Iterator[tuple[Any, dict[str, torch.Tensor | None]]]:
    """Train on each length once; what was trained, and what each step shows."""
    torch.manual_seed(3)
    net = make()
    call = wrap(net)
    torch.manual_seed(5)
    for sizes in lengths:
        args = data(sizes)
        output = call(*args)
        weighted_sum(output).backward()
        seen: dict[str, torch.Tensor | None] = {"generator": torch.get_rng_state()}
        for number, arg in enumerate(args):
            seen[f"gradient of argument {number}"], arg.grad = arg.grad, None
        seen |= {f"gradient of {n}": p.grad for n, p in net.named_parameters()}
        seen |= {f"buffer {n}": b.clone() for n, b in net.named_buffers()}
        net.zero_grad()
        yield net, seen


def differing(
    expected: dict[str, torch.Tensor | None], got: dict[str, torch.Tensor | None]
) -> list[str]:
    return [name for name in expected if not same_bits(expected[name], got.get(name))]


def floors(make: Callable[[], nn.Module], data: Data, lengths: tuple[Sizes, ...]) -> list[int]:
    """The least budget of each length, and the baseline of the largest. [bytes]"""
    problems = [fxremat.capture(make(), data(sizes), **QUICK) for sizes in dict.fromkeys(lengths)]
    ends = [fxremat.frontier(problem, 2) for problem in problems]
    return [max(least.peak_bytes for _, least in ends), max(b.peak_bytes for b, _ in ends)]


KINDS: dict[str, tuple[Callable[[], nn.Module], Data]] = {
    "decoder": (lambda: Decoder(1), tokens),
    "halving": (Halving, features),
    "equals": (Equals, features),
}


@pytest.mark.parametrize(
    ("kind", "dynamic"),
    [
        pytest.param("decoder", None, marks=pytest.mark.slow),
        pytest.param("decoder", True, marks=pytest.mark.slow),
        ("halving", None),
        pytest.param("halving", True, marks=pytest.mark.slow),
        pytest.param("equals", None, marks=pytest.mark.slow),
        pytest.param("equals", True, marks=pytest.mark.slow),
    ],
)
def test_every_length_has_the_bits_of_eager_and_the_peak_that_was_predicted(
    kind: str, dynamic: bool | None
) -> None:
    make, data = KINDS[kind]
    least, most = floors(make, data, LENGTHS)
    budget_bytes = least if dynamic else (least + most) // 2
    expected = [seen for _, seen in steps(make, data, LENGTHS, lambda net: net)]

    def wrap(net: Any) -> Any:
        return fxremat.optimize(net, budget_bytes, dynamic=dynamic, **QUICK)

    trained = zip(LENGTHS, expected, steps(make, data, LENGTHS, wrap), strict=True)
    for sizes, wanted, (net, got) in trained:
        assert differing(wanted, got) == [], sizes
        measures_as_predicted(net, data(sizes), budget_bytes)
    traced = [graph for graph in fxremat.report(net).graphs if graph.trace_s > 0]
    assert len(traced) == (1 if dynamic else 3)


def measures_as_predicted(net: nn.Module, args: tuple[Any, ...], budget_bytes: int) -> None:
    """Run one more step of the same sizes, and leave no trace of it."""
    state, buffers = torch.get_rng_state(), [b.clone() for b in net.buffers()]
    report = fxremat.report(net)

    def step() -> None:
        net(*args).backward()

    peak = fxremat.measure_peak(step)
    assert report.resident_bytes + peak.peak_bytes == report.predicted_peak_bytes <= budget_bytes
    torch.set_rng_state(state)
    for buffer, before in zip(net.buffers(), buffers, strict=True):
        buffer.copy_(before)
    net.zero_grad()


def joined(sizes: Sizes) -> tuple[torch.Tensor, list[torch.Tensor]]:
    first, second = (torch.randn(2, n, 16, requires_grad=True) for n in sizes)
    return first, [second, second.detach()]


def test_lengths_that_vary_apart_within_nested_arguments() -> None:
    def losses(wrap: Callable[[Any], Any]) -> list[tuple[torch.Tensor, int, torch.Tensor | None]]:
        torch.manual_seed(3)
        net = wrap(Joined())
        found = []
        for sizes in ((4, 6), (5, 6), (7, 9), (9, 7), (3, 16)):
            first, others = joined(sizes)
            output = net(first, others=others)
            output["loss"].backward()
            found.append((output["loss"].detach(), output["length"], others[0].grad))
            first.grad = others[0].grad = None
            net.zero_grad()
        return found

    expected = losses(lambda net: net)
    got = losses(lambda net: fxremat.optimize(net, "100%", **QUICK))
    for (loss, length, gradient), (own, number, mine) in zip(expected, got, strict=True):
        assert same_bits(loss, own)
        assert same_bits(gradient, mine)
        assert length == number


def test_a_length_that_does_not_fit_is_named_and_the_others_go_on() -> None:
    net = Equals()
    budget_bytes, _ = floors(Equals, features, ((3, 24),))
    fxremat.optimize(net, budget_bytes, dynamic=True, **QUICK)
    net(*features((3, 12))).backward()
    net.zero_grad()
    with pytest.raises(fxremat.InfeasibleBudgetError, match=r"\(3, 48, 16\)") as raised:
        net(*features((3, 48)))
    assert raised.value.floor_bytes > budget_bytes
    for sizes in ((3, 12), (3, 24)):
        net(*features(sizes)).backward()
        net.zero_grad()
        assert fxremat.report(net).predicted_peak_bytes <= budget_bytes


@pytest.mark.slow
def test_backwards_of_two_lengths_in_flight_run_the_code_of_their_own_forward() -> None:
    def train(wrap: Callable[[Any], Any]) -> list[torch.Tensor | None]:
        torch.manual_seed(3)
        net = wrap(Decoder(1))
        torch.manual_seed(4)
        for pair in (((3, 12), (3, 16)), ((3, 33), (3, 9)), ((3, 9), (3, 33))):
            first, second = (net(*tokens(sizes)) for sizes in pair)
            first.backward()
            second.backward()
        return [parameter.grad for parameter in net.parameters()]

    options = {**QUICK, "dynamic": True, "in_flight": 2, "gradients": "held"}
    problem = fxremat.capture(Decoder(1), tokens((3, 33)), **options)
    budget_bytes = int(0.85 * fxremat.plan(problem, "100%").peak_bytes)
    trained: list[Any] = []

    def wrap(net: Any) -> Any:
        trained.append(fxremat.optimize(net, budget_bytes, **options))
        return trained[0]

    expected, got = train(lambda net: net), train(wrap)
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))
    plans = fxremat.report(trained[0]).graphs
    assert {graph.recompute_ns > 0 for graph in plans} == {True, False}  # not all by one schedule


class Branching(nn.Module):
    """A graph inside the graph, which has no sizes to be planned for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def double(part: torch.Tensor) -> torch.Tensor:
            return part * 2.0

        def halve(part: torch.Tensor) -> torch.Tensor:
            return part / 2.0

        hidden = self.inner(x).tanh()
        chosen: torch.Tensor = torch.cond(hidden.sum() > 0, double, halve, (hidden,))
        return chosen.cos().sum()


class Viewed(nn.Module):
    """A view of an argument among the outputs, whose gradient autograd adds up by itself."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.tanh().sum(), x[:, :1]


@pytest.mark.parametrize("make", [Branching, Viewed])
def test_a_model_without_a_symbolic_graph_keeps_static_ones(make: Callable[[], nn.Module]) -> None:
    lengths = ((3, 16), (3, 20), (3, 24), (3, 12))
    expected = [seen for _, seen in steps(make, features, lengths, lambda net: net)]

    def wrap(net: Any) -> Any:
        return fxremat.optimize(net, "100%", **QUICK)

    trained = list(steps(make, features, lengths, wrap))
    assert all(not differing(a, b) for a, (_, b) in zip(expected, trained, strict=True))
    assert all(graph.trace_s > 0 for graph in fxremat.report(trained[0][0]).graphs)


@pytest.mark.parametrize("make", [Branching, Viewed])
def test_a_model_without_a_symbolic_graph_is_refused_if_one_is_asked_for(
    make: Callable[[], nn.Module],
) -> None:
    net = fxremat.optimize(make(), "100%", dynamic=True, **QUICK)
    with pytest.raises(fxremat.UnsupportedGraphError, match="dynamic=False"):
        net(*features((3, 12)))
    assert net(*features((3, 12))) is not None  # the module is as it was


@pytest.mark.slow
def test_inference_of_many_lengths_between_steps() -> None:
    net = fxremat.optimize(Decoder(1), "100%", **QUICK)
    plain = Decoder(1)
    plain.load_state_dict(net.state_dict())
    for sizes in LENGTHS[:5]:
        net.train()
        net(*tokens(sizes)).backward()
        with torch.no_grad():
            assert same_bits(net.eval()(*tokens(sizes)), plain.eval()(*tokens(sizes)))


@pytest.mark.slow
def test_verify_runs_the_reference_on_a_symbolic_graph_too() -> None:
    problem = fxremat.capture(Decoder(1), tokens((3, 20)), dynamic=True, **QUICK)
    budget_bytes = fxremat.frontier(problem, 2)[-1].peak_bytes
    check = fxremat.verify(
        Decoder(1), tokens((3, 20)), budget=budget_bytes, dynamic=True, repeats=1, **QUICK
    )
    check.raise_if_broken()
    assert check.measured_peak_bytes == check.predicted_peak_bytes <= budget_bytes


@pytest.mark.slow
def test_torch_compile_hands_over_symbolic_graphs() -> None:
    torch._dynamo.reset()
    if "fxremat" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(backend, name="fxremat")
    net, plain = Decoder(1), Decoder(1)
    plain.load_state_dict(net.state_dict())
    compiled = torch.compile(net, backend="fxremat", options={"budget": "100%", **QUICK})
    for sizes in ((3, 16), (3, 20), (3, 24), (3, 33)):
        losses = []
        for call in (compiled, plain):
            torch.manual_seed(1)
            losses.append(call(*tokens(sizes)))
            losses[-1].backward()
        assert same_bits(losses[0].detach(), losses[1].detach())
    assert len([g for g in fxremat.report(compiled).graphs if g.trace_s > 0]) == 2
    assert all(
        same_bits(a.grad, b.grad) for a, b in zip(net.parameters(), plain.parameters(), strict=True)
    )


def test_inductor_has_no_symbolic_graphs() -> None:
    with pytest.raises(fxremat.OptionError, match="dynamic=True needs executor='eager'"):
        fxremat.optimize(Decoder(1), "100%", executor="inductor", dynamic=True)


class Recurrent(nn.Module):
    """A recurrence over a changing number of steps."""

    def __init__(self, kind: str = "RNN") -> None:
        super().__init__()
        self.recurrence = getattr(nn, kind)(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.recurrence(x)[0].square().sum()
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["RNN", "GRU"])
def test_recurrences_of_changing_lengths(kind: str) -> None:
    def make() -> nn.Module:
        return Recurrent(kind)

    lengths = ((2, 3), (2, 4), (2, 5), (2, 4))
    expected = [seen for _, seen in steps(make, features, lengths, lambda net: net)]

    def wrap(net: Any) -> Any:
        return fxremat.optimize(net, "1MiB", dynamic=True, **QUICK)

    got = [seen for _, seen in steps(make, features, lengths, wrap)]
    assert all(not differing(a, b) for a, b in zip(expected, got, strict=True))


class Resized(nn.Module):
    """A size that is computed, which torch's whole operator does not take as a symbol."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = functional.interpolate(x.transpose(1, 2), size=x.shape[1] * 2 + 1, mode="linear")
        return wide.tanh().sum()


class Chosen(nn.Module):
    """A size that depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sin().sum()


@pytest.mark.parametrize(("make", "remedy"), [(Resized, "dynamic=False"), (Chosen, "torch.where")])
def test_what_keeps_a_graph_from_being_symbolic_is_told_briefly(
    make: Callable[[], nn.Module], remedy: str
) -> None:
    net = fxremat.optimize(make(), "1MiB", dynamic=True, **QUICK)
    with pytest.raises(fxremat.FxrematError, match=remedy) as raised:
        net(*features((3, 12)))
    assert len(str(raised.value)) < 600
