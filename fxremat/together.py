"""One plan for all the pieces of a call, made when the call has shown which they are.

In the first call each piece keeps as little as it can. Then the sequence is known: the pieces are
joined to one problem, one plan is made for it, and each piece takes its part of that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fxremat.errors import InfeasibleBudgetError
from fxremat.joining import join
from fxremat.options import Options
from fxremat.passes.seeding import tensors_in
from fxremat.passes.storages import round_up
from fxremat.pieces import Ends, Joined, Link, Place
from fxremat.planning import baseline_peak_bytes, floor_plan, make, make_lean
from fxremat.plans import Plan, Solution, make_plan
from fxremat.problem import Kind, RematProblem
from fxremat.records import GraphRecord
from fxremat.simulate import Schedule, simulate

LITTLE_NOTE = (
    "Each piece keeps as little as it can: this kind of call is new, or a new piece did not fit "
    "beside a plan of the others. Under a percentage such a call has no limit."
)
_CLOSE = 256  # the least budget is searched until no more than this part of the way is open


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor that went into a graph or came out of it.

    Attributes:
        position: Which argument or output; -1 for what is held besides.
        key: Of its storage; no other has it while the tensor is seen.
        size_bytes: Of its storage, on the step's device. [bytes]
        alive: Keeps the key from being used again.
    """

    position: int
    key: int
    size_bytes: int
    alive: Any


def seen(values: Iterable[Any], device: torch.device, *, numbered: bool = True) -> list[Seen]:
    """The storages behind values that are tensors on a device."""
    found = []
    for position, value in enumerate(values):
        if (
            isinstance(value, torch.Tensor)
            and value.layout is torch.strided
            and value.device == device
        ):
            alive = StorageWeakRef(value.untyped_storage())
            size_bytes = round_up(value.untyped_storage().nbytes(), device)
            found.append(Seen(position if numbered else -1, alive.cdata, size_bytes, alive))
    return found


def storages_in(output: Any) -> list[Seen]:
    """The storages behind the tensors of an output, however it is packed."""
    tensors = tensors_in(output)
    return [one for tensor in tensors for one in seen([tensor], tensor.device)]


@dataclass
class Call:
    """What one call has run so far.

    Attributes:
        ran: Its graphs, in order.
        pieces: Those of them that have a backward.
        links: What they handed to one another.
        made: Storage -> the output that it was.
        external_bytes: Storage -> its bytes, of what no graph of the call made. [bytes]
        returned: Outputs that the caller got; None where nobody tells.
        existing_bytes: Gradients that it found. [bytes]
    """

    ran: list[GraphRecord] = field(default_factory=list)
    pieces: list[GraphRecord] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    made: dict[int, Place] = field(default_factory=dict)
    external_bytes: dict[int, int] = field(default_factory=dict)
    returned: frozenset[Place] | None = None
    existing_bytes: int = 0
    _alive: list[Any] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, ...]:
        """Which pieces, in order."""
        return tuple(record.key for record in self.pieces)

    def passed(
        self, record: GraphRecord, arguments: Iterable[Seen], outputs: Iterable[Seen]
    ) -> None:
        """A piece has run forward."""
        position, ends = len(self.pieces), record.ends
        self.pieces.append(record)
        for seen in arguments:
            self._alive.append(seen.alive)
            maker = self.made.get(seen.key)
            if maker is not None and ends is not None and 0 <= seen.position < len(ends.inputs):
                self.links.append(Link(*maker, position, seen.position))
            elif maker is None:
                self.external_bytes[seen.key] = seen.size_bytes
        for seen in outputs:
            self._alive.append(seen.alive)
            if seen.key not in self.external_bytes and ends is not None:
                self.made.setdefault(seen.key, (position, seen.position))

    def leave(self, keys: Iterable[int]) -> None:
        """The call has returned tensors of these storages."""
        found = {self.made[key] for key in keys if key in self.made}
        self.returned = frozenset(found)
        self._alive.clear()


@dataclass
class Together:
    """The pieces of one kind of call with their plan.

    Attributes:
        records: The pieces.
        joined: They as one problem.
        record: The plan of all of them as that of one graph, for the report.
        waits: They keep as little as they can until this kind of call comes again.
    """

    records: tuple[GraphRecord, ...]
    joined: Joined
    record: GraphRecord
    waits: bool = False

    @property
    def keys(self) -> set[int]:
        """The numbers of its pieces."""
        return {record.key for record in self.records}

    def mixed(self, chosen: dict[int, Schedule]) -> Schedule | None:
        """The joint schedule where some pieces follow other ones."""
        return self.joined.compose([chosen.get(r.key, r.plan.schedule) for r in self.records])


def together(
    call: Call, options: Options, others: Sequence[Together], *, little: bool = False
) -> Together | None:
    """Plan all pieces of a call and let each take its part from the next forward on.

    Args:
        call: A call that has ended.
        options: How to solve, and the budget.
        others: Other kinds of call that were planned before; they may share pieces.
        little: Each piece goes on keeping as little as it can.

    Returns:
        The plan; None where the pieces cannot be joined.

    Raises:
        InfeasibleBudgetError: A percentage of the baseline turned out to be too little.
    """
    records = tuple(call.pieces)
    joined = _join(call)
    if joined is None:
        return None
    budget_bytes = options.budget.resolve(baseline_peak_bytes(joined.problem))
    lean = _lean(records, joined, budget_bytes)
    plan = lean if little and lean is not None else None
    plan = plan or _plan(joined.problem, budget_bytes, lean, options)
    found = Together(records, joined, _record(records, plan, call, options))
    if plan is lean or not _take(found, joined.divide(plan.schedule), others):
        if lean is None:
            return None
        found.record.replan(lean, found.record.piece)
        keep_little(found)
        for other in others:
            if other.keys & set(call.key):
                keep_little(other)
    return found


def _plan(problem: RematProblem, budget_bytes: int, lean: Plan | None, options: Options) -> Plan:
    """The plan of all, or the lean one where no other was found."""
    try:
        return make(problem, budget_bytes, solver=options.solver, time_limit_s=options.time_limit_s)
    except InfeasibleBudgetError:
        if lean is None or lean.peak_bytes > budget_bytes:
            raise
        return lean


def _lean(records: Sequence[GraphRecord], joined: Joined, budget_bytes: int) -> Plan | None:
    """The plan in which each piece keeps as little as it can."""
    schedule = joined.compose([record.first for record in records])
    if schedule is None:
        return None
    return make_plan(joined.problem, budget_bytes, Solution(schedule), solver="lean")


def _take(found: Together, schedules: Sequence[Schedule], others: Sequence[Together]) -> bool:
    """Let the pieces follow a plan, if they can, and if all kinds of call then fit."""
    chosen = {r.key: schedule for r, schedule in zip(found.records, schedules, strict=True)}
    if any(record.adopt is None for record in found.records):
        return False
    for other in others:
        if chosen.keys() & other.keys:
            schedule = other.mixed(chosen)
            if schedule is None or _above(other, schedule):
                return False
    _follow(found, schedules)
    return True


def _above(other: Together, schedule: Schedule) -> bool:
    peak_bytes = simulate(other.joined.problem, schedule).peak_bytes
    return peak_bytes > other.record.plan.budget_bytes


def keep_little(found: Together) -> None:
    """Let each piece keep as little as it can, as in the first call."""
    if len(found.records) > 1 and LITTLE_NOTE not in found.record.notes:
        found.record.notes += (LITTLE_NOTE,)
    lean = _lean(found.records, found.joined, found.record.plan.budget_bytes)
    if lean is not None:
        found.record.replan(lean, found.record.piece)
    _follow(found, [record.first for record in found.records])


def _follow(found: Together, schedules: Sequence[Schedule]) -> None:
    """Let each piece know its schedule, and what the pieces before it hold."""
    earlier_bytes = 0
    for record, schedule in zip(found.records, schedules, strict=True):
        if record.adopt is not None and schedule != record.plan.schedule:
            record.adopt(schedule)
        resident_bytes = found.joined.problem.resident_bytes + earlier_bytes
        part = replace(record.plan.problem, resident_bytes=resident_bytes)
        asked = found.record.plan
        plan = make_plan(part, asked.budget_bytes, Solution(schedule), solver=asked.solver)
        others = replace(record.piece, others_bytes=earlier_bytes, earlier_bytes=earlier_bytes)
        record.replan(plan, others)
        earlier_bytes += record.held_bytes


def _join(call: Call) -> Joined | None:
    """The pieces of a call as one problem."""
    ends = [record.ends for record in call.pieces if record.ends is not None]
    if len(ends) < len(call.pieces):
        return None
    parts = [record.plan.problem for record in call.pieces]
    links = [
        link
        for link in call.links
        if _is_made(parts[link.maker], ends[link.maker], link.output)
        and ends[link.reader].inputs[link.argument] >= 0
    ]
    linked = frozenset((link.maker, link.output) for link in links)
    returned = linked if call.returned is None else call.returned
    constant_bytes = sum(record.constant_bytes for record in call.pieces)
    resident_bytes = sum(call.external_bytes.values()) + call.pieces[0].piece.fixed_bytes
    return join(parts, ends, links, returned, resident_bytes=resident_bytes + constant_bytes)


def _is_made(part: RematProblem, ends: Ends, output: int) -> bool:
    """Is an output memory that the piece itself made?"""
    g = ends.outputs[output] if output < len(ends.outputs) else -1
    return g >= 0 and part.storages[g].kind is Kind.VALUE


def _record(
    records: Sequence[GraphRecord], plan: Plan, call: Call, options: Options
) -> GraphRecord:
    """All pieces as one graph, for the report."""
    notes = tuple(dict.fromkeys(note for record in records for note in record.notes))
    if len(records) > 1:
        notes += (f"{len(records)} pieces between graph breaks share one budget and one plan.",)
    return GraphRecord(
        plan,
        sum(record.trace_s for record in records),
        sum(record.profile_s for record in records),
        notes,
        replace(records[0].piece, existing_bytes=call.existing_bytes),
        find_floor_bytes=lambda: least_bytes(records, plan.problem, options),
    )


def least_bytes(records: Sequence[GraphRecord], problem: RematProblem, options: Options) -> int:
    """The least budget under which a first call passes, and all later ones. [bytes]"""
    low_bytes = floor_plan(problem).peak_bytes
    if len(records) == 1 or _passes(records, low_bytes, options):
        return low_bytes
    high_bytes = max(baseline_peak_bytes(problem), low_bytes + 1)
    while not _passes(records, high_bytes, options):
        low_bytes, high_bytes = high_bytes, 2 * high_bytes
    close_bytes = max(1, (high_bytes - low_bytes) // _CLOSE)
    while high_bytes - low_bytes > close_bytes:
        middle_bytes = (low_bytes + high_bytes) // 2
        if _passes(records, middle_bytes, options):
            high_bytes = middle_bytes
        else:
            low_bytes = middle_bytes
    return high_bytes


def _passes(records: Sequence[GraphRecord], budget_bytes: int, options: Options) -> bool:
    """Would a first call pass, in which each piece keeps as little as it can?"""
    held_bytes, behind_bytes = 0, sum(record.piece.gradient_bytes for record in records)
    given_bytes = max(record.given_alone_bytes for record in records)  # see ``check_pieces``
    budget = replace(options.budget, bytes_=budget_bytes, fraction=None)
    for record in records:
        behind_bytes -= record.piece.gradient_bytes
        resident_bytes = record.alone_bytes + held_bytes
        part = replace(record.plan.problem, resident_bytes=resident_bytes)
        try:
            plan = make_lean(part, budget, time_limit_s=options.time_limit_s)
        except InfeasibleBudgetError:
            return False
        more_bytes = behind_bytes - record.outside_bytes + given_bytes - record.given_alone_bytes
        if plan.peak_bytes + more_bytes > budget_bytes:
            return False
        held_bytes += replace(record, plan=plan).held_bytes
    return True
