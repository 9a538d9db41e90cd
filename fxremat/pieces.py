"""Several graphs of one call as one step: what stands between graph breaks, planned together.

The joint step runs the forwards in order and the backwards in reverse order, as autograd does. What
one piece returns and a later one takes is one storage. Three things of the runtime become
operations that cost nothing: after a forward its updates are let go of; before a backward, autograd
hands over the gradients of the pieces behind it, in memory of their own; after a backward the
tangents that nobody has read, or that torch keeps, are let go of.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fxremat.problem import RematProblem
from fxremat.simulate import Schedule, Step

Place = tuple[int, int]
"""A piece and the number of something in it."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Where the arguments and results of a graph are in its problem; -1 where they are not.

    Attributes:
        inputs: For each argument, its storage.
        gradients: For each argument, the storage of its gradient.
        outputs: For each output, the storage that it refers to.
        tangents: For each output, the storage of its tangent.
    """

    inputs: tuple[int, ...]
    gradients: tuple[int, ...]
    outputs: tuple[int, ...]
    tangents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """An output of one piece that is an argument of a later one.

    Attributes:
        maker: The piece that returns it.
        output: Which of its outputs.
        reader: The piece that takes it.
        argument: Which of its arguments.
    """

    maker: int
    output: int
    reader: int
    argument: int


@dataclass(frozen=True)
class Joined:
    """Pieces as one problem.

    Attributes:
        problem: The joint step.
        parts: The problems of the pieces, in order of their forwards.
        operations: For each joint operation, its piece and its number there; the piece is -1 for
            what the runtime does.
        replays: The same for each joint replay.
        numbers: The joint number of each storage of a piece.
    """

    problem: RematProblem
    parts: tuple[RematProblem, ...]
    operations: tuple[Place, ...]
    replays: tuple[Place, ...]
    numbers: dict[Place, int]

    @cached_property
    def _local(self) -> dict[Place, int]:
        """A piece and a joint storage -> its number in the piece."""
        return {(part, joint): g for (part, g), joint in self.numbers.items()}

    def divide(self, schedule: Schedule) -> tuple[Schedule, ...]:
        """The schedule of each piece under one of the joint step."""
        forward: list[list[int]] = [[] for _ in self.parts]
        backward: list[list[Step]] = [[] for _ in self.parts]
        for index in schedule.forward:
            part, local = self.operations[index]
            if part >= 0:
                forward[part].append(local)
        for step in schedule.backward:
            part, local = self.operations[step.operation]
            if part >= 0:
                replay = self.replays[step.replay][1] if step.replay >= 0 else -1
                keeps = tuple(self._local[part, g] for g in step.keeps)
                backward[part].append(Step(local, replay, keeps))
        pairs = zip(forward, backward, strict=True)
        return tuple(Schedule(tuple(ahead), tuple(back)) for ahead, back in pairs)

    def compose(self, schedules: Sequence[Schedule]) -> Schedule | None:
        """The joint schedule where each piece follows its own.

        Returns:
            The schedule; None where a piece makes again what other pieces hold.
        """
        replay_of = {place: index for index, place in enumerate(self.replays)}
        index_of = {place: index for index, place in enumerate(self.operations)}
        running = {(part, i) for part, own in enumerate(schedules) for i in own.forward}
        num_forward = self.problem.num_forward
        forward = [
            index
            for index, place in enumerate(self.operations[:num_forward])
            if place[0] < 0 or place in running
        ]
        backward: list[Step] = []
        done: set[int] = set()
        for index, (part, _) in enumerate(self.operations[num_forward:], start=num_forward):
            if part < 0:
                backward.append(Step(index))
            for step in schedules[part].backward if part >= 0 and part not in done else ():
                place = (part, step.replay)
                keeps = tuple(self.numbers[part, g] for g in step.keeps)
                if step.replay >= 0 and not self._makes(replay_of.get(place), keeps):
                    return None
                replay = replay_of[place] if step.replay >= 0 else -1
                backward.append(Step(index_of[part, step.operation], replay, keeps))
            done.add(part)
        return Schedule(tuple(forward), tuple(backward))

    def _makes(self, replay: int | None, keeps: Sequence[int]) -> bool:
        return replay is not None and set(keeps) <= set(self.problem.replays[replay].creates)
