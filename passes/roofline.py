"""Costs without running anything: the time for the arithmetic or for the bytes, the longer one.

A roofline model (Williams, Waterman, Patterson 2009, https://doi.org/10.1145/1498765.1498785) with
a fixed time for each call. Arithmetic is counted by torch's ``FlopCounterMode``. Workspaces are
unknown to it and count as 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fxremat.costtable import Cost, CostTable
from fxremat.passes.opcall import (
    OpCall,
    TensorSpec,
    Unmeasurable,
    concrete,
    cost_key,
    specs,
    tree,
)
from fxremat.passes.realmode import real_mode

# What operators raise on inputs that they do not take.
FAILURES = (
    Unmeasurable, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError,
    ArithmeticError, MemoryError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """What a device can do.

    Attributes:
        flops_per_s: Multiplications and additions in a second. [1/s]
        bytes_per_s: Bytes moved from and to memory in a second. [bytes/s]
        call_ns: Time of a call that does nothing. [ns]
    """

    flops_per_s: float
    bytes_per_s: float
    call_ns: int


CPU = Machine(flops_per_s=100e9, bytes_per_s=20e9, call_ns=3_000)
CUDA = Machine(flops_per_s=60e12, bytes_per_s=1.5e12, call_ns=6_000)


@dataclass(frozen=True, slots=True)
class Estimate:
    """One call on paper.

    Attributes:
        cost_ns: Its time. [ns]
        touched_bytes: Its inputs and outputs together. [bytes]
    """

    cost_ns: int
    touched_bytes: int


def roofline_costs(calls: Sequence[OpCall], *, machine: Machine | None = None) -> CostTable:
    """Price calls without a device.

    Args:
        calls: The calls; equal ones are priced once.
        machine: What the device can do; None: a usual one of the kind that the tensors are on.

    Returns:
        A table of kind "roofline", the same on every machine. ``guessed`` has the calls of which
        the arithmetic could not be counted; they are priced by their bytes.
    """
    distinct = {cost_key(call): call for call in calls}
    estimates, guessed = estimate(distinct, machine=machine)
    costs = {key: Cost(found.cost_ns) for key, found in estimates.items()}
    return CostTable(costs=costs, kind="roofline", guessed=guessed)


def estimate(
    calls: dict[str, OpCall], *, machine: Machine | None = None
) -> tuple[dict[str, Estimate], dict[str, str]]:
    """Time and bytes of calls by key, and why some could not be run on fake tensors."""
    estimates: dict[str, Estimate] = {}
    reasons: dict[str, str] = {}
    with real_mode(), FakeTensorMode() as fake, FlopCounterMode(display=False) as counter:
        for key, call in calls.items():
            before = counter.get_total_flops()
            outputs: object = call.result
            try:
                outputs = _run_fake(call)
            except FAILURES as error:
                reasons[key] = f"not run on fake tensors: {one_line(error)}"
            flops = counter.get_total_flops() - before
            estimates[key] = _price(call, outputs, flops, machine)
    del fake
    return estimates, reasons


def one_line(error: BaseException) -> str:
    """The beginning of what an error says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def _run_fake(call: OpCall) -> object:
    if not isinstance(call.target, torch._ops.OpOverload):
        raise Unmeasurable("not a plain operator")
    args = tree(concrete(call.args), _fake)
    kwargs = tree(concrete(dict(call.kwargs)), _fake)
    return call.target(*cast("tuple[object, ...]", args), **cast("dict[str, object]", kwargs))


def _fake(value: object) -> object:
    if isinstance(value, TensorSpec):
        return torch.empty_strided(
            value.shape, value.stride, dtype=value.dtype, device=value.device
        )
    return value


def _price(call: OpCall, outputs: object, flops: int, machine: Machine | None) -> Estimate:
    read = _known([*call.args, *call.kwargs.values()])
    written = _known(outputs)
    if machine is None:
        on_cuda = any(spec.device.type == "cuda" for spec in (*read, *written))
        machine = CUDA if on_cuda else CPU
    moved_bytes = sum(spec.read_bytes for spec in (*read, *written))
    busy_s = max(flops / machine.flops_per_s, moved_bytes / machine.bytes_per_s)
    touched_bytes = sum(spec.size_bytes for spec in (*read, *written))
    return Estimate(machine.call_ns + round(busy_s * 1e9), touched_bytes)


def _known(value: object) -> list[TensorSpec]:
    """Specs of the tensors whose sizes are known."""
    found: list[TensorSpec] = []

    def leaf(each: object) -> None:
        try:
            found.extend(specs(concrete(each)))
        except Unmeasurable:
            return

    tree(value, leaf)
    return found
