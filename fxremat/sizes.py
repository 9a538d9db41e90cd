"""A symbolic graph meets new sizes: which of its schedules runs there, or which new one."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from fxremat.budget import Budget
from fxremat.options import Options
from fxremat.passes.joint import Joint
from fxremat.passes.recurrent import as_it_runs
from fxremat.passes.symbolic import Sizes, at_sizes
from fxremat.pipeline import Posed, pose
from fxremat.planning import baseline_peak_bytes
from fxremat.plans import Plan, Solution, make_plan
from fxremat.problem import RematProblem
from fxremat.progress import SOLVING, Progress
from fxremat.schedule import expand
from fxremat.simulate import Schedule, simulate


def posed_at(
    joint: Joint,
    sizes: Sizes,
    options: Options,
    *,
    resident_bytes: int,
    device: torch.device,
    name: str,
    mkldnn: bool,
) -> Posed:
    """A symbolic graph as a problem of known sizes; see ``pose``."""
    with (
        as_it_runs(mkldnn=mkldnn),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),  # as within the graph
    ):
        return pose(
            at_sizes(joint, sizes),
            options,
            resident_bytes=resident_bytes,
            device=device,
            progress=Progress(options.progress),
            name=name,
        )


def plan_at(
    problem: RematProblem,
    options: Options,
    known: Iterable[Plan],
    choose: Callable[..., Plan],
) -> Plan:
    """Plan a step at its sizes: by the cheapest schedule at hand that fits, else by a new one.

    Args:
        problem: The step at its sizes.
        options: With the budget.
        known: Plans of the same step at other sizes.
        choose: Makes a new plan.

    Returns:
        The plan.

    Raises:
        InfeasibleBudgetError: These sizes do not fit into the budget.
    """
    budget_bytes = options.budget.resolve(baseline_peak_bytes(problem))
    schedules = [expand(problem, problem.candidates)]
    schedules += [plan.schedule for plan in known if alike(plan.problem, problem)]
    fitting = [s for s in dict.fromkeys(schedules) if _fits(problem, s, budget_bytes)]
    if fitting:
        cheapest = min(fitting, key=lambda s: simulate(problem, s).recompute_ns)
        solver = "save_all" if cheapest is schedules[0] else "planned for other sizes"
        return make_plan(problem, budget_bytes, Solution(cheapest), solver=solver)
    with Progress(options.progress).stage(SOLVING):
        return choose(
            problem,
            Budget(budget_bytes),
            solver=options.solver,
            time_limit_s=options.time_limit_s,
        )


def _fits(problem: RematProblem, schedule: Schedule, budget_bytes: int) -> bool:
    return simulate(problem, schedule).peak_bytes <= budget_bytes


def runs(one: Plan, other: Plan) -> bool:
    """Does the code of one plan run the other?"""
    return one.schedule == other.schedule and alike(one.problem, other.problem)


def alike(one: RematProblem, other: RematProblem) -> bool:
    """Do two problems differ in sizes and costs only, so that a schedule of one runs the other?"""
    return _shape(one) == _shape(other)


def _shape(problem: RematProblem) -> RematProblem:
    """A problem without its numbers."""
    return replace(
        problem,
        storages=tuple(replace(s, size_bytes=0) for s in problem.storages),
        operations=tuple(replace(o, cost_ns=0, workspace_bytes=0) for o in problem.operations),
        replays=tuple(replace(r, cost_ns=0, workspace_bytes=0) for r in problem.replays),
        resident_bytes=0,
        copied_bytes=0,
        unrewritten_peak_bytes=0,
    )
