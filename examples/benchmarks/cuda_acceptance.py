"""Does it hold on a GPU? ``verify`` on four models at four budgets with both executors.

    python examples/benchmarks/cuda_acceptance.py
    python examples/benchmarks/cuda_acceptance.py --device cpu --tiny     # the same without a GPU

Needs torch 2.11 or later, ortools, networkx and tabulate, and no install of fxremat. It prints one
table and exits with 1 when a budget was passed, a value differs that should not, more was held than
predicted, or a row is missing because it failed or the time was over.

Several processes share the work, so that a fault of one does not end the others; on a GPU they run
side by side, since compiling keeps a core busy and the GPU idle. Step times are therefore rough:
``--jobs 1`` gives quiet ones and takes longer. The budgets lie between the least that can be
planned (0) and what the unrewritten step needs (1). With Inductor, GPT-2 has 6 blocks.

"per block" is ``torch.utils.checkpoint`` around every block in plain torch. "torch's knob" is
``activation_memory_budget`` at the tried value whose measured peak is the greatest within the
budget. Where a model draws random numbers, the knob's gradients are wrong (pytorch issue 190758).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

# cuBLAS reads it when it is first used: with it, a product has the same bits in every run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cuda_models import CASES
from cuda_results import Peer, Row, Settings
from cuda_rows import work
from tabulate import tabulate

EXECUTORS = ("eager", "inductor")
RESERVE_S = 3.0  # to end the processes and to print


@dataclass
class Task:
    """One process: a model under an executor.

    Attributes:
        model: Name of the case.
        executor: "eager" or "inductor".
        shares: Budgets to verify; none of them: measure the peers.
        out: Where it writes its results; what else it says goes beside it.
        process: The process, once it runs.
        rows: What it found about budgets.
        peers: What it found about other ways.
    """

    model: str
    executor: str
    shares: tuple[float, ...]
    out: Path
    process: "subprocess.Popen[bytes] | None" = None
    rows: list[Row] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)

    @property
    def said(self) -> str:
        """What it said beside its results."""
        log = self.out.with_suffix(".log")
        return log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""

    def read(self) -> None:
        """Take in what it has written."""
        self.rows, self.peers = [], []
        if not self.out.exists():
            return
        for line in self.out.read_text(encoding="utf-8").splitlines(keepends=True):
            if not line.endswith("\n"):
                continue  # it is being written
            values = json.loads(line)
            if values.pop("kind") == "Row":
                self.rows.append(Row(**values))
            else:
                self.peers.append(Peer(**values))

    def fill(self) -> None:
        """Add a row for each budget that it did not come to."""
        ended = self.process is not None and self.process.poll() is not None
        last = (self.said.splitlines() or ["it said nothing"])[-1][:300]
        why = f"its process ended: {last}" if ended else "skipped: the time was over"
        there = {row.share for row in self.rows}
        missing = [share for share in self.shares if share not in there]
        self.rows += [Row(self.model, self.executor, share, False, why) for share in missing]


def main() -> int:
    """Run everything; returns the exit status."""
    options = arguments()
    if options.worker:
        return worker(options)
    import torch  # here, so that --help needs no torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here. Try --device cpu --tiny.")
        return 1
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fxremat-acceptance-") as folder:
        tasks = plan_tasks(options, Path(folder))
        run(tasks, options, Path(folder), start_s + options.limit_s - RESERVE_S)
        for task in tasks:
            task.read()
            task.fill()
        for task in tasks:
            if task.said:
                print(f"--- {task.model}, {task.executor}: {task.said[-2000:]}")
    rows = sorted(
        (row for task in tasks for row in task.rows),
        key=lambda row: (options.models.index(row.model), row.executor, -row.share),
    )
    peers = [peer for task in tasks for peer in task.peers]
    print(report(rows, peers, place(options), "simple"))
    if options.markdown:
        Path(options.markdown).write_text(report(rows, peers, place(options), "github") + "\n")
    missed = sum(not row.ok for row in rows)
    passed_s = time.monotonic() - start_s
    print(f"{len(rows) - missed} of {len(rows)} rows hold, {missed} missed, {passed_s:.0f} s")
    return 1 if missed else 0


def plan_tasks(options: argparse.Namespace, folder: Path) -> list[Task]:
    """Which process does what; the slow ones first, the peers last."""
    tasks: list[Task] = []
    for executor in reversed(options.executors):
        size = 2 if executor == "inductor" and options.jobs > 1 else len(options.shares)
        parts = [options.shares[at : at + size] for at in range(0, len(options.shares), size)]
        tasks += [
            Task(model, executor, part, folder / f"{model}-{executor}-{number}")
            for model in options.models
            for number, part in enumerate(parts)
        ]
    for executor in options.executors:
        tasks += [
            Task(model, executor, (), folder / f"{model}-{executor}-peers")
            for model in options.models
        ]
    return tasks


def run(tasks: list[Task], options: argparse.Namespace, folder: Path, deadline_s: float) -> None:
    """Run the tasks, so many at a time, until the time is over."""
    waiting, running = list(tasks), list[Task]()
    seen: set[tuple[str, str, float]] = set()
    while (waiting or running) and time.monotonic() < deadline_s:
        while waiting and len(running) < options.jobs:
            task = waiting.pop(0)
            start(task, options, folder, deadline_s)
            running.append(task)
        time.sleep(0.2)
        running = [task for task in running if task.process and task.process.poll() is None]
        for task in tasks:
            task.read()
            for row in task.rows:
                if (row.model, row.executor, row.share) not in seen:
                    print(
                        f"{row.model} {row.executor} {row.share:g}: {row.why or 'ok'}", flush=True
                    )
                    seen.add((row.model, row.executor, row.share))
    for task in running:
        assert task.process is not None
        task.process.kill()
        task.process.wait()
        task.process = None  # it did not end by itself


def start(task: Task, options: argparse.Namespace, folder: Path, deadline_s: float) -> None:
    """Start the process of a task."""
    environment = dict(os.environ)
    cores = len(os.sched_getaffinity(0))
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(4, cores // options.jobs)))
    command = [
        sys.executable, str(Path(__file__).resolve()), "--worker", task.model, task.executor,
        "--out", str(task.out), "--device", options.device, "--budgets", text(task.shares),
        "--knob", text(options.knob), "--solve-s", str(options.solve_s),
        "--cache", str(folder / f"costs-{task.out.name}"),
        "--limit-s", str(deadline_s - time.monotonic()),
    ]  # fmt: skip
    command += ["--tiny"] if options.tiny else []
    with task.out.with_suffix(".log").open("wb") as log:
        task.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def worker(options: argparse.Namespace) -> int:
    """What each of the processes does."""
    model, executor = options.worker
    (case,) = (case for case in CASES if case.name == model)
    settings = Settings(
        options.device, options.tiny, options.shares, options.knob, options.cache,
        options.solve_s, time.monotonic() + options.limit_s,
    )  # fmt: skip
    work(case, executor, settings, Path(options.out))
    return 0


def report(rows: list[Row], peers: list[Peer], where: str, style: str) -> str:
    """The table with what is said about it."""
    heads = (
        "model", "executor", "budget MiB", "values", "predicted", "allocated", "reserved",
        "unrewritten ms", "fxremat ms", "per block ms (MiB)", "torch's knob ms (MiB, value)", "",
    )  # fmt: skip
    lines = [cells(row, peers) for row in rows]
    table = tabulate(lines, heads, tablefmt=style, disable_numparse=True)
    wrong = [f"{r.model}, {r.executor}, {r.share:g}: {r.why}" for r in rows if not r.ok]
    wrong += [f"{p.model}, {p.executor}, {p.name}: {p.why}" for p in peers if p.why]
    return "\n".join([where, "", table, "", *(f"- {line}" for line in wrong)])


def cells(row: Row, peers: list[Peer]) -> list[str]:
    """One line of the table."""
    of_model = [p for p in peers if (p.model, p.executor) == (row.model, row.executor)]
    of_model = [p for p in of_model if not p.why]
    blocks = [p for p in of_model if p.name == "per-block"]
    knobs = [p for p in of_model if p.name != "per-block" and p.peak_bytes <= row.budget_bytes]
    knob = max(knobs, key=lambda p: p.peak_bytes, default=None)
    measured = [""] * 5
    if row.predicted_bytes:
        sizes = (row.predicted_bytes, row.allocated_bytes, row.reserved_bytes)
        times = (row.baseline_s, row.step_s)
        measured = [mib(size_bytes) for size_bytes in sizes] + [f"{1e3 * t:.1f}" for t in times]
    return [
        row.model,
        row.executor,
        f"{mib(row.budget_bytes)} ({row.share:g})" if row.budget_bytes else f"({row.share:g})",
        row.values,
        *measured,
        "".join(f"{1e3 * p.step_s:.1f} ({mib(p.peak_bytes)})" for p in blocks[:1]),
        f"{1e3 * knob.step_s:.1f} ({mib(knob.peak_bytes)}, {knob.name})" if knob else "none",
        "ok" if row.ok else "MISS",
    ]


def mib(size_bytes: int) -> str:
    """Bytes for people. [MiB]"""
    return f"{size_bytes / 2**20:,.{1 if size_bytes >= 100 << 20 else 3}f}"


def place(options: argparse.Namespace) -> str:
    """Where it ran."""
    import torch

    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    return f"torch {torch.__version__} on {name}; sizes in MiB, {options.jobs} at a time"


def text(values: tuple[float, ...]) -> str:
    """Numbers for a command line."""
    return ",".join(map(repr, values))


def numbers(given: str) -> tuple[float, ...]:
    """Numbers of a command line."""
    return tuple(float(value) for value in given.split(",") if value)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--executors", nargs="+", choices=EXECUTORS, default=list(EXECUTORS))
    parser.add_argument(
        "--budgets", dest="shares", type=numbers, default=(0.9, 0.6, 0.3, 0.0),
        help="shares of the way from floor to baseline",
    )  # fmt: skip
    parser.add_argument("--knob", type=numbers, default=(0.5, 0.2), help="values of torch's knob")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--jobs", type=int, help="processes at a time; cuda: 12, cpu: 1")
    parser.add_argument("--limit-s", type=float, default=300.0, help="for everything")
    parser.add_argument("--solve-s", type=float, default=5.0, help="for the solver, per plan")
    parser.add_argument("--markdown", metavar="FILE", help="also write the table there")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.jobs = options.jobs or (12 if options.device == "cuda" else 1)
    return options


if __name__ == "__main__":
    sys.exit(main())
