"""The peak of one step, as torch's allocator counts it, to the byte.

On the CPU the events of the profiler are added up in order; workspaces that operators hold inside
themselves are among them. On CUDA the allocator keeps its own maximum.

Not good yet: on the CPU the release of a block that was allocated before the step is not seen, so
that a step which drops such a block (an old gradient) reads too high. Let ``before`` allocate it.
"""

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from fxremat.errors import OptionError
from fxremat.passes.allocations import AllocationEvent, mark, record_allocations


@dataclass(frozen=True, slots=True)
class PeakMeasurement:
    """What a step held.

    Attributes:
        peak_bytes: The most it held, above the level at its start. [bytes]
        absolute_bytes: ``peak_bytes`` and the level at the start: on CUDA the allocator's, on the
            CPU what the caller said is there. [bytes]
        end_bytes: Level at its end, with its result still held, above that at its start. [bytes]
        timeline: (time since the start [ns], level above the start [bytes]) after each change.
        reserved_bytes: The most that the allocator took from the device, whatever it used of it;
            on the CPU, where nothing is set aside, ``absolute_bytes``. [bytes]
        device: "cpu" or "cuda".
    """

    peak_bytes: int
    absolute_bytes: int
    end_bytes: int
    timeline: tuple[tuple[int, int], ...] = field(repr=False)
    reserved_bytes: int
    device: str


def measure_peak(
    step: Callable[[], object],
    *,
    device: torch.device | str | None = None,
    resident_bytes: int = 0,
    before: Callable[[], object] | None = None,
) -> PeakMeasurement:
    """Run a step once and measure what it holds.

    Args:
        step: What to run; its result is held until the measurement ends.
        device: Whose memory to count; CUDA where this process uses it, else the CPU.
        resident_bytes: What the caller knows to be there on the CPU when the step starts; it only
            enters ``absolute_bytes``. [bytes]
        before: Runs first and is not counted; the step's releases of what it allocates are.

    Returns:
        Peak, end and timeline. Levels may fall below 0: the step released more than it held.

    Raises:
        ProfilerBusyError: Another torch profiler is running.
        OptionError: ``step`` cannot be called.
    """
    if not callable(step):
        raise OptionError(
            f"measure_peak takes a callable, not {type(step).__name__}: give lambda: train(batch), "
            "say.",
            "step",
            step,
        )
    if device is None:
        in_use = torch.cuda.is_initialized()
        device = "cuda" if in_use else "cpu"
    place = torch.device(device)
    if place.type == "cuda":
        return _measure_cuda(step, place, before)
    if place.type != "cpu":
        raise ValueError(f"peaks are measured on cpu and cuda, not on {place.type!r}")
    with record_allocations("cpu") as recording:
        if before is not None:
            before()
        gc.collect()  # what is unreachable already must not be released by the step
        with mark("step"):
            result = step()
    del result
    timeline = _levels(recording.within("step"), recording.spans["step"].start_ns)
    peak_bytes = max(level for _, level in timeline)
    return PeakMeasurement(
        peak_bytes=peak_bytes,
        absolute_bytes=resident_bytes + peak_bytes,
        end_bytes=timeline[-1][1],
        timeline=timeline,
        reserved_bytes=resident_bytes + peak_bytes,
        device="cpu",
    )


def _measure_cuda(
    step: Callable[[], object], device: torch.device, before: Callable[[], object] | None
) -> PeakMeasurement:
    """The same by the maxima of CUDA's caching allocator."""
    if before is not None:
        before()
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start_bytes = torch.cuda.memory_allocated(device)
    start_ns = time.perf_counter_ns()
    result = step()
    torch.cuda.synchronize(device)
    passed_ns = time.perf_counter_ns() - start_ns
    end_bytes = torch.cuda.memory_allocated(device) - start_bytes
    absolute_bytes = torch.cuda.max_memory_allocated(device)
    del result
    # The allocator says how much the peak was, not when: it stands at the end of the step.
    timeline = ((0, 0), (passed_ns, absolute_bytes - start_bytes), (passed_ns, end_bytes))
    return PeakMeasurement(
        peak_bytes=absolute_bytes - start_bytes,
        absolute_bytes=absolute_bytes,
        end_bytes=end_bytes,
        timeline=timeline,
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        device="cuda",
    )


def _levels(events: Iterable[AllocationEvent], start_ns: int) -> tuple[tuple[int, int], ...]:
    """Add up the changes; the first level is 0 at the start."""
    levels = [(0, 0)]
    for event in events:
        levels.append((event.time_ns - start_ns, levels[-1][1] + event.change_bytes))
    return tuple(levels)
