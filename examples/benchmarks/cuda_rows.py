"""What one process of ``cuda_acceptance.py`` measures: one model under one executor.

Results are written as lines of JSON while they are found, so that nothing is lost when the process
is ended because the time is over.
"""

import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._functorch.config as functorch_config
from cuda_models import Case, LossModel
from cuda_results import Peer, Row, Settings
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import fxremat
from fxremat.check import Check
from fxremat.compiling import bytes_on
from fxremat.passes.boxed import boxed

T = TypeVar("T")

FAILURES = (
    fxremat.FxrematError, RuntimeError, ValueError, TypeError, LookupError, AttributeError,
    AssertionError, ArithmeticError,
)  # fmt: skip
SEED = 20_260
SAMPLES = 5
SLOWER = 1.3  # the next plan may take so much longer than the slowest one so far


def prepare_device(device: str) -> None:
    """Make results repeat and blocks exact, as far as torch can.

    Kernels of attention add with atomics unless determinism is asked for and insisted on; with
    ``warn_only`` they still do. Expandable segments let the allocator cut every block to size: else
    it leaves up to 1 MiB at the end of a large one, and counts it.
    """
    warnings.filterwarnings("ignore")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device == "cpu":
        torch.set_num_threads(1)  # tiny models: threads would only wait for one another
    if device == "cuda":
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        try:
            torch.empty(1 << 26, device=device)
        except RuntimeError as error:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
            print(f"no expandable segments here ({error}); blocks may be up to 1 MiB larger")


class Bench:
    """One model under one executor.

    Args:
        case: The model.
        executor: "eager" or "inductor".
        settings: What the command line says.
    """

    def __init__(self, case: Case, executor: str, settings: Settings) -> None:
        self.case, self.executor, self.settings = case, executor, settings
        make = case.shallow if executor == "inductor" and case.shallow else case.make
        torch.manual_seed(SEED)
        with torch.device(settings.device):
            self.module, self.args = make(settings.tiny)
        self.options: dict[str, Any] = {
            "executor": executor,
            "cache_dir": settings.cache_dir,
            "time_limit_s": settings.solve_s,
            "progress": False,
        }
        self.slowest_s = 0.0
        self._noise: dict[str, float] | None = None

    def run(self) -> Iterator[Row | Peer]:
        """The budgets, or the peers."""
        self.insist(self.plain_step)
        if not self.settings.shares:
            yield from self.peers()
            return
        problem = self.insist(lambda: fxremat.capture(self.module, self.args, **self.options))
        top_bytes = fxremat.plan(problem, "100%").peak_bytes
        least_bytes = floor_bytes(problem, self.settings.solve_s)
        for share in self.settings.shares:
            budget_bytes = least_bytes + int(share * (top_bytes - least_bytes))
            yield self.row(share, budget_bytes)

    def peers(self) -> Iterator[Peer]:
        """Other ways to save memory."""
        if self.executor == "eager":
            yield self.peer("per-block", self.per_block)
        for value in self.settings.knob:
            yield self.peer(f"{value:g}", partial(self.knob, value))

    def late(self) -> str:
        """Why there is no time for one more; empty when there is."""
        left_s = self.settings.deadline_s - time.monotonic()
        if left_s > SLOWER * self.slowest_s:
            return ""
        return f"skipped: {max(0.0, left_s):.0f} s left, and the last took {self.slowest_s:.0f} s"

    def insist(self, step: Callable[[], T]) -> T:
        """Run something; where an operator has no deterministic form, allow the other."""
        try:
            return step()
        except RuntimeError as error:
            if "deterministic implementation" not in str(error):
                raise
            torch.use_deterministic_algorithms(True, warn_only=True)
            print(f"{self.case.name}: {str(error).splitlines()[0]}")
            return step()

    def row(self, share: float, budget_bytes: int) -> Row:
        """Verify one budget."""
        why = self.late()
        if why:
            return Row(self.case.name, self.executor, share, False, why, "", budget_bytes)
        start_s = time.monotonic()
        try:
            check = self.insist(
                lambda: fxremat.verify(
                    self.module, self.args, budget=budget_bytes, repeats=SAMPLES, **self.options
                )
            )
        except FAILURES as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return Row(self.case.name, self.executor, share, False, why, "", budget_bytes)
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - start_s)
            clean_up()
        why, values = self.judge(check)
        return Row(
            self.case.name, self.executor, share, not why, why, values, check.budget_bytes,
            check.predicted_peak_bytes, check.measured_peak_bytes, check.measured_reserved_bytes,
            check.baseline_step_s, check.step_s,
        )  # fmt: skip

    def judge(self, check: Check) -> tuple[str, str]:
        """What does not hold, and the largest difference."""
        wrong = []
        if not check.rng_equal:
            wrong.append("generators differ")
        if not check.within_budget:
            over_bytes = check.measured_peak_bytes - check.budget_bytes
            wrong.append(f"{over_bytes:,} bytes over the budget")
        elif self.executor == "eager" and check.measured_peak_bytes > check.predicted_peak_bytes:
            more_bytes = check.measured_peak_bytes - check.predicted_peak_bytes
            wrong.append(f"{more_bytes:,} bytes more than predicted")
        if not check.max_abs_diff:
            return "; ".join(wrong), "bitwise"
        name, largest = max(check.max_abs_diff.items(), key=lambda item: item[1])
        values = f"{largest:.2g}"
        noise = self.noise()
        if noise:
            values += f" (two unrewritten steps: {max(noise.values()):.2g})"
        beyond = [each for each in check.beyond_bound if each not in noise]
        if beyond:
            wrong.append(f"{len(beyond)} values beyond the bound, the largest {name}")
        return "; ".join(wrong), values

    def noise(self) -> dict[str, float]:
        """Largest differences between two steps in plain torch, under ``verify``'s names."""
        if self._noise is None:
            first, second = self.plain_step(), self.plain_step()
            self._noise = {
                name: (first[name].double() - second[name].double()).abs().max().item()
                for name in first
                if not torch.equal(first[name], second[name])
            }
            clean_up()
        return self._noise

    def plain_step(self) -> dict[str, Tensor]:
        """One step in plain torch from the first state; its loss and gradients."""
        kept = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        torch.manual_seed(SEED)
        loss = self.step(self.module)
        found = {"output 0": loss.detach()}
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of parameter {name}"] = parameter.grad
                parameter.grad = None
        for name, buffer in self.module.named_buffers():
            buffer.copy_(kept[name])
        return found

    def step(self, call: Callable[..., Tensor]) -> Tensor:
        """One step without gradients at its start."""
        for parameter in self.module.parameters():
            parameter.grad = None
        loss = call(*self.args)
        loss.backward()
        return loss

    def peer(self, name: str, measure: Callable[[], tuple[int, float]]) -> Peer:
        """Peak and time of another way."""
        why = self.late()
        if why:
            return Peer(self.case.name, self.executor, name, why=why)
        start_s = time.monotonic()
        try:
            peak_bytes, step_s = self.insist(measure)
        except FAILURES as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return Peer(self.case.name, self.executor, name, why=why)
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - start_s)
            torch._dynamo.reset()
            clean_up()
        return Peer(self.case.name, self.executor, name, peak_bytes, step_s)

    def per_block(self) -> tuple[int, float]:
        """torch.utils.checkpoint around every block."""
        LossModel.per_block = True
        try:
            return self.measure(self.module)
        finally:
            LossModel.per_block = False

    def knob(self, value: float) -> tuple[int, float]:
        """The partitioner of torch at one value of its knob, with the same executor."""
        backend: Any = "inductor"
        if self.executor == "eager":
            backend = aot_autograd(
                fw_compiler=lambda module, _: boxed(module),
                bw_compiler=lambda module, _: boxed(module),
                partition_fn=min_cut_rematerialization_partition,
            )
        compiled = torch.compile(self.module, backend=backend, fullgraph=True, dynamic=False)
        with functorch_config.patch(activation_memory_budget=value, enable_autograd_cache=False):
            return self.measure(compiled)

    def measure(self, call: Callable[..., Tensor]) -> tuple[int, float]:
        """Peak with resident bytes [bytes] and median time [s] of warm steps."""
        self.step(call)
        for parameter in self.module.parameters():
            parameter.grad = None
        clean_up()
        peak = fxremat.measure_peak(lambda: self.step(call), device=self.settings.device)
        times = []
        for _ in range(SAMPLES):
            synchronise(self.settings.device)
            start_s = time.perf_counter()
            self.step(call)
            synchronise(self.settings.device)
            times.append(time.perf_counter() - start_s)
        held = [*self.module.parameters(), *self.module.buffers(), *self.args]
        resident_bytes = bytes_on(held[0].device, held)
        return resident_bytes + peak.peak_bytes, statistics.median(times)


def floor_bytes(problem: fxremat.RematProblem, limit_s: float) -> int:
    """The least budget that can be planned, as the error for an impossible one names it. [bytes]"""
    try:
        return fxremat.plan(problem, 1, time_limit_s=limit_s).peak_bytes
    except fxremat.InfeasibleBudgetError as error:
        return error.floor_bytes


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def clean_up() -> None:
    """Let go of what the last measurement held."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def work(case: Case, executor: str, settings: Settings, out: Path) -> None:
    """Measure one model under one executor; write a line for each result."""
    prepare_device(settings.device)
    with out.open("a", encoding="utf-8") as file:
        for found in Bench(case, executor, settings).run():
            file.write(json.dumps({"kind": type(found).__name__, **asdict(found)}) + "\n")
            file.flush()
