"""What a chain of blocks needs, in units of bytes, for the dynamic programme of ``rotor``."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxremat.problem import Kind, RematProblem
from fxremat.solvers.chain import Chain
from fxremat.solvers.needs import find_needs

_LEVELS = 400  # amounts of memory that are told apart, at most

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Memory:
    """What a chain needs, in units of bytes.

    Attributes:
        levels: Amounts of memory that are told apart: 0 .. levels - 1.
        frontier: Of keeping the frontier before each block.
        inside: Of keeping the inside of each block and the frontier after it.
        own: That the phase of each block needs besides the frontier before it.
        passed: The same with that frontier, and with what making its inside takes.
        forward: The same of the last block, when the forward itself has just made its inside.
        way: ``way[e, j]``: that going through block j needs at the beginning of phase e.
    """

    levels: int
    frontier: Ints
    inside: Ints
    own: Ints
    passed: Ints
    forward: int
    way: Ints


def memory_of(problem: RematProblem, chain: Chain) -> Memory:
    """Tabulate what the phases of a chain need."""
    needs = find_needs(problem)
    ahead = (*chain.frontiers[1:], frozenset[int]())
    blocks = list(zip(chain.insides, chain.frontiers, ahead, strict=True))
    frontier = _array([_bytes(problem, before) for _, before, _ in blocks])
    inside = _array(
        [_bytes(problem, (within | after) - before) for within, before, after in blocks]
    )
    own = _array(_own_bytes(problem, chain, [within - before for within, before, _ in blocks]))
    passed = _array(_own_bytes(problem, chain, chain.insides))
    before = [needs.entry_bytes, *needs.fixed_bytes]
    begun = _array([min(before[start : start + 2]) for start in chain.phases])
    way = begun[:, None] + _array(_way_bytes(problem, chain))[None, :]
    forward = int(passed[-1])  # the forward itself goes its way before anything else is there
    passed = np.maximum(passed, np.diagonal(way) + frontier)
    least = int(own.min())
    top = int(frontier.sum()) + int(max(passed.max(), way.max())) - least
    kept = frontier[frontier > 0]
    grain = int(np.median(kept)) if len(kept) else 1
    unit = max(1, -(-top // (_LEVELS - 1)))
    if unit < grain:  # equal frontiers are whole numbers of units
        unit = -(-grain // (grain // unit))

    def units(bytes_: Ints) -> Ints:
        return -(-np.maximum(bytes_, 0) // unit)

    levels = int(-(-top // unit)) + 1
    return Memory(
        levels, units(frontier), units(inside), units(own - least), units(passed - least),
        int(units(_array([forward - least]))[0]), units(way - least),
    )  # fmt: skip


def _array(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _bytes(problem: RematProblem, values: frozenset[int]) -> int:
    return sum(problem.storages[g].size_bytes for g in values)


def _own_bytes(problem: RematProblem, chain: Chain, insides: Sequence[frozenset[int]]) -> list[int]:
    """What each phase holds at most of the backward's own and of some values. [bytes]"""
    needs = find_needs(problem)
    found: list[int] = []
    for block, inside in enumerate(insides):
        stop = chain.phases[block - 1] if block else needs.num_positions + 1
        most = 0
        for position in range(chain.phases[block], stop):
            held = (g for g in inside if needs.last(g) >= position)
            here = sum(problem.storages[g].size_bytes for g in held)
            most = max(most, needs.fixed_bytes[min(position, needs.num_positions)] + here)
        found.append(most)
    return found


def _way_bytes(problem: RematProblem, chain: Chain) -> list[int]:
    """What going through each block holds at most, the frontier before it left out. [bytes]"""
    last = {
        g: index
        for index, operation in enumerate(problem.forward)
        for g in (*operation.creates, *operation.reads)
    }
    ends = [*chain.starts[1:], problem.num_forward]
    found: list[int] = []
    for start, end in zip(chain.starts, ends, strict=True):
        live: dict[int, int] = {}
        most = 0
        for index in range(start, end):
            operation = problem.operations[index]
            for g in operation.creates:
                storage = problem.storages[g]
                if storage.kind is Kind.VALUE and not storage.lazy:
                    live[g] = storage.size_bytes
            most = max(most, sum(live.values()) + operation.workspace_bytes)
            live = {g: size for g, size in live.items() if last[g] > index}
        found.append(most)
    return found
