"""Nested replays over a chain: who goes forward from where, and what it leaves behind.

A nested schedule is given by what happens to a run of blocks whose backward is due, ``s .. e``,
with the frontier before ``s`` at hand: either go forward to a later block ``t``, keep the frontier
before it (unless it is the last), and treat ``t .. e`` and then ``s .. t-1`` alike; or run block
``s`` once, keep its inside, and go on with ``s+1 .. e``. The first run goes through all blocks and
is the forward itself; every other one is a replay during the phase of its last block.
"""

from collections.abc import Callable
from typing import NamedTuple

from fxremat.problem import RematProblem
from fxremat.schedule import Phase, expand
from fxremat.simulate import Schedule
from fxremat.solvers.chain import Chain
from fxremat.solvers.needs import find_needs


class Run(NamedTuple):
    """Blocks whose backward is due.

    Attributes:
        start: The first of them; the frontier before it is at hand.
        end: The last of them.
        first: It is the forward that gets there, not a replay.
        level: What a rule wants to remember: slots or units of memory that are left.
    """

    start: int
    end: int
    first: bool
    level: int


class Choice(NamedTuple):
    """What happens to a run of more than one block.

    Attributes:
        keep: Block to go on from, with the frontier before it kept where others follow; -1: keep
            the inside of the first block.
        later: ``level`` of the run that is done first, of later blocks.
        earlier: ``level`` of the run that is done then.
    """

    keep: int
    later: int
    earlier: int = 0


def unroll(
    problem: RematProblem,
    chain: Chain,
    rule: Callable[[Run], Choice],
    level: int,
    *,
    linger: bool = False,
) -> Schedule:
    """Write nested replays down as a schedule.

    Args:
        problem: The step.
        chain: Its blocks.
        rule: What happens to each run of more than one block.
        level: Of the first run.
        linger: What a phase has made on its way and the next phase reads stays there. That saves
            replays, and takes memory that no rule has counted.

    Returns:
        The schedule.
    """
    kept = _Kept(problem, chain)
    stack = [Run(0, len(chain) - 1, True, level)]
    while stack:
        run = stack.pop()
        if run.start == run.end:
            if run.first:
                kept.saved.update(chain.insides[run.end])
            continue
        choice = rule(run)
        if choice.keep < 0:
            ahead = chain.frontiers[run.start + 1]
            kept.add(chain.insides[run.start] | ahead, run, run.start)
            stack.append(Run(run.start + 1, run.end, run.first, choice.later))
            continue
        if choice.keep < run.end:
            kept.add(chain.frontiers[choice.keep], run, choice.keep)
        stack.append(Run(run.start, choice.keep - 1, False, choice.earlier))
        stack.append(Run(choice.keep, run.end, run.first, choice.later))
    return expand(problem, kept.saved, phases=kept.phases(linger=linger))


class _Kept:
    """What nested replays keep: from the forward on, and between phases."""

    def __init__(self, problem: RematProblem, chain: Chain) -> None:
        self.chain = chain
        self.saved = set(find_needs(problem).kept | chain.common)
        self.carried: list[set[int]] = [set() for _ in chain.starts]

    def add(self, values: frozenset[int], run: Run, since: int) -> None:
        """Keep values that were made on the way to a run's end until block ``since`` is done."""
        if run.first:
            self.saved.update(values)
            return
        for block in range(since, run.end):
            self.carried[block].update(values)

    def phases(self, *, linger: bool) -> list[Phase]:
        """The phases of the backward with what is carried into each."""
        chain = self.chain
        inside = chain.insides if linger else (frozenset[int](),) * len(chain)
        return [
            Phase(chain.phases[block], frozenset(self.carried[block] | inside[block]))
            for block in reversed(range(len(chain)))
        ]
