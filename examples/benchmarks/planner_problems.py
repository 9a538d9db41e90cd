"""Captures the planner's benchmark problems once, and says how large each is.

The models are built of fake tensors and traced on the CPU; nothing of them runs. Operations are
priced on paper, by the arithmetic and the bytes of a usual accelerator: such problems repeat
exactly on every machine. Workspaces are unknown to paper and count as 0. A problem that is in the
folder already is loaded.

    python examples/benchmarks/planner_problems.py
    python examples/benchmarks/planner_problems.py --folder problems --only gpt2-12 random-1000
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from planner_models import MODELS, REAL, Step
from planner_random import random_problem
from tabulate import tabulate
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import fxremat
from fxremat.capturing import Captured
from fxremat.install import Installed
from fxremat.options import make_options
from fxremat.passes.extract import analyse, calls
from fxremat.passes.recurrent import as_it_runs
from fxremat.passes.roofline import CUDA, roofline_costs
from fxremat.passes.strides import with_real_strides
from fxremat.pipeline import CACHE_DIR, pose
from fxremat.planning import UNLIMITED, baseline_peak_bytes
from fxremat.problem import RematProblem
from fxremat.progress import Progress
from fxremat.trace import Trace

MIB = 1024**2
RANDOM: dict[str, Callable[[], RematProblem]] = {
    f"random-{n}": partial(random_problem, n) for n in (100, 500, 1000, 2000, 5000)
}
NAMES = (*RANDOM, *MODELS)
HEADERS = (
    "problem", "joint nodes", "operations", "forward", "candidates", "replays", "step ms",
    "baseline MiB", "resident MiB", "tracing CPU s", "posing CPU s",
)  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What a problem does not say of its own capture.

    Attributes:
        nodes: Of the joint graph; 0 where there is none.
        trace_s: From the call to the joint graph, without building the model. [CPU s]
        pose_s: From there to the problem. [CPU s]
    """

    nodes: int = 0
    trace_s: float = 0.0
    pose_s: float = 0.0


class _Found(Captured):
    """A problem, with the size of its joint graph and when that was there. [CPU s]"""

    def __init__(self, problem: RematProblem, nodes: int, traced_s: float) -> None:
        super().__init__(problem)
        self.nodes, self.traced_s = nodes, traced_s


class _OnPaper(Trace):
    """A trace that ends with the problem, priced for an accelerator that need not be there."""

    def partition(
        self,
        module: fx.GraphModule,
        _inputs: object,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        traced_s = time.process_time()
        nodes = len(module.graph.nodes)
        joint = self.joint(module, num_fwd_outputs)
        with as_it_runs(mkldnn=self.mkldnn):
            wanted = calls(analyse(with_real_strides(joint) or joint))
            table = roofline_costs(wanted, machine=CUDA)
            posed = pose(
                joint,
                replace(self.session.options, costs=table),
                resident_bytes=self.resident_bytes,
                device=self.device,
                progress=Progress(False),
            )
        raise _Found(posed.problem, nodes, traced_s)


def captured(step: Step, name: str = "") -> tuple[RematProblem, Facts]:
    """Trace a step to a problem with costs on paper.

    Args:
        step: What to trace; nothing of it runs.
        name: Of the problem.

    Returns:
        The problem, and what it does not say of itself.
    """
    module = step.module
    options = make_options(UNLIMITED, {"progress": False})
    installed = Installed(module._call_impl, module, options, trace=_OnPaper)
    start_s = time.process_time()  # other processes do not count
    try:
        installed(*step.args, **step.kwargs)
    except _Found as found:
        pose_s = time.process_time() - found.traced_s
        facts = Facts(found.nodes, found.traced_s - start_s, pose_s)
        return replace(found.problem, name=name), facts
    raise RuntimeError(f"{name or 'this step'} has nothing to differentiate")


def made(name: str) -> tuple[RematProblem, Facts]:
    """Make one of the problems."""
    if name in RANDOM:
        return RANDOM[name](), Facts()
    torch._dynamo.reset()
    with contextlib.nullcontext() if name in REAL else FakeTensorMode():
        torch.manual_seed(0)
        return captured(MODELS[name](), name)


def problem_of(name: str, folder: Path) -> tuple[RematProblem, Facts]:
    """Load a problem from the folder; if it is not there, make and save it first."""
    path, beside = folder / f"{name}.json", folder / f"{name}.facts"
    if not path.exists():
        problem, facts = made(name)
        folder.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps([facts.nodes, facts.trace_s, facts.pose_s]), encoding="utf-8")
        problem.save(path)
    known = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else ()
    return fxremat.load(path), Facts(*known)


def row(name: str, problem: RematProblem, facts: Facts) -> tuple[object, ...]:
    """One line of the table."""
    return (
        name,
        f"{facts.nodes:,}" if facts.nodes else "",
        f"{len(problem.operations):,}",
        f"{problem.num_forward:,}",
        f"{len(problem.candidates):,}",
        f"{len(problem.replays):,}",
        f"{problem.step_ns / 1e6:,.2f}",
        f"{baseline_peak_bytes(problem) / MIB:,.1f}",
        f"{problem.resident_bytes / MIB:,.1f}",
        f"{facts.trace_s:.1f}",
        f"{facts.pose_s:.1f}",
    )


def problem_options(about: str | None) -> argparse.ArgumentParser:
    """A command line that names problems and their folder."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    folder = None if CACHE_DIR is None else CACHE_DIR / "problems"
    parser.add_argument(
        "--folder", type=Path, default=folder, required=folder is None, help="of the problems"
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what is missing and print the table."""
    options = problem_options(__doc__).parse_args(arguments)
    rows = []
    for name in options.only:
        rows.append(row(name, *problem_of(name, options.folder)))
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print(tabulate(rows, HEADERS, disable_numparse=True, colalign=("left", *["right"] * 10)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
