"""What a plan decided about each value, and why, in rows for people."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from fxremat.plans import Plan
from fxremat.problem import Operation, RematProblem


@dataclass(frozen=True, slots=True)
class Decision:
    """One value of the forward that the plan keeps or makes again.

    Attributes:
        value: Name of the fx node that owns the storage.
        source: The user's line that made it, ``file.py:12``, if known.
        module: Path of the module that made it, if known.
        bytes: Bytes of its storage. [bytes]
        cost_ns: Saved: time to make it once more. Recomputed: time that the plan spends on making
            it again; an operation that makes several values counts with the first of them, so
            that these add up. In calls where the costs are "uniform". [ns]
        decision: Saved for the backward, or recomputed in it.
        reason: Why, for people.
        operator: The operator that makes it, such as ``aten.addmm.default``.
        freed_bytes: Recomputed: bytes that the plan need not keep from forward to backward, which
            saving everything would. [bytes]
    """

    value: str
    source: str
    module: str
    bytes: int
    cost_ns: int
    decision: Literal["save", "recompute"]
    reason: str
    operator: str = ""
    freed_bytes: int = 0


def decisions(plan: Plan) -> tuple[Decision, ...]:
    """What the plan does with each value that could be saved.

    Args:
        plan: The plan.

    Returns:
        A row for each candidate, in graph order. Values that this plan neither keeps nor makes
        again are left out: only replays that it does without would have read them.
    """
    problem = plan.problem
    saved = set(plan.simulation.saved)
    times, cost_ns = _replayed(plan)
    read_directly = {g for operation in problem.backward for g in operation.reads}
    held_anyway = set(problem.outputs) if problem.outputs_held else set()
    rows: list[Decision] = []
    for g in problem.candidates:
        operation = problem.operations[problem.storages[g].producer]
        if g in saved:
            reason = _why_saved(problem, g, g in held_anyway)
            if times[g]:
                reason += f"; made again later, {_times(times[g])}"
            once_ns = min(
                (problem.replays[r].cost_ns for r in problem.replays_of.get(g, ())), default=0
            )
            row = _row(problem, g, operation, once_ns or operation.cost_ns, "save", reason)
        elif times[g]:
            freed = problem.storages[g].size_bytes
            freed *= g in read_directly and g not in held_anyway
            reason = (
                "not kept for the backward" if freed else "made again on the way to other values"
            )
            if times[g] > 1:
                reason += f"; {_times(times[g])}"
            row = _row(problem, g, operation, cost_ns[g], "recompute", reason, freed)
        else:
            continue
        rows.append(row)
    return tuple(rows)


def _replayed(plan: Plan) -> tuple[Counter[int], Counter[int]]:
    """For each storage: how often it is made again, and the time spent on that [ns]."""
    times: Counter[int] = Counter()
    cost_ns: Counter[int] = Counter()
    candidates = set(plan.problem.candidates)
    for step in plan.schedule.backward:
        made = [g for g in step.keeps if g in candidates]  # the others, nothing reads
        if step.replay >= 0 and made:
            times.update(made)
            cost_ns[made[0]] += plan.problem.replays[step.replay].cost_ns
    return times, cost_ns


def _row(
    problem: RematProblem,
    g: int,
    operation: Operation,
    cost_ns: int,
    decision: Literal["save", "recompute"],
    reason: str,
    freed_bytes: int = 0,
) -> Decision:
    return Decision(
        value=problem.storages[g].name,
        source=operation.source,
        module=operation.module,
        bytes=problem.storages[g].size_bytes,
        cost_ns=cost_ns,
        decision=decision,
        reason=reason,
        operator=operation.target,
        freed_bytes=freed_bytes,
    )


def _why_saved(problem: RematProblem, g: int, held_anyway: bool) -> str:
    storage = problem.storages[g]
    if storage.lazy:
        return "a random operator is replayed from it"
    if held_anyway:
        return "the caller holds it anyway"
    if g not in problem.replays_of:
        return problem.operations[storage.producer].why_saved or "there is no way to make it again"
    return "fits the budget"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
