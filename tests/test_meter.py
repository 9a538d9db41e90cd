"""The meter against steps whose levels are known, and against a live-set count of a real model."""

import gc

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fxremat.passes.allocations import ProfilerBusyError, mark, record_allocations
from fxremat.passes.meter import measure_peak

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_levels_of_a_step_written_by_hand() -> None:
    def step() -> torch.Tensor:
        first = torch.empty(1009, dtype=torch.uint8)
        second = torch.empty(503, dtype=torch.uint8)
        del first
        third = torch.empty(211, dtype=torch.uint8)
        del second
        return third

    peak = measure_peak(step, resident_bytes=70, device="cpu")
    assert [level for _, level in peak.timeline] == [0, 1009, 1512, 503, 714, 211]
    assert (peak.peak_bytes, peak.end_bytes, peak.absolute_bytes) == (1512, 211, 1582)
    assert peak.reserved_bytes == 1582
    assert peak.device == "cpu"
    times = [time_ns for time_ns, _ in peak.timeline]
    assert times == sorted(times)
    assert times[0] == 0 < times[-1] < 60_000_000_000


def test_a_step_that_allocates_nothing_has_peak_0() -> None:
    held = torch.ones(1009)
    assert measure_peak(lambda: held.view(-1)).peak_bytes == 0


def test_temporaries_inside_operators_count() -> None:
    x = torch.ones(1009, dtype=torch.bool)
    peak = measure_peak(lambda: x.sort(stable=True))
    assert peak.end_bytes == 1009 * (1 + 8)
    assert peak.peak_bytes > peak.end_bytes


def test_what_before_allocates_is_subtracted_when_the_step_releases_it() -> None:
    held: list[torch.Tensor] = []

    def step() -> None:
        new = torch.empty(503, dtype=torch.uint8)
        held.clear()
        del new

    def before() -> None:
        held.append(torch.empty(1009, dtype=torch.uint8))

    peak = measure_peak(step, before=before)
    assert [level for _, level in peak.timeline] == [0, 503, -506, -1009]
    assert (peak.peak_bytes, peak.end_bytes) == (503, -1009)


def test_an_address_that_an_earlier_profile_saw_is_not_released_with_its_old_size() -> None:
    held: list[torch.Tensor] = []
    seen: set[int] = set()

    def fill() -> None:
        held.extend(torch.empty(2_003, dtype=torch.uint8) for _ in range(50))
        seen.update(tensor.data_ptr() for tensor in held)

    measure_peak(fill)
    held.clear()
    for _ in range(200):  # until an address is given away again
        tensor = torch.empty(1_999, dtype=torch.uint8)
        held.append(tensor)
        if tensor.data_ptr() in seen:
            break
    else:
        pytest.skip("this allocator did not reuse an address")
    del tensor
    peak = measure_peak(held.clear)
    assert peak.timeline == ((0, 0),)


def test_the_step_runs_once_and_its_exception_passes() -> None:
    calls = []

    def step() -> None:
        calls.append(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure_peak(step)
    assert calls == [1]
    assert measure_peak(lambda: torch.empty(7, dtype=torch.uint8)).peak_bytes == 7


def test_a_running_profile_is_refused_in_words() -> None:
    with (
        profile(activities=[ProfilerActivity.CPU], acc_events=True),
        pytest.raises(ProfilerBusyError, match="another torch profiler"),
    ):
        measure_peak(lambda: None)


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="not on 'meta'"):
        measure_peak(lambda: None, device="meta")


def test_garbage_from_before_is_not_counted_as_the_steps_release() -> None:
    class Ring:
        def __init__(self) -> None:
            self.me = self
            self.tensor = torch.empty(1009, dtype=torch.uint8)

    def before() -> None:
        Ring()

    assert measure_peak(gc.collect, before=before).timeline == ((0, 0),)


def test_a_training_step_is_counted_to_the_byte_and_repeats() -> None:
    """Two layers without activation: every tensor that autograd makes is known."""
    n, a, b, c = 23, 31, 29, 17
    model = nn.Sequential(nn.Linear(a, b, bias=False), nn.Linear(b, c, bias=False))
    x = torch.randn(n, a)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    step()
    model.zero_grad(set_to_none=True)
    first = measure_peak(step)
    model.zero_grad(set_to_none=True)
    second = measure_peak(step)
    assert first.end_bytes == 4 * (a * b + b * c)  # the gradients
    assert first.peak_bytes == second.peak_bytes
    assert [level for _, level in first.timeline] == [level for _, level in second.timeline]
    # The worst moment makes the hidden values' gradient: held are they, it, the second weight's
    # gradient, a dense copy of the broadcast gradient of the sum, the loss, and the 1 that the
    # backward starts from.
    assert first.peak_bytes == 4 * (2 * n * b + b * c + n * c + 2)


def test_marks_cut_the_recording() -> None:
    with record_allocations() as recording:
        with mark("one"):
            kept = torch.empty(11, dtype=torch.uint8)
        with mark("two"):
            other = torch.empty(13, dtype=torch.uint8)
            del other
    assert [e.change_bytes for e in recording.within("one")] == [11]
    assert [e.change_bytes for e in recording.within("two")] == [13, -13]
    assert kept.numel() == 11


@pytest.mark.cuda
@needs_cuda
def test_cuda_levels() -> None:
    torch.empty(1, device="cuda")

    def step() -> torch.Tensor:
        first = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        second = torch.empty(1 << 21, dtype=torch.uint8, device="cuda")
        del first
        return second

    before_bytes = torch.cuda.memory_allocated()
    peak = measure_peak(step)
    assert peak.device == "cuda"
    assert (peak.peak_bytes, peak.end_bytes) == (3 << 20, 2 << 20)
    assert peak.absolute_bytes == before_bytes + peak.peak_bytes <= peak.reserved_bytes
    assert max(level for _, level in peak.timeline) == peak.peak_bytes
