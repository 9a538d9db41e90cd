"""Train GPT-2 inside five budgets, and check every bit against the unrewritten graph.

One command, ``python examples/gpt2.py``, and no arguments: a 12-layer GPT-2 from transformers (4 x
256 tokens, width 256, vocabulary 8192, dropout on) trains inside 90, 70 and 50 % of its peak,
half-way from there to its floor, and at its floor. For each budget two training steps are compared
with those of AOTAutograd's default partition: outputs, gradients, parameters, buffers and the state
of the random generator must be equal bit for bit, and the measured peak within the budget; else
the exit status is 1. Beside them stand the two tools that torch brings: ``torch.utils.checkpoint``
around each block, and the setting ``activation_memory_budget`` of its partitioner.
"""

import argparse
import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
from tabulate import tabulate
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import fxremat
from fxremat.budget import format_bytes
from fxremat.check import same_bits
from fxremat.passes.boxed import boxed
from fxremat.passes.reference import reference_partition
from fxremat.passes.tracing import compiling, own_code, tracing

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    sys.exit("This example needs transformers: pip install 'fxremat[examples]'.")

Forward = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

SEED = 7
LEARNING_RATE = 0.1
STEPS = 2  # compared bit for bit; a difference in the first one's gradients shows in the second
KNOBS = (0.3,)
START_S = time.perf_counter()


def say(text: str) -> None:
    """Show what is going on, with the time since the start."""
    print(f"[{time.perf_counter() - START_S:4.0f} s] {text}", flush=True)


def make_model(options: argparse.Namespace) -> nn.Module:
    """A GPT-2 with random weights, in training mode."""
    torch.manual_seed(SEED)
    config = GPT2Config(
        n_layer=options.layers,
        n_embd=options.width,
        n_head=4,
        n_positions=options.tokens,
        vocab_size=options.vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model: nn.Module = GPT2LMHeadModel(config).train().to(options.device)
    return model


def run_model(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward of all of them; backward goes through the loss alone."""
    output = model(input_ids=tokens, labels=tokens)
    return output.loss, output.logits.detach()


@dataclass(frozen=True)
class Way:
    """One way to train the model.

    Attributes:
        name: For the table.
        model: A copy of its own, so that all of them start alike.
        forward: Tokens in, loss and logits out.
        ours: It is planned by fxremat.
    """

    name: str
    model: nn.Module
    forward: Forward
    ours: bool = False

    def step(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward from no gradients; the outputs are held to the end."""
        loss, logits = self.forward(tokens)
        loss.backward()
        return loss, logits

    def forget_gradients(self) -> None:
        """As ``zero_grad`` does before a step."""
        self.model.zero_grad(set_to_none=True)


def optimized(model: nn.Module, budget: int | str, name: str, options: argparse.Namespace) -> Way:
    """The model, inside a budget: this is all that fxremat asks for."""
    model = fxremat.optimize(
        copy.deepcopy(model),
        budget,
        differentiate="loss",
        time_limit_s=options.time_limit,
        cache_dir=options.cache_dir,
    )
    return Way(name, model, partial(run_model, model), ours=True)


def partitioned(model: nn.Module, partition: Partition, name: str) -> Way:
    """The model with a partition of torch's, run by the executor that runs ours."""
    model = copy.deepcopy(model)

    def forward(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return run_model(model, tokens)

    backend = aot_autograd(
        fw_compiler=lambda module, _: boxed(module),
        bw_compiler=lambda module, _: boxed(module),
        partition_fn=partition,
    )
    compiled: Forward = torch.compile(own_code(forward), backend=backend, fullgraph=True)  # type: ignore[arg-type]

    def call(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with tracing(), compiling():
            return compiled(tokens)

    return Way(name, model, call)


def with_knob(knob: float) -> Partition:
    """Partition as torch does at a value of its setting."""

    def partition(*args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        with functorch_config.patch(activation_memory_budget=knob):
            return min_cut_rematerialization_partition(*args, **kwargs)

    return partition


def checkpointed(model: nn.Module, name: str) -> Way:
    """The model with each block under ``torch.utils.checkpoint``, as eager torch runs it."""
    model = copy.deepcopy(model)
    for block in model.transformer.h:  # type: ignore[union-attr]  # why: nn.Module says Tensor or Module
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return Way(name, model, partial(run_model, model))


def gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Its gradient, which exists after a backward."""
    assert parameter.grad is not None
    return parameter.grad


def train(way: Way, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Some steps of plain gradient descent; everything that the last one left, by name."""
    say(f"training: {way.name}")  # the first step traces and plans
    torch.manual_seed(SEED)
    for _ in range(STEPS):
        way.forget_gradients()
        loss, logits = way.step(tokens)
        with torch.no_grad():
            for parameter in way.model.parameters():
                parameter.add_(gradient(parameter), alpha=-LEARNING_RATE)
    found = {"loss": loss, "logits": logits, "random state": torch.get_rng_state()}
    if tokens.device.type == "cuda":
        found["random state of the device"] = torch.cuda.get_rng_state(tokens.device)
    for name, parameter in way.model.named_parameters():
        found[f"parameter {name}"] = parameter
        found[f"gradient {name}"] = gradient(parameter)
    found |= {f"buffer {name}": buffer for name, buffer in way.model.named_buffers()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def differing(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not equal bit for bit."""
    return [n for n in {**expected, **got} if not same_bits(expected.get(n), got.get(n))]


def measure(way: Way, tokens: torch.Tensor, resident_bytes: int) -> int:
    """The measured peak of one more step, resident bytes included. [bytes]"""
    way.forget_gradients()
    gc.collect()
    return resident_bytes + fxremat.measure_peak(lambda: way.step(tokens)).peak_bytes


def time_steps(ways: Sequence[Way], tokens: torch.Tensor, repeats: int) -> dict[str, list[float]]:
    """Times of the step of each, taken in turn. [s]"""
    found: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            way.forget_gradients()
            synchronise(tokens)
            start_s = time.perf_counter()
            way.step(tokens)
            synchronise(tokens)
            found[way.name].append(time.perf_counter() - start_s)
    return found


def synchronise(tokens: torch.Tensor) -> None:
    """Wait for the device."""
    if tokens.device.type == "cuda":
        torch.cuda.synchronize(tokens.device)


def plan_all(model: nn.Module, tokens: torch.Tensor, options: argparse.Namespace) -> list[Way]:
    """The model inside five budgets; the first trace tells peak and floor."""
    first = optimized(model, "90%", "fxremat, 90 % of peak", options)
    say("tracing the model, measuring its operators and planning the first budget")
    try:
        first.step(tokens)
    except fxremat.InfeasibleBudgetError:  # of a small model nearly all of the peak is resident
        first = optimized(model, "100%", "fxremat, 100 % of peak", options)
        first.step(tokens)
    report = fxremat.report(first.model)
    peak_bytes = report.baseline_peak_bytes
    say(f"peak {format_bytes(peak_bytes)}; looking for the least that can be planned")
    floor_bytes = report.floor_bytes
    say(f"floor {format_bytes(floor_bytes)}, resident {format_bytes(report.resident_bytes)}")
    found = {f"fxremat, {share} % of peak": peak_bytes * share // 100 for share in (70, 50)}
    # Of a small model most of the peak is resident, and half of it may be below the floor.
    found = {name: wanted for name, wanted in found.items() if wanted > floor_bytes}
    between_bytes = (min(found.values(), default=peak_bytes) + floor_bytes) // 2
    found |= {"fxremat, half-way": between_bytes, "fxremat, floor": floor_bytes}
    return [first, *(optimized(model, wanted, name, options) for name, wanted in found.items())]


def row(
    way: Way, wrong: Sequence[str], measured_bytes: int, times_s: Sequence[float], base_s: float
) -> tuple[str, ...]:
    """A line of the table."""
    step_s = statistics.median(times_s)
    budget = predicted = ""
    if way.ours:
        report = fxremat.report(way.model)
        budget = format_bytes(report.budget_bytes)
        predicted = format_bytes(report.predicted_peak_bytes)
    spread = (max(times_s) - min(times_s)) / step_s
    times = (f"{step_s * 1e3:.0f} ms", f"{step_s / base_s - 1:+.1%}", f"{spread:.0%}")
    bits = "equal" if not wrong else f"{len(wrong)} values differ"
    return (way.name, budget, predicted, format_bytes(measured_bytes), *times, bits)


HEADERS = ("", "budget", "predicted", "measured", "step", "extra", "spread", "bits")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; without one, the model of the title."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each kind")
    parser.add_argument("--time-limit", type=float, default=5.0, help="for solving, per budget [s]")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cache-dir", default=None, help="where measured costs are kept")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it all; the exit status."""
    options = parse(arguments)
    model = make_model(options)
    tokens = torch.randint(
        options.vocabulary, (options.batch, options.tokens), device=options.device
    )
    size = (
        f"{options.layers} layers, width {options.width}, {options.batch} x {options.tokens} tokens"
    )
    say(f"GPT-2: {size}")
    ways = [partitioned(model, reference_partition, "unrewritten graph")]
    ways += plan_all(model, tokens, options)
    ways.append(checkpointed(model, "torch.utils.checkpoint per block"))
    ways += [partitioned(model, with_knob(k), f"torch activation_memory_budget={k}") for k in KNOBS]

    left = [train(way, tokens) for way in ways]
    wrong = [differing(left[0], found) for found in left]
    resident_bytes = fxremat.report(ways[1].model).resident_bytes
    say("measuring peaks")
    measured = [measure(way, tokens, resident_bytes) for way in ways]
    say("timing steps, in turn")
    times_s = time_steps(ways, tokens, options.repeats)
    base_s = statistics.median(times_s[ways[0].name])
    print()
    rows = [
        row(way, w, m, times_s[way.name], base_s)
        for way, w, m in zip(ways, wrong, measured, strict=True)
    ]
    print(tabulate(rows, headers=HEADERS, tablefmt="simple"), end="\n\n")
    return conclude(ways, wrong, measured)


def conclude(ways: Sequence[Way], wrong: Sequence[list[str]], measured: Sequence[int]) -> int:
    """Say what was found; the exit status."""
    failures = []
    for way, names, peak_bytes in zip(ways, wrong, measured, strict=True):
        if not way.ours:
            continue
        budget_bytes = fxremat.report(way.model).budget_bytes
        if names:
            failures.append(f"{way.name}: not bit for bit, {', '.join(names[:4])}")
        if peak_bytes > budget_bytes:
            failures.append(f"{way.name}: {peak_bytes:,} bytes in a budget of {budget_bytes:,}")
    for failure in failures:
        print(f"FAILED {failure}")
    if failures:
        return 1
    print(
        f"Every budget was kept. After {STEPS} training steps every output, gradient, parameter,\n"
        "buffer and random state is bit for bit that of the unrewritten graph.\n"
        "In a script of your own that is two lines:\n\n"
        "    import fxremat\n"
        '    model = fxremat.optimize(model, "50%", differentiate="loss")\n'
    )
    say("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
