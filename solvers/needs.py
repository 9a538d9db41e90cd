"""Who reads what, and when: the tables that all solvers work from.

A *position* is a place in the backward's order: 0 for its first operation, ``num_positions`` for
the moment after its last. Nothing here simulates a schedule; the simulator stays the referee.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from fxremat.problem import Kind, RematProblem


@dataclass(frozen=True)
class Needs:
    """Reads of one problem, and the bytes that no choice changes.

    Attributes:
        num_positions: Number of backward operations.
        candidates: Storages that can be saved, in order; held outputs are not among them.
        kept: Storages that every plan keeps: no replay makes them and the backward reads them, or
            the caller holds them anyway.
        positions: Storage -> positions that read it, in order.
        consumers: Storage -> replays that read it, in order.
        fixed_bytes: At each position, and after the last, what the backward holds whatever is
            saved: resident bytes, tangents, held outputs, its own results and workspaces. [bytes]
        entry_bytes: The same between forward and backward. [bytes]
        held_bytes: Outputs that the caller holds, of one forward. [bytes]
        forward_bytes: While each forward operation runs, what the forward alone holds. [bytes]
        forward_last: Storage -> last forward operation that reads it, or makes it.
        optional: Forward operations whose results only the backward reads; they need not run there
            when they are replayed.
    """

    num_positions: int
    candidates: tuple[int, ...]
    kept: frozenset[int]
    positions: dict[int, tuple[int, ...]]
    consumers: dict[int, tuple[int, ...]]
    fixed_bytes: tuple[int, ...]
    entry_bytes: int
    held_bytes: int
    forward_bytes: tuple[int, ...]
    forward_last: dict[int, int]
    optional: tuple[int, ...]

    def first(self, g: int) -> int:
        """First position that reads ``g``; after all of them when none does."""
        found = self.positions.get(g)
        return found[0] if found else self.num_positions + 1

    def last(self, g: int) -> int:
        """Last position that reads ``g``; -1 when none does."""
        found = self.positions.get(g)
        return found[-1] if found else -1


@lru_cache(maxsize=8)
def _find_needs(key: "Same") -> Needs:
    problem = key.problem
    number = len(problem.operations) - problem.num_forward
    positions: dict[int, list[int]] = {}
    for position, operation in enumerate(problem.backward):
        for g in operation.reads:
            positions.setdefault(g, []).append(position)
    for g in problem.gradients:
        positions.setdefault(g, []).append(number)
    consumers: dict[int, list[int]] = {}
    for index, replay in enumerate(problem.replays):
        for g in replay.reads:
            consumers.setdefault(g, []).append(index)

    outputs = {g for g in problem.outputs if problem.storages[g].kind is Kind.VALUE}
    updates = {g for g in problem.updates if problem.storages[g].kind is Kind.VALUE}
    held = outputs if problem.outputs_held else set()
    candidates = [g for g in _forward_values(problem) if g in positions or g in consumers]
    kept = {g for g in candidates if g in positions and g not in problem.replays_of}
    fixed, entry = _backward_bytes(problem, positions, held)
    optional = _optional(problem)
    flight_bytes = (problem.in_flight - 1) * sum(problem.storages[g].size_bytes for g in held)
    forward, last = _forward_bytes(problem, set(optional), outputs | updates, flight_bytes)
    return Needs(
        num_positions=number,
        candidates=tuple(g for g in candidates if g not in held),
        kept=frozenset(kept | held),
        positions={g: tuple(found) for g, found in positions.items()},
        consumers={g: tuple(found) for g, found in consumers.items()},
        fixed_bytes=tuple(fixed),
        entry_bytes=entry,
        held_bytes=sum(problem.storages[g].size_bytes for g in held),
        forward_bytes=tuple(forward),
        forward_last=last,
        optional=optional,
    )


class Same:
    """A problem as a key: the same object only, since hashing a problem reads all of it."""

    def __init__(self, problem: RematProblem) -> None:
        self.problem = problem

    def __hash__(self) -> int:
        return id(self.problem)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.problem is self.problem


def find_needs(problem: RematProblem) -> Needs:
    """Tabulate who reads what.

    Args:
        problem: The step.

    Returns:
        The tables; found once for each problem.
    """
    return _find_needs(Same(problem))


def _forward_values(problem: RematProblem) -> Iterable[int]:
    """Storages that the forward makes."""
    return (
        g
        for g, storage in enumerate(problem.storages)
        if storage.kind is Kind.VALUE and storage.producer < problem.num_forward
    )


def _backward_bytes(
    problem: RematProblem, positions: dict[int, list[int]], held: set[int]
) -> tuple[list[int], int]:
    """What the backward holds of its own at each position, and before the first."""
    number = len(problem.operations) - problem.num_forward
    change = [0] * (number + 2)
    base = problem.resident_bytes
    base += problem.in_flight * sum(problem.storages[g].size_bytes for g in held)
    tangent = 0
    for g, storage in enumerate(problem.storages):
        if storage.kind is Kind.TANGENT:
            tangent += storage.size_bytes
            change[0] += storage.size_bytes  # freed after its last use, or never
            last = number if storage.held else positions.get(g, [number - 1])[-1]
            change[last + 1] -= storage.size_bytes
        elif storage.producer >= problem.num_forward:
            born = storage.producer - problem.num_forward
            change[born] += storage.size_bytes
            change[max(positions.get(g, [born])[-1], born) + 1] -= storage.size_bytes
    fixed, level = [], base
    for position in range(number + 1):
        level += change[position]
        runs = position < number
        fixed.append(level + (problem.backward[position].workspace_bytes if runs else 0))
    return fixed, base + tangent


def _optional(problem: RematProblem) -> tuple[int, ...]:
    """Forward operations that neither an output nor an effect needs."""
    wanted = {*problem.outputs, *problem.updates}
    found: list[int] = []
    for index in reversed(range(problem.num_forward)):
        operation = problem.operations[index]
        if operation.must_run or wanted.intersection(operation.creates):
            wanted.update(operation.reads)
        else:
            found.append(index)
    return tuple(reversed(found))


def _forward_bytes(
    problem: RematProblem, optional: set[int], outputs: set[int], flight_bytes: int
) -> tuple[list[int], dict[int, int]]:
    """What the forward holds of its own while each operation runs; nothing for optional ones."""
    last: dict[int, int] = {}
    for index, operation in enumerate(problem.forward):
        for g in (*operation.creates, *operation.reads):
            if index not in optional or g in operation.creates:
                last[g] = index
    for g in outputs:
        last[g] = problem.num_forward
    change = [0] * (problem.num_forward + 2)
    for g in _forward_values(problem):
        storage = problem.storages[g]
        if storage.producer in optional or (storage.lazy and last[g] == storage.producer):
            continue
        change[storage.producer] += storage.size_bytes
        change[last[g] + 1] -= storage.size_bytes
    forward, level = [], problem.resident_bytes + flight_bytes
    for index, operation in enumerate(problem.forward):
        level += change[index]
        forward.append(level + (0 if index in optional else operation.workspace_bytes))
    return forward, last
