"""The forward as a chain of blocks, for schedules that replay an operation more than once.

A *cut* lies between two forward operations; its *frontier* is what crosses it: values made before
it that a forward operation after it reads. Whoever has the frontier can go on from there. Values
that are kept anyway cross for free, and so do *common* ones: small values that most of the graph
reads (masks, positions, rotary tables). Cuts stand where the frontier is smaller than around it;
between two of them lies a *block*. Equal steps of a recurrence and layers of any shape become
blocks alike, whatever their modules are called.

A *phase* is the part of the backward that works on one block. The last block comes first.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from fxremat.problem import Kind, RematProblem
from fxremat.solvers.needs import Needs, Same, find_needs

MOST_BLOCKS = 300
_WIDE = 1.5  # a frontier so much larger than some near by on both sides is no cut
_NEAR = 16  # gaps on either side
_MANY = 4  # far values that an operation reads when it gathers what many blocks made
_COMMON = 0.02  # share of the candidates' bytes that common values may have
_SPANS = 0.4  # share of the forward that a common value crosses at least
_FAR = 0.1  # share of the forward over which an operation reads far values


@dataclass(frozen=True)
class Chain:
    """Blocks 0 .. L-1 of a problem. Cut c lies before block c; cut 0 is the beginning.

    Attributes:
        starts: First forward operation of each block.
        frontiers: What crosses the cut before each block; nothing before the first.
        common: Values to save in any case.
        insides: What the phase of each block reads and that can be replayed.
        phases: First backward position of the phase of each block.
        advance_ns: Time to get from the frontier before a block to the one after it. [ns]
        replay_ns: Time to make a block's inside from the frontier before it. [ns]
    """

    starts: tuple[int, ...]
    frontiers: tuple[frozenset[int], ...]
    common: frozenset[int]
    insides: tuple[frozenset[int], ...]
    phases: tuple[int, ...]
    advance_ns: tuple[int, ...]
    replay_ns: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.starts)


@lru_cache(maxsize=8)
def _chain(key: Same, most: int) -> Chain:
    problem = key.problem
    needs = find_needs(problem)
    last, gathered = _last_reads(problem)
    free = [g for g in last if g in problem.replays_of and g not in needs.kept | gathered]
    common = _common(problem, needs, free, last) | gathered
    crossing = [g for g in free if g not in common and last[g] > problem.storages[g].producer]
    crossing += _at_the_end(problem, last, set(free))
    starts = (0, *_cuts(problem, crossing, last, most))
    frontiers = _frontiers(problem, crossing, last, starts)
    phases = _phases(problem, last, starts, common | needs.kept)
    insides = _insides(problem, phases, common | needs.kept)
    return Chain(
        starts=starts,
        frontiers=frontiers,
        common=common,
        insides=insides,
        phases=phases,
        advance_ns=tuple(
            _cost_ns(problem, wanted, frontier, start)
            for wanted, frontier, start in zip(
                (*frontiers[1:], frozenset()), frontiers, starts, strict=True
            )
        ),
        replay_ns=tuple(
            _cost_ns(problem, inside, frontier, start)
            for inside, frontier, start in zip(insides, frontiers, starts, strict=True)
        ),
    )


def find_chain(problem: RematProblem, most: int = MOST_BLOCKS) -> Chain:
    """Cut the forward of a problem.

    Args:
        problem: The step.
        most: The greatest number of blocks.

    Returns:
        The chain; of a single block where nothing is narrower than its surroundings.
    """
    return _chain(Same(problem), most)


def _last_reads(problem: RematProblem) -> tuple[dict[int, int], frozenset[int]]:
    """Value of the forward -> last forward operation that reads or makes it.

    Operations that gather what many blocks made (a stack of all states) are left out, or all of it
    would cross every cut; what they make is returned besides.
    """
    far = max(2, _FAR * problem.num_forward)
    last: dict[int, int] = {}
    gathered: set[int] = set()
    for index, operation in enumerate(problem.forward):
        reads = [g for g in operation.reads if g in last]
        gathers = sum(index - problem.storages[g].producer > far for g in reads) >= _MANY
        for g in (*operation.creates, *(() if gathers else reads)):
            if problem.storages[g].kind is Kind.VALUE and not problem.storages[g].lazy:
                last[g] = index
        gathered.update(operation.creates if gathers else ())
    return last, frozenset(gathered)


def _common(
    problem: RematProblem, needs: Needs, free: list[int], last: dict[int, int]
) -> frozenset[int]:
    """Values that cross much of the forward, as long as they are small, the longest first."""
    left = _COMMON * sum(problem.storages[g].size_bytes for g in needs.candidates)
    found: set[int] = set()

    def span(g: int) -> int:
        return last[g] - problem.storages[g].producer

    for g in sorted(free, key=lambda g: (-span(g), g)):
        if span(g) < max(2, _SPANS * problem.num_forward):
            break
        if problem.storages[g].size_bytes <= left:
            left -= problem.storages[g].size_bytes
            found.add(g)
    return frozenset(found)


def _at_the_end(problem: RematProblem, last: dict[int, int], free: set[int]) -> list[int]:
    """What the last operation makes for the backward alone; it crosses a cut after the forward."""
    read = {g for operation in problem.backward for g in operation.reads}
    made = problem.forward[-1].creates if problem.forward else ()
    found = [g for g in made if g in read & free and problem.storages[g].size_bytes]
    for g in found:
        last[g] = problem.num_forward
    return found


def _cuts(
    problem: RematProblem, crossing: list[int], last: dict[int, int], most: int
) -> tuple[int, ...]:
    """The first operation after each cut."""
    change = [0] * (problem.num_forward + 2)
    for g in crossing:
        change[problem.storages[g].producer + 1] += problem.storages[g].size_bytes
        change[last[g] + 1] -= problem.storages[g].size_bytes
    width, widths = 0, []  # of the gap before each operation
    for index in range(problem.num_forward + 1):
        width += change[index]
        widths.append(width)
    gaps = [
        index
        for index in range(1, problem.num_forward + 1)
        if widths[index] <= widths[index - 1] or index == 1
        if index == problem.num_forward or widths[index] <= (widths[index + 1] or math.inf)
    ]
    gaps = _narrow([g for g in gaps if widths[g]], widths)
    step = -(-len(gaps) // max(1, most - 1))
    return tuple(gaps[step - 1 :: step]) if gaps else ()


def _narrow(gaps: list[int], widths: list[int]) -> list[int]:
    """Leave out gaps that are much wider than others near by on either side."""
    kept: list[int] = []
    for i, gap in enumerate(gaps):
        before = [widths[g] for g in gaps[max(0, i - _NEAR) : i]]
        after = [widths[g] for g in gaps[i + 1 : i + 1 + _NEAR]]
        rim = max(min(before or after, default=0), min(after or before, default=0))
        if not rim or widths[gap] <= _WIDE * rim:
            kept.append(gap)
    return kept


def _frontiers(
    problem: RematProblem, crossing: list[int], last: dict[int, int], starts: tuple[int, ...]
) -> tuple[frozenset[int], ...]:
    """What crosses each cut."""
    found: list[set[int]] = [set() for _ in starts]
    for g in crossing:
        first = bisect_left(starts, problem.storages[g].producer + 1)
        for cut in range(first, bisect_left(starts, last[g] + 1)):
            found[cut].add(g)
    return tuple(frozenset(each) for each in found)


def _insides(
    problem: RematProblem, phases: tuple[int, ...], free: frozenset[int]
) -> tuple[frozenset[int], ...]:
    """What each phase reads that can be replayed."""
    made = {g for operation in problem.forward for g in operation.creates}
    found: list[frozenset[int]] = []
    for block, start in enumerate(phases):
        stop = phases[block - 1] if block else len(problem.backward)
        reads = {g for operation in problem.backward[start:stop] for g in operation.reads}
        found.append(frozenset(g for g in reads & made - free if g in problem.replays_of))
    return tuple(found)


def _block(starts: tuple[int, ...], operation: int) -> int:
    return bisect_left(starts, operation + 1) - 1


def _phases(
    problem: RematProblem, last: dict[int, int], starts: tuple[int, ...], free: frozenset[int]
) -> tuple[int, ...]:
    """First position of each block's phase: from there on nothing of later blocks is begun.

    An operation of the backward works on the earliest block whose values it reads. A value that
    crosses a cut belongs to the last block that reads it, since it is that block's input.
    """
    number = len(problem.backward)
    level = len(starts) - 1
    first = [0] * len(starts)
    for position, operation in enumerate(problem.backward):
        reads = [g for g in operation.reads if g in last and g not in free]
        wanted = min((_block(starts, last[g]) for g in reads), default=level)
        for block in range(wanted, level):
            first[block] = position
        level = min(level, wanted)
    for block in range(level):
        first[block] = number
    return tuple(first)


def _cost_ns(
    problem: RematProblem, wanted: frozenset[int], given: frozenset[int], start: int
) -> int:
    """Time to make some values from given ones, by replays of operations from ``start`` on. [ns]"""
    stack, ways, made = sorted(wanted), set[int](), set(given)
    while stack:
        g = stack.pop()
        storage = problem.storages[g]
        if g in made or storage.producer < start or g not in problem.replays_of:
            continue
        way = problem.replays_of[g][0]
        ways.add(way)
        made.update(problem.replays[way].creates)
        stack += problem.replays[way].reads
    return sum(problem.replays[way].cost_ns for way in ways)
