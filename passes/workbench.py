"""Run one operator call on made-up inputs, again and again, and look at it.

Two instruments for each kind of device. On the CPU: a clock, and the allocation events of one
profile over all calls. On CUDA: events on the stream, and the allocator's own maximum.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import cast

import numpy as np
import torch
from torch.utils import _pytree as pytree

from fxremat.costtable import Cost
from fxremat.passes.allocations import AllocationEvent
from fxremat.passes.materialise import index_bounds, materialise
from fxremat.passes.opcall import OpCall, TensorSpec, Unmeasurable, concrete, specs
from fxremat.passes.roofline import FAILURES

Run = Callable[[], object]
Strides = tuple[tuple[int, ...], ...]

# Operators of these libraries compute and do nothing else. Others may communicate, count or print,
# or trust their inputs: they are not run for practice.
_SAFE_NAMESPACES = frozenset({"aten", "prims", "quantized", "torchvision"})
# These take probabilities. On CUDA another value is no error that can be caught: the kernel's
# assertion makes every later call of the process fail.
_PROBABILITIES = frozenset(
    {
        "aten::bernoulli", "aten::binary_cross_entropy", "aten::binary_cross_entropy_backward",
        "aten::binomial", "aten::multinomial", "aten::poisson",
    }
)  # fmt: skip
# These read their seed and offset on the host, as their forward returns them; the trace says
# "cuda", and a device's address there would end the process.
_HOST_SEEDS = frozenset(
    {
        "aten::_cudnn_attention_backward", "aten::_efficient_attention_backward",
        "aten::_scaled_dot_product_cudnn_attention_backward",
        "aten::_scaled_dot_product_efficient_attention_backward",
    }
)  # fmt: skip
_KERNEL_SAMPLES = 3  # batches of kernels timed on a GPU
_MAX_REPEATS = 100
_ENOUGH = 8  # samples
_TRY_NS = 25_000_000  # for one call; more repeats do not lower the least of them noticeably
_TRY_LONG_NS = 100_000_000  # until there are enough samples
_SCRATCH_BYTES = 64 << 20  # twice the last-level cache of the servers that this was tried on


@dataclass(frozen=True, slots=True)
class Job:
    """A call that can be run.

    Attributes:
        key: Its cost key.
        operator: Name without overload.
        target: The operator.
        args: Tensors as specs.
        kwargs: Tensors as specs.
    """

    key: str
    operator: str
    target: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]

    @property
    def cuda_device(self) -> torch.device | None:
        """The GPU that it runs on; None for the CPU."""
        places = [spec.device for spec in specs([self.args, self.kwargs])]
        device = self.kwargs.get("device")
        if isinstance(device, torch.device):
            places.append(device)
        return next((place for place in places if place.type == "cuda"), None)

    @property
    def on_cuda(self) -> bool:
        """Whether it runs on a GPU."""
        return self.cuda_device is not None

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Its tensors."""
        return tuple(specs([self.args, self.kwargs]))


def make_job(key: str, call: OpCall) -> Job:
    """Prepare a call.

    Raises:
        Unmeasurable: It must not or cannot be run; says why.
    """
    if isinstance(call.target, torch._ops.HigherOrderOperator):
        raise Unmeasurable("a higher-order operator is not run on made-up inputs")
    if not isinstance(call.target, torch._ops.OpOverload):
        raise Unmeasurable("a Python function is not run on made-up inputs")
    if call.target.namespace not in _SAFE_NAMESPACES:
        raise Unmeasurable(f"operators of {call.target.namespace!r} may do more than compute")
    args = cast("tuple[object, ...]", concrete(call.args))
    return Job(
        key=key,
        operator=call.target._schema.name,
        target=call.target,
        args=_with_host_seeds(call.target._schema, args),
        kwargs=cast("dict[str, object]", concrete(dict(call.kwargs))),
    )


def _with_host_seeds(schema: torch.FunctionSchema, args: tuple[object, ...]) -> tuple[object, ...]:
    """The same arguments, with what the operator reads on the host there."""
    if schema.name not in _HOST_SEEDS:
        return args
    names = [argument.name for argument in schema.arguments]
    return tuple(
        replace(value, device=torch.device("cpu"))
        if isinstance(value, TensorSpec) and name.startswith("philox_")
        else value
        for name, value in zip(names, args, strict=False)
    )


def prepare(job: Job) -> Run:
    """Make inputs and run the job once, to warm it up.

    Raises:
        FAILURES: It takes neither normal nor only positive floats.
    """
    try:
        run = _bind(job, positive=job.operator in _PROBABILITIES)
        run()
    except FAILURES:  # a probability, perhaps
        run = _bind(job, positive=True)
        run()
    return run


def _bind(job: Job, *, positive: bool) -> Run:
    bounds = index_bounds(job.operator, job.args)
    args = cast("tuple[object, ...]", materialise(job.args, bounds, positive=positive))
    kwargs = cast("dict[str, object]", materialise(job.kwargs, {}, positive=positive))
    if job.operator == "aten::mkldnn_rnn_layer_backward":
        args = _with_workspace(args)
    target = job.target
    return lambda: target(*args, **kwargs)


def _with_workspace(args: tuple[object, ...]) -> tuple[object, ...]:
    """Arguments of oneDNN's RNN gradient with the workspace of a real forward.

    It holds what no tensor type shows; another one ends the process.
    """
    reverse, mode, hidden, layers, biases, train, both, batches, first = args[13:22]
    forward: Callable[..., tuple[torch.Tensor, ...]] = torch.ops.aten.mkldnn_rnn_layer.default
    made = forward(
        *args[:7], reverse, batches, mode, hidden, layers, biases, both, first, train
    )  # fmt: skip
    return (*args[:-1], made[3])


def strides_of(result: object) -> Strides:
    """How the tensors of a result lie, in order. [elements]"""
    leaves = pytree.tree_leaves(result)
    return tuple(leaf.stride() for leaf in leaves if isinstance(leaf, torch.Tensor))


def held_inside(events: tuple[AllocationEvent, ...]) -> tuple[int, int]:
    """Workspace and results of one call.

    Args:
        events: What it allocated and released.

    Returns:
        The most that it held at once, less what remains of it; and what remains. [bytes]
    """
    level = peak = 0
    for event in events:
        level += event.change_bytes
        peak = max(peak, level)
    return peak - level, max(0, level)


@lru_cache(maxsize=1)
def _scratch() -> torch.Tensor:
    """More than a processor's caches hold; from numpy, so torch's allocator does not count it."""
    return torch.from_numpy(np.zeros(_SCRATCH_BYTES // 4, dtype=np.float32))


def _empty_caches() -> None:
    """Leave nothing of a call's inputs and results in the processor's caches.

    In a step, others have used the caches since a value was last touched. Measured in a loop that
    finds everything in them, elementwise operators looked four times cheaper than they are in the
    step of a GPT-2, and plans recomputed too many of them.
    """
    _scratch().add_(1.0)


def time_cpu(run: Run, share_ns: int) -> tuple[int, float]:
    """Time a call whose code is warm and whose data is cold.

    On a machine that others use too, most samples of a parallel kernel can be those in which one of
    its threads waited for a core. A slow call is therefore given more time than a fast one, so that
    the least of its samples means something.

    Args:
        run: The call.
        share_ns: The most time to spend, if that is enough for one call. [ns]

    Returns:
        The least time [ns] and the spread.
    """
    clock = time.perf_counter_ns
    samples: list[int] = []
    began_ns = now_ns = clock()
    while not samples or now_ns - began_ns < _patience_ns(len(samples), share_ns):
        _empty_caches()
        start_ns = clock()
        result = run()
        now_ns = clock()
        del result  # outside the clock: in a step, the release belongs to somebody else
        samples.append(now_ns - start_ns)
    return min(samples), _spread(samples)


def _patience_ns(samples: int, share_ns: int) -> int:
    """How long to go on with so many samples. [ns]"""
    if samples >= _MAX_REPEATS:
        return 0
    return min(share_ns, _TRY_NS if samples >= _ENOUGH else _TRY_LONG_NS)


def _spread(samples: list[int]) -> float:
    middle = median(samples)
    return (max(samples) - min(samples)) / middle if middle else 0.0


def measure_cuda(run: Run, limit_ns: int) -> Cost:
    """Time and workspace of a warm call on the GPU.

    What a library keeps between calls (cuBLAS) is there since the warm-up and does not count.
    """
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    requested_bytes = -_requested_bytes()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
    held_bytes = torch.cuda.memory_allocated() - before_bytes
    requested_bytes += _requested_bytes()
    lies = strides_of(result)
    del result
    single_ns = max(1, _batch_ns(run, 1))
    batch = max(1, min(_MAX_REPEATS, min(limit_ns, _TRY_NS) // (single_ns * _KERNEL_SAMPLES)))
    if batch == 1:
        return Cost(single_ns, peak_bytes - held_bytes, requested_bytes, strides=lies)
    samples = [_batch_ns(run, batch) for _ in range(_KERNEL_SAMPLES)]
    spread = _spread(samples)
    return Cost(min(samples), peak_bytes - held_bytes, requested_bytes, spread, lies)


def _requested_bytes() -> int:
    """What live tensors asked for; their blocks may be larger by chance. [bytes]"""
    return int(torch.cuda.memory_stats().get("requested_bytes.all.current", 0))


def _batch_ns(run: Run, count: int) -> int:
    """Time of one call within a batch of them. [ns]"""
    start, end = (_timing_event() for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    passed_ms: float = start.elapsed_time(end)
    return round(passed_ms * 1e6 / count)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
