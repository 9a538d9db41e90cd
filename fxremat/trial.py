"""Inductor's code is tried before its first step, and compiled for less where it holds too much.

Inductor fuses operators and orders them anew, so that its code may hold more than the plan says: a
fused kernel allocates all its results at once, and a replay that is fused with an earlier one lives
longer. Only the allocator can tell. So the first call runs one step beside the real one, on the
parameters as they are and on copies of what the step may write, and measures it. Where it is above
the budget, the step is planned and compiled again for as many bytes less.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn

from fxremat.budget import format_bytes
from fxremat.errors import FxrematError, InfeasibleBudgetError
from fxremat.passes.allocations import ProfilerBusyError
from fxremat.passes.inductor import Partition, compile_with_inductor
from fxremat.passes.joint import copy_graph
from fxremat.passes.meter import measure_peak
from fxremat.passes.seeding import seeded_loss, unit
from fxremat.passes.tracing import compiling
from fxremat.records import GraphRecord

ATTEMPTS = 4
log = logging.getLogger("fxremat")


class Planner(Protocol):
    """What partitions the graph, and can be asked to plan for less.

    Attributes:
        record: The graph's plan, once it has been partitioned.
        device: Where it runs.
        written: Which of the graph's inputs the step writes to; None where that is not known.
        partition: The partition function.
    """

    record: GraphRecord | None
    device: torch.device
    written: frozenset[int] | None

    @property
    def partition(self) -> Partition: ...

    def aim(self, target_bytes: int) -> None:
        """Plan for so many bytes from now on. [bytes]"""

    def mark(self) -> None:
        """The graph runs now."""


def compile_and_try(
    graph: fx.GraphModule, inputs: Sequence[Any], planner: Planner, identity: str
) -> Callable[..., Any]:
    """Compile a graph with Inductor; its code is tried when it is first called.

    Args:
        graph: What Dynamo captured; it is left as it was.
        inputs: Its example inputs.
        planner: What partitions it.
        identity: Budget and options, for Inductor's cache.

    Returns:
        What Dynamo is to call.
    """

    def build(given: Sequence[Any]) -> Callable[..., Any]:
        copy = fx.GraphModule(graph, copy_graph(graph.graph)[0])  # Inductor edits what it is given
        with compiling():
            return compile_with_inductor(copy, given, planner.partition, identity)

    call, tried = build(inputs), False

    def run(*args: Any) -> Any:
        nonlocal call, tried
        record = planner.record
        if not tried and record is not None and record.differentiated and torch.is_grad_enabled():
            call = _settle(call, args, build, planner)
            tried = True
        planner.mark()
        return call(*args)

    shielded: Callable[..., Any] = torch._dynamo.disable(run)
    return shielded


def _settle(
    call: Callable[..., Any],
    args: Sequence[Any],
    build: Callable[[Sequence[Any]], Callable[..., Any]],
    planner: Planner,
) -> Callable[..., Any]:
    """Code that holds no more than the budget.

    Raises:
        InfeasibleBudgetError: None was found.
    """
    for _ in range(ATTEMPTS):
        record = planner.record
        assert record is not None  # the graph has been partitioned
        plan = record.plan
        try:
            trial_bytes = trial_peak_bytes(call, args, planner, plan.problem.outputs_held)
        except ProfilerBusyError:
            log.warning("another profiler is running: the peak of Inductor's code is not checked")
            return call
        peak_bytes = plan.problem.resident_bytes + trial_bytes
        if peak_bytes <= plan.budget_bytes:
            record.notes += (f"a trial of Inductor's code held {peak_bytes:,} bytes at its peak.",)
            return call
        over_bytes = peak_bytes - plan.budget_bytes
        log.info("Inductor's code holds %s, planning for less", format_bytes(peak_bytes))
        planner.aim(plan.peak_bytes - over_bytes)
        try:
            call = build(args)
        except InfeasibleBudgetError as error:
            raise _infeasible(plan.budget_bytes, error.floor_bytes + over_bytes) from error
    raise _infeasible(plan.budget_bytes, peak_bytes)


def _infeasible(budget_bytes: int, enough_bytes: int) -> FxrematError:
    return InfeasibleBudgetError(
        f"Inductor's code holds more than the plan that it follows, and for a budget of "
        f"{budget_bytes:,} bytes ({format_bytes(budget_bytes)}) no plan was found that leaves room "
        f"for that. Raise the budget to about {enough_bytes:,} bytes "
        f"({format_bytes(enough_bytes)}), or say executor='eager', which holds what is planned.",
        budget_bytes,
        enough_bytes,
    )


def trial_peak_bytes(
    call: Callable[..., Any], args: Sequence[Any], planner: Planner, outputs_held: bool
) -> int:
    """Run one step beside the real one and measure it.

    Parameters, their gradients and the generators are left as they are.

    Args:
        call: Compiled code.
        args: Its arguments.
        planner: Knows the device.
        outputs_held: The caller keeps the outputs until the backward ends.

    Returns:
        The most that it held above what is there at its start. [bytes]
    """
    device = planner.device
    given = _stand_ins(args, planner.written)

    def step() -> Any:
        outputs = call(*given)
        loss = seeded_loss(outputs)
        if not outputs_held:
            outputs = None
        torch.autograd.backward(loss, unit(device))
        return outputs

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        step()  # the backward compiles when it first runs
        for value in given:
            if isinstance(value, torch.Tensor):
                value.grad = None
        return measure_peak(step, device=device).peak_bytes


def _stand_ins(args: Sequence[Any], written: frozenset[int] | None) -> list[Any]:
    """The memory of parameters without their hooks and gradients; copies of all else.

    Inputs that share a storage share the copy. A parameter is copied too where the step writes to
    it, or where that is not known.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    found: list[Any] = []
    for index, value in enumerate(args):
        if not isinstance(value, torch.Tensor):
            found.append(value)
            continue
        other = value.detach()
        if not isinstance(value, nn.Parameter) or written is None or index in written:
            storage = value.untyped_storage()
            if storage._cdata not in copies:
                copies[storage._cdata] = storage.clone()
            empty = torch.empty(0, dtype=value.dtype, device=value.device)
            place = (value.storage_offset(), value.size(), value.stride())
            other = empty.set_(copies[storage._cdata], *place)
        found.append(other.requires_grad_(value.requires_grad))
    return found
