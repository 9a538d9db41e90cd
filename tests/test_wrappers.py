"""What people do to an optimised module between two steps, and copies of it."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fxremat
from fxremat.check import same_bits
from tests.steps import QUICK

X = torch.randn(50, 8)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 8), nn.BatchNorm1d(8),
        nn.Linear(8, 4),
    )  # fmt: skip


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.lm_head = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(torch.tanh(self.words(x)))  # type: ignore[no-any-return]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def without_dropout() -> nn.Sequential:
    """Traced dropouts round otherwise in low precision."""
    return nn.Sequential(*(layer for layer in mlp() if not isinstance(layer, nn.Dropout)))


def load(module: nn.Module) -> None:
    module.load_state_dict({n: t.clone() + 1 for n, t in module.state_dict().items()})


def assign(module: nn.Module) -> None:
    module.load_state_dict({n: t.clone() for n, t in module.state_dict().items()}, assign=True)


def constants(module: nn.Module) -> None:
    def fill(part: nn.Module) -> None:
        for parameter in part.parameters(recurse=False):
            nn.init.constant_(parameter, 0.1)

    module.apply(fill)


def new_head(module: Any) -> None:
    torch.manual_seed(5)
    module.lm_head = nn.Linear(8, 12)


def tie(module: Any) -> None:
    module.lm_head.weight = module.words.weight


def patch(module: Any) -> None:
    module.forward = lambda x: module.words(x) * 3


def hook_for_one_step(module: Any) -> None:
    handle = module[1].register_forward_hook(lambda _module, _inputs, output: output * 2)
    step(module)
    handle.remove()


def reseeded(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def seeded(module: Any) -> None:
        torch.manual_seed(5)
        change(module)

    return seeded


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "loaded": (mlp, load),
    "assigned": (mlp, assign),
    "in double": (mlp, lambda m: m.double()),
    "in half": (without_dropout, lambda m: m.half()),
    "in bfloat16": (without_dropout, lambda m: m.to(torch.bfloat16)),
    "partly frozen": (mlp, lambda m: m[0].requires_grad_(False)),
    "frozen": (mlp, lambda m: m.requires_grad_(False)),
    "in evaluation": (mlp, lambda m: m.eval()),
    "initialised again": (mlp, constants),
    "with new data": (mlp, lambda m: setattr(m[0].weight, "data", m[0].weight.data * 2)),
    "with another head": (Heads, new_head),
    "tied": (Heads, tie),
    "with another layer": (mlp, lambda m: m.__setitem__(1, nn.GELU())),
    "longer": (mlp, lambda m: m.append(nn.Tanh())),
    "shorter": (mlp, lambda m: m.__delitem__(1)),
    "with another forward": (Heads, patch),
    "with a hook": (mlp, lambda m: m[1].register_forward_hook(lambda *given: given[2] * 2)),
    "with a hook taken away": (mlp, hook_for_one_step),
    "with a hook before": (mlp, lambda m: m.register_forward_pre_hook(lambda _m, x: (x[0] + 1,))),
    "with a gradient hook": (mlp, lambda m: m[0].weight.register_hook(lambda g: g * 2)),
    "with weight norm": (mlp, lambda m: parametrizations.weight_norm(m[0])),
    "with spectral norm": (mlp, reseeded(lambda m: parametrizations.spectral_norm(m[0]))),
}


def step(module: nn.Module) -> list[torch.Tensor]:
    """Output, gradients, buffers and the generator after one step from a seed."""
    torch.manual_seed(1)
    module.zero_grad()
    output = module(X.to(next(module.parameters()).dtype))
    if output.requires_grad:
        output.float().square().sum().backward()
    gradients = (torch.zeros(0) if p.grad is None else p.grad for p in module.parameters())
    found = [output, *gradients, *module.buffers(), torch.get_rng_state()]
    return [tensor.detach().clone() for tensor in found]


@pytest.mark.parametrize("stepped", [True, False], ids=["after a step", "before the first"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_module_are_seen(change: str, stepped: bool) -> None:
    make, apply = CHANGES[change]
    plain, model = make(), make()
    fxremat.optimize(model, "1MiB", **QUICK)
    for module in (plain, model):
        if stepped:
            step(module)
        apply(module)
    for _ in range(2):
        assert same(step(plain), step(model))
    assert list(plain.state_dict()) == list(model.state_dict())
    assert fxremat.report(model).differentiated == (change != "frozen")


def copies(model: nn.Module) -> Iterator[nn.Module]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    yield torch.load(buffer, weights_only=False)
    yield copy.deepcopy(model)
    yield copy.copy(model)
    yield pickle.loads(pickle.dumps(model))


def test_copies_are_plain_and_say_so() -> None:
    model = fxremat.optimize(mlp(), "1MiB", **QUICK)
    step(model)
    for other in copies(model):
        with pytest.raises(fxremat.FxrematError, match="copies and loaded modules are plain"):
            fxremat.report(other)
        assert same(step(copy.deepcopy(model)), step(other))
    assert fxremat.report(model).saved_bytes > 0


def test_a_saved_state_is_that_of_a_plain_module(tmp_path: Path) -> None:
    model = fxremat.optimize(mlp(), "1MiB", **QUICK)
    step(model)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    plain = mlp()
    plain.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert same(step(plain), step(model))


def test_a_dozen_modules_of_one_class_and_new_options_for_one() -> None:
    models = [fxremat.optimize(mlp(), "1MiB", **QUICK) for _ in range(12)]
    plain = mlp()
    expected = step(plain)
    assert all(same(expected, step(model)) for model in models)
    assert all(len(fxremat.report(model).graphs) == 1 for model in models)
    least_bytes = fxremat.report(models[0]).floor_bytes
    fxremat.optimize(models[0], least_bytes, **QUICK)
    plain_again, again = step(plain), step(models[0])
    assert same(plain_again, again)
    assert fxremat.report(models[0]).budget_bytes == least_bytes
    assert same(step(plain), step(fxremat.restore(models[0])))


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_optimised_module_can_be_checkpointed_from_outside(reentrant: bool) -> None:
    found = []
    for planned in (False, True):
        module = mlp()[:4]  # a recomputation that stops early leaves buffers as they are
        call = fxremat.optimize(module, "1MiB", **QUICK) if planned else module
        torch.manual_seed(2)
        x = X.clone().requires_grad_()
        checkpoint(call, x, use_reentrant=reentrant).square().sum().backward()
        gradients = [t.grad for t in (x, *module.parameters()) if t.grad is not None]
        found.append([*gradients, torch.get_rng_state()])
    assert same(*found)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
        ),
        lambda: nn.TransformerEncoderLayer(8, 2, 16),
        lambda: nn.TransformerDecoderLayer(8, 2, 16),
        lambda: nn.MultiheadAttention(8, 2),
    ],
    ids=["encoder", "encoder layer", "decoder layer", "attention"],
)
def test_containers_of_torch_are_planned_whole(make: Callable[[], nn.Module]) -> None:
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        module = make()
        x = torch.randn(3, 7, 8, requires_grad=True)
        count = {"MultiheadAttention": 3, "TransformerDecoderLayer": 2}.get(
            type(module).__name__, 1
        )
        if planned:
            fxremat.optimize(module, "1MiB", **QUICK)
        output = module(*[x] * count)
        output = output[0] if isinstance(output, tuple) else output
        output.square().sum().backward()
        gradients = [p.grad for p in (x, *module.parameters()) if p.grad is not None]
        found.append([output.detach(), *gradients, torch.get_rng_state()])
    assert same(*found)
    assert fxremat.report(module).saved_bytes > 0


def normalised() -> tuple[nn.Sequential, nn.BatchNorm1d]:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16)
    return nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Linear(16, 4)), norm


def test_a_checkpoint_that_stops_before_buffers_are_written_is_refused() -> None:
    net, norm = normalised()
    fxremat.optimize(net, "1MiB", **QUICK)
    x = torch.randn(30, 8, requires_grad=True)
    net(x).sum().backward()  # not the first call: that one would take the plan away
    before = copy.deepcopy(norm.running_mean)
    with pytest.raises(fxremat.UnsupportedGraphError, match="use_reentrant=True works"):
        checkpoint(net, x, use_reentrant=False)
    assert same_bits(norm.running_mean, before)


def test_the_other_checkpoint_writes_buffers_as_often_as_eager_does() -> None:
    means = []
    for planned in (False, True):
        net, norm = normalised()
        torch.manual_seed(1)
        x = torch.randn(30, 8, requires_grad=True)
        call = fxremat.optimize(net, "1MiB", **QUICK) if planned else net
        checkpoint(call, x, use_reentrant=True).sum().backward()
        assert norm.num_batches_tracked == 2
        means.append(norm.running_mean)
    assert same_bits(*means)
