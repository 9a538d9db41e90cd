"""What operator calls cost on the device that will run them.

Each distinct call runs on made-up inputs of its own sizes, strides and types, one at a time. First
all calls run inside one profile, which shows what each holds inside itself and warms it up; then
each is timed. A call that cannot be run so is priced by the roofline model, its workspace is taken
to be as large as its inputs and results, and the table says why under ``guessed``.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fxremat.costtable import Cost, CostTable
from fxremat.passes.allocations import mark, record_allocations
from fxremat.passes.costcache import cache_path, device_name, read_cache, write_cache
from fxremat.passes.opcall import OpCall, Unmeasurable, cost_key
from fxremat.passes.realmode import real_mode
from fxremat.passes.roofline import FAILURES, estimate, one_line, roofline_costs
from fxremat.passes.workbench import (
    Job,
    Strides,
    held_inside,
    make_job,
    measure_cuda,
    prepare,
    strides_of,
    time_cpu,
)

__all__ = ["OpCall", "cost_key", "measure_costs", "roofline_costs", "uniform_costs"]

Progress = Callable[[int, int], None]


def uniform_costs(calls: Sequence[OpCall]) -> CostTable:
    """Count calls: each costs 1 ns, and no workspace is known."""
    return CostTable(costs={cost_key(call): Cost(1) for call in calls}, kind="uniform")


def measure_costs(
    calls: Sequence[OpCall],
    *,
    limit_s: float = 20.0,
    room_bytes: int | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> CostTable:
    """Measure time and workspace of each distinct call.

    Can be called in the middle of a trace, under any modes. Generators and the tensors in ``calls``
    stay as they are.

    Args:
        calls: The calls; equal ones are measured once.
        limit_s: About the most time to spend. Workspaces go first; timing is repeated as long as
            there is time. [s]
        room_bytes: The most that one call's inputs and outputs may take; None: any. [bytes]
        cache_dir: Where costs are kept between processes; None: nowhere.
        progress: Called with (done, all) as work proceeds.

    Returns:
        A table of kind "measured" with exactly the keys of ``calls``.

    Raises:
        ProfilerBusyError: A call must be measured while another torch profiler is running.
    """
    distinct = {cost_key(call): call for call in calls}
    with real_mode():
        device_type = _device_type(distinct)
        path = None if cache_dir is None else cache_path(cache_dir, device_type)
        kept = None if path is None else read_cache(path)
        found = {key: kept[key] for key in distinct if kept is not None and key in kept}
        missing = {key: call for key, call in distinct.items() if key not in found}
        measured, guessed = _measure(missing, limit_s, room_bytes, progress)
        found.update(measured)
        table = CostTable(
            costs={key: found[key] for key in distinct},
            kind="measured",
            device=device_name(device_type),
            torch_version=torch.__version__,
            threads=torch.get_num_threads(),
            guessed=guessed,
        )
        if path is not None and len(measured) > len(guessed):
            write_cache(path, table)
    return table


def _device_type(calls: dict[str, OpCall]) -> str:
    """Where the calls run; a graph has one device, but for a few scalars."""
    return "cuda" if any(":cuda" in key or "device=cuda" in key for key in calls) else "cpu"


def _measure(
    calls: dict[str, OpCall], limit_s: float, room_bytes: int | None, progress: Progress | None
) -> tuple[dict[str, Cost], dict[str, str]]:
    """Costs of all these calls, and reasons of those that are guesses."""
    bench = _Bench(
        stop_ns=time.perf_counter_ns() + round(limit_s * 1e9),
        reasons={},
        progress=progress,
        steps=2 * len(calls),
    )
    jobs = _jobs(calls, room_bytes, bench.reasons)
    devices = range(torch.cuda.device_count()) if any(job.on_cuda for job in jobs) else ()
    costs: dict[str, Cost] = {}
    if jobs:
        with torch.random.fork_rng(devices=devices):
            costs.update(_measure_cpu([job for job in jobs if not job.on_cuda], bench))
            costs.update(_measure_cuda([job for job in jobs if job.on_cuda], bench))
    rest = {key: call for key, call in calls.items() if key not in costs}
    estimates, _ = estimate(rest) if rest else ({}, {})
    failed = {job.key for job in jobs}  # those that are not run at all hold what nobody can tell
    for key in rest:
        workspace_bytes = estimates[key].touched_bytes if key in failed else 0
        costs[key] = Cost(estimates[key].cost_ns, workspace_bytes)
    bench.report_done()
    return costs, {key: bench.reasons[key] for key in rest}


@dataclass(slots=True)
class _Bench:
    """One session of measuring.

    Attributes:
        stop_ns: When to end, on the performance counter. [ns]
        reasons: Key -> why it could not be measured.
        progress: Told how far it is.
        steps: How many steps there are.
        done: How many are done.
    """

    stop_ns: int
    reasons: dict[str, str]
    progress: Progress | None
    steps: int
    done: int = 0

    def step(self) -> None:
        """One more step is done."""
        self.done += 1
        if self.progress is not None:
            self.progress(min(self.done, self.steps), self.steps)

    def report_done(self) -> None:
        """All steps are done, whatever was skipped."""
        if self.progress is not None and self.done < self.steps:
            self.progress(self.steps, self.steps)

    def left_ns(self) -> int:
        """Time that is left. [ns]"""
        return max(0, self.stop_ns - time.perf_counter_ns())

    def late(self, key: str) -> bool:
        """Whether no time is left for this call."""
        if self.left_ns() > 0:
            return False
        self.reasons[key] = "the time for measuring was over"
        return True


def _jobs(calls: dict[str, OpCall], room_bytes: int | None, reasons: dict[str, str]) -> list[Job]:
    """The calls that can be run; reasons for the others."""
    sizes = {} if room_bytes is None or not calls else estimate(calls)[0]
    jobs: list[Job] = []
    for key, call in calls.items():
        try:
            job = make_job(key, call)
        except Unmeasurable as error:
            reasons[key] = str(error)
            continue
        if room_bytes is not None and sizes[key].touched_bytes > room_bytes:
            reasons[key] = (
                f"inputs and outputs take {sizes[key].touched_bytes:,} bytes,"
                f" more than the {room_bytes:,} there is room for"
            )
            continue
        jobs.append(job)
    return jobs


def _measure_cpu(jobs: list[Job], bench: _Bench) -> dict[str, Cost]:
    """Workspaces of all jobs in one profile, then the time of each."""
    first_ns: dict[str, int] = {}
    lies: dict[str, Strides] = {}
    if not jobs:
        return {}
    with record_allocations("cpu") as recording:
        for job in jobs:
            if not bench.late(job.key):
                _run_marked(job, first_ns, lies, bench.reasons)
            bench.step()
    costs: dict[str, Cost] = {}
    running = [job for job in jobs if job.key in first_ns]
    for index, job in enumerate(running):
        workspace_bytes, held_bytes = held_inside(recording.within(job.key))
        share_ns = bench.left_ns() // (len(running) - index)
        cost_ns, spread = first_ns[job.key], 0.0
        if share_ns > cost_ns:
            cost_ns, spread = time_cpu(prepare(job), share_ns)
        costs[job.key] = Cost(cost_ns, workspace_bytes, held_bytes, spread, lies[job.key])
        bench.step()
    return costs


def _run_marked(
    job: Job, first_ns: dict[str, int], lies: dict[str, Strides], reasons: dict[str, str]
) -> None:
    """Warm a job up, then run it inside a mark with its key; note how long, and its strides."""
    try:
        run = prepare(job)
        with mark(job.key):
            start_ns = time.perf_counter_ns()
            result = run()
            end_ns = time.perf_counter_ns()
    except FAILURES as error:
        reasons[job.key] = f"it does not run on made-up inputs: {one_line(error)}"
        return
    lies[job.key] = strides_of(result)
    first_ns[job.key] = end_ns - start_ns


def _measure_cuda(jobs: list[Job], bench: _Bench) -> dict[str, Cost]:
    """Time and workspace of each job on the GPU."""
    costs: dict[str, Cost] = {}
    for index, job in enumerate(jobs):
        bench.step()
        if bench.late(job.key):
            continue
        share_ns = bench.left_ns() // (len(jobs) - index)
        try:
            with torch.cuda.device(job.cuda_device):  # its allocator is the one that is asked
                costs[job.key] = measure_cuda(prepare(job), share_ns)
        except FAILURES as error:
            bench.reasons[job.key] = f"it does not run on made-up inputs: {one_line(error)}"
        bench.step()
    return costs
