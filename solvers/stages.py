"""Cut the backward into stages, and give each replay the stages in which it may run.

The residency model has a variable for each replay and stage. Its size, and with it the time to
solve it, grows with both, so stages are cut where much memory changes hands, and a replay gets all
stages shortly before its latest use but ever fewer the longer before.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fxremat.problem import RematProblem
from fxremat.solvers.needs import Needs


@dataclass(frozen=True, slots=True)
class Stages:
    """A cut of the backward.

    Attributes:
        starts: First position of each stage, ascending; the first is 0.
        num_positions: Number of backward operations; the position after them belongs to the last.
    """

    starts: tuple[int, ...]
    num_positions: int

    def __post_init__(self) -> None:
        if not self.starts or self.starts[0] != 0 or list(self.starts) != sorted(set(self.starts)):
            raise ValueError(f"stages start at {self.starts}")

    def __len__(self) -> int:
        return len(self.starts)

    def of(self) -> tuple[int, ...]:
        """Stage of each position, the one after the last included."""
        found: list[int] = []
        for stage, start in enumerate(self.starts):
            stop = self.starts[stage + 1] if stage + 1 < len(self) else self.num_positions + 1
            found.extend([stage] * (stop - start))
        return tuple(found)


def cut(problem: RematProblem, needs: Needs, number: int, extra: Collection[int] = ()) -> Stages:
    """Cut where the bytes that are first or last read pile up.

    Args:
        problem: The step.
        needs: Its reads.
        number: How many stages to aim for.
        extra: Positions that start a stage in any case.

    Returns:
        The stages.
    """
    weight = [0] * (needs.num_positions + 1)
    for g in needs.candidates:
        if needs.positions.get(g):
            weight[needs.first(g)] += problem.storages[g].size_bytes
            weight[needs.last(g)] += problem.storages[g].size_bytes
    total = sum(weight)
    starts = {0} | {p for p in extra if 0 < p < needs.num_positions}
    if total and number > 1:
        level, step = 0, 1
        for position in range(1, needs.num_positions):
            level += weight[position - 1]
            if level * number >= step * total:
                starts.add(position)
                step = level * number // total + 1
    return Stages(tuple(sorted(starts)), needs.num_positions)


@dataclass(frozen=True, slots=True)
class Window:
    """Stages in which one replay may run; before the first it has not run.

    Attributes:
        ends: Last stage of each piece; the replay has one variable for each piece.
        pieces: For each stage, the index of the variable that says whether the replay has run by
            then; -1 before the first. The last entry is for the entry of the backward: -1.
    """

    ends: tuple[int, ...]
    pieces: tuple[int, ...]


def windows(
    problem: RematProblem, needs: Needs, stages: Stages, reach: int
) -> tuple[Window | None, ...]:
    """Give each replay its stages.

    Args:
        problem: The step.
        needs: Its reads.
        stages: The cut.
        reach: How many stages before its latest use a replay has one by one; earlier ones come in
            ever longer pieces, twice as many stages back in all for each.

    Returns:
        A window for each replay; None for one whose results nobody can use.
    """
    of = stages.of()
    never = len(stages)
    soonest: dict[int, int] = {}  # storage -> first stage that may want it
    latest: dict[int, int] = {}  # storage -> last stage by which it must be there, if at all
    found: list[Window | None] = [None] * len(problem.replays)
    for index in reversed(range(len(problem.replays))):
        replay = problem.replays[index]
        wanted = [_wanted(needs, of, g, soonest, latest, never) for g in replay.creates]
        first = min((low for low, _ in wanted), default=never)
        last = max((high for low, high in wanted if low < never), default=-1)
        if first >= never or last < 0:
            continue
        found[index] = _window(first, last, reach, len(stages))
        for u in replay.reads:
            soonest[u] = min(soonest.get(u, never), first)
            latest[u] = max(latest.get(u, -1), last)
    return tuple(found)


def _wanted(
    needs: Needs,
    of: Sequence[int],
    g: int,
    soonest: dict[int, int],
    latest: dict[int, int],
    never: int,
) -> tuple[int, int]:
    """First stage that may want ``g``, and the stage by which it must exist."""
    low, high = soonest.get(g, never), latest.get(g, -1)
    if needs.positions.get(g):
        stage = of[needs.first(g)]
        return min(low, stage), stage
    return low, high


def _window(first: int, last: int, reach: int, number: int) -> Window:
    """Single stages up to ``last``, then pieces of doubling length down to ``first``."""
    ends = [last]
    end, length = last - 1, 1
    while end >= first:
        ends.append(end)
        if last - end >= reach:
            length *= 2
        end -= length
    ends.reverse()
    pieces = [-1] * (number + 1)
    for stage in range(first, number):
        pieces[stage] = min(bisect_left(ends, stage), len(ends) - 1)
    return Window(tuple(ends), tuple(pieces))
