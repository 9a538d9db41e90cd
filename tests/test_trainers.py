"""Loops of others around an optimised module: Trainer, Accelerate, a gradient scaler."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.check import same_bits
from tests.steps import QUICK


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(same_bits(a.detach(), b.detach()) for a, b in pairs)


Batches = torch.utils.data.DataLoader[tuple[torch.Tensor, ...]]


def small() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """A module, its optimizer and four batches."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 24), nn.Tanh(), nn.LayerNorm(24),
        nn.Linear(24, 4),
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.randn(24, 8), torch.randint(0, 4, (24,)))
    loader = torch.utils.data.DataLoader(data, batch_size=6)
    return module, torch.optim.SGD(module.parameters(), 0.1), loader


def with_accelerate(precision: str, plan: bool, after: bool, accumulation: int) -> nn.Module:
    accelerate: Any = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulation
    )
    module, optimizer, loader = small()
    if plan and not after:
        fxremat.optimize(module, "1MiB", **QUICK)
    prepared, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    if plan and after:
        fxremat.optimize(prepared, "1MiB", **QUICK)
    for x, y in loader:
        with accelerator.accumulate(prepared):
            output = prepared(x)
            assert output.dtype == torch.float32  # the forward that accelerate put in place runs
            accelerator.backward(nn.functional.cross_entropy(output, y))
            optimizer.step()
            optimizer.zero_grad()
    unwrapped = accelerator.unwrap_model(prepared)
    assert id(unwrapped) == id(module)
    return module


@pytest.mark.parametrize("after", [False, True], ids=["before prepare", "after prepare"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_trains_to_the_same_bits(precision: str, after: bool) -> None:
    for accumulation in (1, 2):
        plain = with_accelerate(precision, False, after, accumulation)
        planned = with_accelerate(precision, True, after, accumulation)
        assert same_parameters(plain, planned)
        assert not same_parameters(plain, small()[0])
        assert fxremat.report(planned).saved_bytes > 0


def scaled(plan: str) -> tuple[nn.Module, list[float], Any]:
    """Four steps in half precision with a scale that grows."""
    module, optimizer, loader = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(module(x).float(), y)

    step: Callable[..., torch.Tensor] = loss_of
    if plan == "module":
        fxremat.optimize(module, "1MiB", **QUICK)
    elif plan == "loss":
        step = fxremat.optimize(loss_of, "1MiB", **QUICK)
    scales = []
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = step(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return module, scales, step if plan == "loss" else module


@pytest.mark.parametrize("plan", ["module", "loss"])
def test_a_gradient_scaler_trains_to_the_same_bits(plan: str) -> None:
    plain, scales, _ = scaled("")
    planned, got, bearer = scaled(plan)
    assert same_parameters(plain, planned)
    assert got == scales != scales[:1] * 4
    assert fxremat.report(bearer).saved_bytes > 0


WORDS = 101


def gpt2(dropout: float) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": WORDS, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2,
        "bos_token_id": 0, "eos_token_id": 0, "attn_pdrop": dropout, "embd_pdrop": dropout,
        "resid_pdrop": dropout, "loss_type": "ForCausalLM",
    }  # fmt: skip
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))


def texts() -> list[dict[str, torch.Tensor]]:
    """Texts of which differently many words count."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for number in range(12):
        ids = torch.randint(3, WORDS, (16,), generator=draw)
        labels = ids.clone()
        labels[16 - number :] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def trainer_of(own_loss: bool) -> Any:
    """A Trainer that notes the peaks of its steps after the first, in which plans are made."""
    pytest.importorskip("accelerate")
    transformers: Any = pytest.importorskip("transformers")
    peaks: list[int] = []

    class Noting(transformers.Trainer):  # type: ignore[misc]  # why: transformers ships no types
        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            if not self.state.global_step:  # plans are measured, which another profile forbids
                return super().training_step(model, inputs, *rest)
            held = [*model.parameters(), *model.buffers(), *inputs.values()]
            held += [p.grad for p in model.parameters() if p.grad is not None]
            storages = {t.untyped_storage() for t in held}
            kept_bytes = sum(s.nbytes() for s in {s._cdata: s for s in storages}.values())
            loss: list[torch.Tensor] = []
            inner = super().training_step
            peak = fxremat.measure_peak(lambda: loss.append(inner(model, inputs, *rest)))
            peaks.append(peak.peak_bytes + kept_bytes)
            return loss[0]

    class Own(Noting):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
            labels = inputs.pop("labels")[:, 1:].reshape(-1)
            logits = model(**inputs).logits[:, :-1].reshape(-1, WORDS)
            return nn.functional.cross_entropy(logits, labels)

    return (Own if own_loss else Noting), peaks


def trained(
    folder: Path, budget: int | None = None, *, own_loss: bool = False, **settings: Any
) -> tuple[Any, list[int]]:
    """A model after three steps of Trainer, and the peaks of its micro-steps."""
    transformers: Any = pytest.importorskip("transformers")
    kind, peaks = trainer_of(own_loss)
    model = gpt2(0.0 if settings.get("bf16") else 0.1)  # traced dropouts round otherwise in half
    if budget is not None:
        fxremat.optimize(model, budget, **QUICK)
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
        **settings,
    )  # fmt: skip
    kind(model=model, args=arguments, train_dataset=texts()).train()
    return model, peaks


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"label_smoothing_factor": 0.1},
        {"own_loss": True},
        {"bf16": True},
        {"gradient_checkpointing": True},
    ],
    ids=["as it is", "labels smoothed", "own loss", "bfloat16", "checkpoints"],
)
def test_trainer_trains_to_the_same_bits(settings: dict[str, Any], tmp_path: Path) -> None:
    plain, _ = trained(tmp_path, **settings)
    torch._dynamo.reset()
    planned, _ = trained(tmp_path, 2**30, **settings)
    assert same_parameters(plain, planned)
    assert not same_parameters(plain, gpt2(0.0))
    report = fxremat.report(planned)
    assert report.saved_bytes > 0
    assert len(report.graphs) == 1  # however many words count


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_trainer_stays_within_the_floor(tmp_path: Path) -> None:
    batch = {key: torch.stack([t[key] for t in texts()[:2]]) for key in ("input_ids", "labels")}
    given = {**batch, "num_items_in_batch": torch.tensor(1)}
    problem = fxremat.capture(gpt2(0.1).train(), (), given, gradients="held", **QUICK)
    budget_bytes = fxremat.frontier(problem, 2)[-1].peak_bytes
    plain, peaks = trained(tmp_path)
    assert max(peaks) > budget_bytes
    torch._dynamo.reset()
    planned, peaks = trained(tmp_path, budget_bytes)
    assert same_parameters(plain, planned)
    assert len(peaks) == 4
    assert max(peaks) <= budget_bytes
    assert fxremat.report(planned).predicted_peak_bytes <= budget_bytes
