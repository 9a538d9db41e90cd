"""Training loops as people write them, with and without a plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from tests.steps import QUICK
from tests.test_wrappers import mlp, same, without_dropout

X = torch.randn(50, 8)
Loop = Callable[[Callable[..., Any], nn.Module], list[torch.Tensor]]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def state(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers(), torch.get_rng_state()]


def scaled(call: Callable[..., Any], module: nn.Module) -> list[torch.Tensor]:
    """A scaler, clipping, a scheduler, an average of the weights."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    average = torch.optim.swa_utils.AveragedModel(module)
    seen = []
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(call(X).square().mean()).backward()
        scaler.unscale_(optimizer)
        seen.append(nn.utils.clip_grad_norm_(module.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(module)
    return [*seen, *average.parameters()]


def accumulated(set_to_none: bool) -> Loop:
    """Two micro-steps to each step."""

    def loop(call: Callable[..., Any], module: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        seen = []
        for _ in range(3):
            for part in X.chunk(2):
                loss = call(part).square().mean() / 2
                loss.backward()
                seen.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return seen

    return loop


def autocast(call: Callable[..., Any], module: nn.Module) -> list[torch.Tensor]:
    """Low precision around the call, full precision after it."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    for enabled in (True, True, False, True):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            output = call(X)
        output.float().square().mean().backward()
        optimizer.step()
        seen.append(output.detach())
    return seen


def evaluated(call: Callable[..., Any], module: nn.Module) -> list[torch.Tensor]:
    """Evaluation between the steps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    for _ in range(2):
        module.train()
        call(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        module.eval()
        with torch.no_grad():
            seen.append(call(X))
    module.train()
    return seen


@pytest.mark.parametrize(
    ("loop", "make"),
    [
        (scaled, mlp),
        (accumulated(True), mlp),
        (accumulated(False), mlp),
        (autocast, without_dropout),
        (evaluated, mlp),
    ],
    ids=["scaler", "accumulation to None", "accumulation to zeros", "autocast", "evaluation"],
)
def test_loops_give_the_same_bits(loop: Loop, make: Callable[[], nn.Module]) -> None:
    found = []
    for planned in (False, True):
        module = make()
        call: Any = fxremat.optimize(module, "1MiB", **QUICK) if planned else module
        torch.manual_seed(3)
        found.append([*loop(call, module), *state(module)])
    assert same(*found)
    assert fxremat.report(call).graphs


def test_an_optimizer_in_reserve_is_counted_and_the_step_stays_below_the_budget() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    step: Any = fxremat.optimize(
        lambda x: model(x).square().mean(), "60KiB", reserve=optimizer, **QUICK
    )
    for _ in range(2):
        step(X).backward()
        optimizer.step()
        optimizer.zero_grad()
    held = [*model.parameters(), *model.buffers(), X]
    held += [t for s in optimizer.state.values() for t in s.values()]
    held_bytes = sum(tensor.nbytes for tensor in held)
    report = fxremat.report(step)
    assert report.resident_bytes == held_bytes
    peak = fxremat.measure_peak(lambda: step(X).backward())
    assert held_bytes + peak.peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes


def test_a_loop_over_a_language_model_with_its_own_loss() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=31, n_positions=16, n_embd=12, n_layer=2, n_head=3)
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).train()
        if planned:
            fxremat.optimize(model, "4MiB", differentiate="loss", **QUICK)
        ids = torch.randint(0, 31, (2, 9))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, 1, 3)
        losses = []
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append([*losses, *state(model)])
    assert same(*found)
    assert fxremat.report(model).saved_bytes > 0


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=31, n_positions=16, n_embd=12, n_layer=1, n_head=3)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 31, (4, 9))]
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        if planned:
            fxremat.optimize(model, "4MiB", **QUICK)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()
        found.append(state(model)[:-1])
    assert same(*found)
    assert fxremat.report(model).saved_bytes > 0
