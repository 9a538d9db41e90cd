"""The whole way from a joint graph to the two graphs that run.

capture -> analyse -> price -> place -> extract -> solve -> simulate -> rewrite -> split. Each stage
is a pure function on frozen data; this is the one partition function behind every way in: our own
backend, ``torch.compile(backend="fxremat")`` and Inductor's ``custom_partitioner_fn``.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import networkx
import ortools
import torch
from torch import fx

from fxremat.budget import Budget
from fxremat.costtable import CostTable
from fxremat.options import Options
from fxremat.passes.calls import call_of
from fxremat.passes.costcache import default_cache_dir
from fxremat.passes.costs import OpCall, cost_key, measure_costs, uniform_costs
from fxremat.passes.extract import Analysis, analyse, calls, extract
from fxremat.passes.joint import Joint, is_tangent
from fxremat.passes.merge import merge_equal
from fxremat.passes.place import place
from fxremat.passes.rewrite import rewrite
from fxremat.passes.roofline import roofline_costs
from fxremat.passes.split import Split, split
from fxremat.passes.storages import is_held_by_caller
from fxremat.passes.strides import with_real_strides
from fxremat.planning import UNLIMITED, baseline_peak_bytes, make, save_all_peak_bytes
from fxremat.plans import Plan
from fxremat.problem import RematProblem
from fxremat.progress import PROFILING, SOLVING, Progress
from fxremat.simulate import Schedule, simulate
from fxremat.solvers.block import block

_ROUNDS = 4  # of measuring, until all strides are right
VERSIONS = (
    ("networkx", networkx.__version__),
    ("ortools", ortools.__version__),
    ("torch", str(torch.__version__)),
)
CACHE_DIR = default_cache_dir()


@dataclass(frozen=True)
class Planned:
    """A joint graph with its plan.

    Attributes:
        graphs: The forward and the backward that run.
        plan: What they follow.
        analysis: Of the joint graph.
        profile_s: Time to price the operations. [s]
        decomposed: The graphs use only operators that Inductor does not decompose.
    """

    graphs: Split
    plan: Plan
    analysis: Analysis
    profile_s: float
    decomposed: bool = False


def partition(
    joint: Joint,
    budget: Budget,
    options: Options,
    *,
    resident_bytes: int,
    device: torch.device,
    name: str = "",
    choose: "Callable[..., Plan]" = make,
) -> Planned:
    """Plan a joint graph and divide it.

    Args:
        joint: The joint graph; it is left as it was.
        budget: What may be held.
        options: How to price and to solve.
        resident_bytes: Held throughout besides the graph's constants. [bytes]
        device: Where the step runs.
        name: What it is, for people.
        choose: Makes the plan: ``make``, or ``make_lean`` for one of several that share a budget.

    Returns:
        Both graphs and the plan.

    Raises:
        FxrematError: The graph cannot be planned, or not within the budget.
    """
    progress = Progress(options.progress)
    posed = pose(
        joint, options, resident_bytes=resident_bytes, device=device, progress=progress, name=name
    )
    problem = posed.problem
    with progress.stage(SOLVING):
        plan = choose(problem, budget, solver=options.solver, time_limit_s=options.time_limit_s)
    graphs = written(posed, plan, options)
    inductor = options.executor == "inductor"
    return Planned(graphs, plan, posed.analysis, posed.profile_s, inductor)


def rewritten(planned: Planned, schedule: Schedule) -> Split:
    """Both graphs under another schedule of the same problem."""
    problem, analysis = planned.plan.problem, planned.analysis
    return split(rewrite(analysis, problem, schedule, decomposed=planned.decomposed))


@dataclass(frozen=True)
class Posed:
    """A joint graph as a problem.

    Attributes:
        problem: The problem.
        analysis: Of the graph that the problem is of, with equal operations merged.
        profile_s: Time to price the operations. [s]
    """

    problem: RematProblem
    analysis: Analysis
    profile_s: float


def written(posed: Posed, plan: Plan, options: Options) -> Split:
    """Both graphs under a plan of a problem."""
    inductor = options.executor == "inductor"
    return split(rewrite(posed.analysis, posed.problem, plan.schedule, decomposed=inductor))


def pose(
    joint: Joint,
    options: Options,
    *,
    resident_bytes: int,
    device: torch.device,
    progress: Progress,
    name: str = "",
) -> Posed:
    """Analyse a joint graph, price its operations and state its problem."""
    start_s = time.perf_counter()
    original, table, sure = priced(joint, options, device, progress)
    joint = original.joint
    # Inductor decides about buffers itself, and what lies otherwise than said cannot be written to.
    reuse = options.executor == "eager" and sure
    profile_s = time.perf_counter() - start_s

    def state(analysis: Analysis) -> RematProblem:
        problem = extract(
            analysis,
            lambda call: table[cost_key(call)],
            outputs_held=options.outputs == "held",
            resident_bytes=resident_bytes + _constant_bytes(analysis),
            replayable=options.replayable,
        )
        return replace(
            problem,
            in_flight=options.in_flight,
            costs=table.kind,
            device=str(device),
            name=name,
            versions=VERSIONS,
        )

    unrewritten = state(original)
    merged = merge_equal(original)
    if merged is joint and not reuse:
        return Posed(unrewritten, original, profile_s)
    analysis = analyse(merged, reuse=reuse)
    problem = state(analysis)
    ordered = place(original if merged is joint else analyse(merged)) if reuse else merged
    if ordered is not merged:
        placed = analyse(ordered, reuse=True)
        again = state(placed)
        if holds_no_more(again, problem):
            analysis, problem = placed, again
    peak_bytes = baseline_peak_bytes(unrewritten)
    return Posed(replace(problem, unrewritten_peak_bytes=peak_bytes), analysis, profile_s)


def holds_no_more(placed: RematProblem, problem: RematProblem) -> bool:
    """Is one order of the backward as good as the other, for plans that save all and little?"""

    def peaks(posed: RematProblem) -> tuple[int, int]:
        little = block(posed, UNLIMITED, time_limit_s=1.0).schedule
        assert little is not None  # no budget is too small for it
        return save_all_peak_bytes(posed), simulate(posed, little).peak_bytes

    return all(new <= old for new, old in zip(peaks(placed), peaks(problem), strict=True))


def priced(
    joint: Joint, options: Options, device: torch.device, progress: Progress
) -> tuple[Analysis, CostTable, bool]:
    """Analyse a graph and price its calls, until its strides are those that the kernels make.

    Returns:
        The analysis, the costs, and whether the strides are known to be right.
    """
    real: Joint | None = with_real_strides(joint)
    joint = real or joint
    for _ in range(_ROUNDS):
        analysis = analyse(joint)
        wanted = calls(analysis)
        with progress.stage(PROFILING, total=len({cost_key(call) for call in wanted})) as stage:
            table = price(wanted, options, device, _room_bytes(options, device), stage.advance)
        if real is None or options.executor != "eager":  # Inductor lays things out by itself
            break
        real = with_real_strides(joint, partial(_lies, analysis, table))
        if real is None or real is joint:
            break
        joint = real
    return analysis, table, real is joint


def _lies(analysis: Analysis, table: CostTable, node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """How the results of an operation lay when it was measured."""
    if node.name not in analysis.reads:
        return ()
    key = cost_key(call_of(node))
    return table[key].strides if key in table else ()


def price(
    wanted: Sequence[OpCall],
    options: Options,
    device: torch.device,
    room_bytes: int | None,
    advance: Callable[[], None],
) -> CostTable:
    """Costs of calls, from where the options say."""
    if isinstance(options.costs, CostTable):
        return options.costs
    if device.type == "cuda" and not torch.cuda.is_available():
        return uniform_costs(wanted) if options.costs == "uniform" else roofline_costs(wanted)
    measured = measure_costs(
        wanted,
        room_bytes=room_bytes,
        cache_dir=cache_dir(options),
        progress=lambda done, total: advance(),
    )
    if options.costs == "measured":
        return measured
    chosen = uniform_costs(wanted) if options.costs == "uniform" else roofline_costs(wanted)
    return with_workspaces(chosen, measured)


def with_workspaces(chosen: CostTable, measured: CostTable) -> CostTable:
    """The times of one table with the workspaces of another: bytes are never a matter of taste."""
    costs = {key: replace(measured[key], cost_ns=chosen[key].cost_ns) for key in chosen}
    return replace(chosen, costs=costs)


def cache_dir(options: Options) -> Path | None:
    """Where costs are kept between runs; None for nowhere."""
    if options.cache_dir is False:
        return None
    if options.cache_dir in (None, True):
        return CACHE_DIR
    try:
        return Path(str(options.cache_dir)).expanduser()
    except RuntimeError:  # nobody is called so
        return Path(str(options.cache_dir))


def _room_bytes(options: Options, device: torch.device) -> int | None:
    """What profiling may hold: the budget less what is held already; None for no limit. [bytes]"""
    if device.type != "cuda" or options.budget.bytes_ is None:
        return None
    return max(0, options.budget.bytes_ - torch.cuda.memory_allocated(device))


def _constant_bytes(analysis: Analysis) -> int:
    """Tensors that the graph itself carries. [bytes]"""
    nodes, table = analysis.nodes, analysis.storages
    return sum(
        size_bytes
        for owner, size_bytes in zip(table.owner, table.size_bytes, strict=True)
        if nodes[owner].op == "get_attr" and is_held_by_caller(nodes[owner])
    )


def tangents(analysis: Analysis) -> list[tuple[str, int]]:
    """Tangents in order, described as ``1 (float32[8, 128])``, with their bytes. [bytes]"""
    table = analysis.storages
    found = []
    for node in analysis.joint.graph.find_nodes(op="placeholder"):
        if not is_tangent(node):
            continue
        name, value = node.name.removeprefix("tangents_"), node.meta.get("val")
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            name = f"{name} ({dtype}{list(value.shape)})"
        found.append((name, sum(table.size_bytes[g] for g in table.creates[node.name])))
    return found
