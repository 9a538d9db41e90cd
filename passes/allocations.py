"""What torch's allocator does while something runs: every allocation and release, in order.

Read from the events of torch's profiler, which sees what operators allocate inside themselves too.
The private parts of torch that it needs stand in this file alone.

On the CPU the allocator's reports have one trap: it remembers the size of a block that an earlier
profile saw, even when the block was released and its address given away since, and reports the
release of that address with the old size. Releases are therefore matched by address with
allocations of the same recording, and others are dropped. What was allocated before the recording
has no known size on the CPU; its release is not seen.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import profile, record_function

from fxremat.errors import FxrematError

try:
    from torch._C._autograd import _profiler_enabled, _ProfilerResult
    from torch._C._profiler import _EventType

    _ = (_ProfilerResult.experimental_event_tree, _EventType.Allocation)
except (ImportError, AttributeError) as error:  # pragma: no cover - a torch that moved them
    raise ImportError(
        f"fxremat needs torch 2.11 or newer, in which these exist; this is {torch.__version__}:"
        f" {error}"
    ) from error

# Kineto writes a line to standard error at every start and stop; it reads this at its first start.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

_MARK = "fxremat::mark::"  # begins the names of our own spans in a recording


class ProfilerBusyError(FxrematError, RuntimeError):
    """Somebody else's profile is running, and torch has but one profiler."""


class AllocationEvent(NamedTuple):
    """One allocation or release.

    Attributes:
        time_ns: On the profiler's clock. [ns]
        change_bytes: Above 0 for an allocation, below 0 for a release. [bytes]
    """

    time_ns: int
    change_bytes: int


def _time(event: AllocationEvent) -> int:
    return event.time_ns


class Span(NamedTuple):
    """When a marked piece of a recording ran.

    Attributes:
        start_ns: On the profiler's clock. [ns]
        end_ns: On the profiler's clock. [ns]
    """

    start_ns: int
    end_ns: int


@dataclass(slots=True)
class Recording:
    """What was recorded; filled in when the ``with`` of ``record_allocations`` ends.

    Attributes:
        events: In the order of time.
        spans: Name of a mark -> when it ran.
    """

    events: tuple[AllocationEvent, ...] = ()
    spans: dict[str, Span] = field(default_factory=dict)

    def within(self, name: str) -> tuple[AllocationEvent, ...]:
        """The events inside a mark."""
        start_ns, end_ns = self.spans[name]
        first = bisect_left(self.events, start_ns, key=_time)
        return self.events[first : bisect_right(self.events, end_ns, lo=first, key=_time)]


def mark(name: str) -> record_function:
    """A context that names a piece of the recording; each name once."""
    return record_function(_MARK + name)


@contextmanager
def record_allocations(device_type: str = "cpu") -> Iterator[Recording]:
    """Record all allocations of one kind of device, by this thread and its backward threads.

    Args:
        device_type: "cpu" or "cuda".

    Yields:
        The recording, empty until the end.

    Raises:
        ProfilerBusyError: Another profile is running.
    """
    if _profiler_enabled():
        raise ProfilerBusyError(
            "allocations cannot be counted while another torch profiler runs."
            " End that profile first, or let one step run before it begins."
        )
    recording = Recording()
    # The plain autograd profiler; torch.profiler.profile around it adds schedules and a warning.
    with profile(use_kineto=True, profile_memory=True) as running:
        yield recording
    result = running.kineto_results
    if result is None:
        raise FxrematError("torch's profiler returned no result")
    nodes = sorted(_flat(result.experimental_event_tree()), key=lambda node: node.start_time_ns)
    recording.events = tuple(_matched(nodes, device_type))
    recording.spans = {
        node.name.removeprefix(_MARK): Span(node.start_time_ns, node.end_time_ns)
        for node in nodes
        if node.name.startswith(_MARK)
    }


def _flat(roots: list[Any]) -> list[Any]:
    """All nodes of the profiler's trees."""
    nodes = list(roots)
    for node in nodes:  # grows while it is read
        nodes.extend(node.children)
    return nodes


def _matched(nodes: list[Any], device_type: str) -> Iterator[AllocationEvent]:
    """The allocations, and the releases that belong to them."""
    live: dict[int, int] = {}
    for node in nodes:
        if node.tag != _EventType.Allocation:
            continue
        extra = node.extra_fields
        if extra.device.type != device_type or extra.alloc_size == 0:
            continue
        time_ns, address = node.start_time_ns, extra.ptr
        if extra.alloc_size > 0:
            if address in live:  # released where the profiler does not look: an unrelated thread
                yield AllocationEvent(time_ns, -live[address])
            live[address] = extra.alloc_size
            yield AllocationEvent(time_ns, extra.alloc_size)
        elif address in live:
            yield AllocationEvent(time_ns, -live.pop(address))
        elif device_type != "cpu":  # other allocators know the size of every block they release
            yield AllocationEvent(time_ns, extra.alloc_size)
