"""Makes one problem of the pieces of a call; ``fxremat.pieces`` says what it stands for."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fxremat.pieces import Ends, Joined, Link, Place
from fxremat.problem import Kind, Operation, RematProblem, Replay, Storage


def join(
    parts: Sequence[RematProblem],
    ends: Sequence[Ends],
    links: Sequence[Link],
    returned: frozenset[Place],
    *,
    resident_bytes: int,
) -> Joined:
    """Make one problem of the pieces of a call.

    Args:
        parts: Their problems, in the order in which their forwards ran.
        ends: Of each of them.
        links: What they hand to one another.
        returned: Outputs, as piece and position, that the caller keeps.
        resident_bytes: Held throughout by whomever, no piece's output among it. [bytes]

    Returns:
        The joint step. Outputs that no piece takes are held like those that are returned. A call
        without a break is its only piece as it is.
    """
    if len(parts) == 1:
        return _alone(parts[0], resident_bytes)
    return _Joiner(parts, ends, links, returned).join(resident_bytes)


def _alone(part: RematProblem, resident_bytes: int) -> Joined:
    before_bytes = part.unrewritten_peak_bytes
    if before_bytes:
        before_bytes += resident_bytes - part.resident_bytes
    return Joined(
        replace(part, resident_bytes=resident_bytes, unrewritten_peak_bytes=before_bytes),
        (part,),
        tuple((0, index) for index in range(len(part.operations))),
        tuple((0, index) for index in range(len(part.replays))),
        {(0, g): g for g in range(len(part.storages))},
    )


class _Joiner:
    """Joins pieces once."""

    def __init__(
        self,
        parts: Sequence[RematProblem],
        ends: Sequence[Ends],
        links: Sequence[Link],
        returned: frozenset[Place],
    ) -> None:
        self.parts, self.ends, self.links = parts, ends, links
        self.linked = {(link.maker, link.output) for link in links}
        self.returned = returned
        self.places: list[Place] = []  # of the joint operations
        self.numbers: dict[Place, int] = {}
        self.storages: list[Storage] = []
        self.producers: dict[Place, int] = {}  # handed tangents -> the hand-over
        self.waiting: dict[Place, int] = {}  # gradients of the caller for outputs that are linked

    def join(self, resident_bytes: int) -> Joined:
        """The joint problem with the way back to the pieces."""
        num_forward = self._order()
        self._number()
        replays = list(self._replays())
        first = self.parts[0]
        outputs, updates = self._outputs()
        problem = RematProblem(
            storages=tuple(self.storages),
            operations=tuple(self._operation(*place) for place in self.places),
            num_forward=num_forward,
            replays=tuple(replay for _, replay in replays),
            outputs=outputs,
            updates=updates,
            gradients=self._gradients(),
            resident_bytes=resident_bytes,
            outputs_held=first.outputs_held,
            copied_bytes=sum(part.copied_bytes for part in self.parts),
            in_flight=first.in_flight,
            costs=first.costs,
            device=first.device,
            name=first.name,
            versions=first.versions,
        )
        places = tuple(place for place, _ in replays)
        return Joined(problem, tuple(self.parts), tuple(self.places), places, self.numbers)

    # What the runtime does stands at piece -1, under a number that says what and for which piece.
    _WHAT = ("let_go_of_updates", "hand_over", "let_go_of_tangents")

    def _order(self) -> int:
        """Put the operations in order; returns how many belong to the forward."""
        for part, problem in enumerate(self.parts):
            self.places += [(part, index) for index in range(problem.num_forward)]
            self.places.append((-1, 3 * part))
        num_forward = len(self.places)
        for part, problem in reversed(list(enumerate(self.parts))):
            for output in self._handed(part):
                self.producers[part, self.ends[part].tangents[output]] = len(self.places)
            self.places.append((-1, 3 * part + 1))
            self.places += [
                (part, index) for index in range(problem.num_forward, len(problem.operations))
            ]
            self.places.append((-1, 3 * part + 2))
        return num_forward

    def _handed(self, part: int) -> list[int]:
        """Outputs of a piece whose tangents come from the pieces behind it."""
        found = sorted(output for maker, output in self.linked if maker == part)
        return [output for output in found if self.ends[part].tangents[output] >= 0]

    def _number(self) -> None:
        """Number the storages; what is handed from piece to piece has one number."""
        index_of = {place: index for index, place in enumerate(self.places)}
        taken = {
            (link.reader, self.ends[link.reader].inputs[link.argument]): (
                link.maker,
                self.ends[link.maker].outputs[link.output],
            )
            for link in self.links
        }
        for part, problem in enumerate(self.parts):
            for g, storage in enumerate(problem.storages):
                place = (part, g)
                if place in taken:
                    self.numbers[place] = self.numbers[taken[place]]
                    continue
                kind, producer, held = storage.kind, -1, storage.held
                if kind is Kind.VALUE:
                    producer = index_of[part, storage.producer]
                elif place in self.producers:
                    kind, producer, held = Kind.VALUE, self.producers[place], False
                name = f"piece{part}.{storage.name}"
                self.numbers[place] = self._add(
                    Storage(name, storage.size_bytes, kind, producer, storage.lazy, held)
                )
            for output in self._handed(part):
                if (part, output) in self.returned:
                    tangent = problem.storages[self.ends[part].tangents[output]]
                    name = f"piece{part}.{tangent.name}_of_the_caller"
                    waiting = Storage(name, tangent.size_bytes, Kind.TANGENT)
                    self.waiting[part, output] = self._add(waiting)

    def _add(self, storage: Storage) -> int:
        self.storages.append(storage)
        return len(self.storages) - 1

    def _mapped(self, part: int, storages: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted({self.numbers[part, g] for g in storages}))

    def _operation(self, part: int, number: int) -> Operation:
        if part < 0:
            return self._of_the_runtime(*divmod(number, 3))
        operation = self.parts[part].operations[number]
        name = f"piece{part}.{operation.name}"
        return Operation(
            name,
            operation.target,
            self._mapped(part, operation.reads),
            tuple(self.numbers[part, g] for g in operation.creates),
            operation.cost_ns,
            operation.workspace_bytes,
            operation.must_run,
            operation.why_saved,
            operation.source,
            operation.module,
        )

    def _of_the_runtime(self, part: int, what: int) -> Operation:
        """What happens between the graphs, as an operation."""
        reads: tuple[int, ...]
        creates: tuple[int, ...] = ()
        problem, ends = self.parts[part], self.ends[part]
        if what == 0:
            reads = self._mapped(part, problem.updates)
        elif what == 1:
            behind = {
                self.numbers[link.reader, g]
                for link in self.links
                if link.maker == part
                and (g := self.ends[link.reader].gradients[link.argument]) >= 0
            }
            caller = {self.waiting[p] for p in self.waiting if p[0] == part}
            reads = tuple(sorted(behind | caller))
            handed = {ends.tangents[output] for output in self._handed(part)}
            creates = tuple(sorted(self.numbers[part, g] for g in handed))
        else:
            read = {g for operation in problem.backward for g in operation.reads}
            reads = self._mapped(
                part,
                [
                    g
                    for g in {ends.tangents[output] for output in self._handed(part)}
                    if problem.storages[g].held or g not in read
                ],
            )
        name = f"piece{part}.{self._WHAT[what]}"
        return Operation(name, "the runtime", reads, creates, 0, must_run=what == 0)

    def _replays(self) -> Iterator[tuple[Place, Replay]]:
        """Replays of the pieces, less what other pieces take, which is there anyway."""
        index_of = {place: index for index, place in enumerate(self.places)}
        kept = {(maker, self.ends[maker].outputs[output]) for maker, output in self.linked}
        for part, problem in enumerate(self.parts):
            for number, replay in enumerate(problem.replays):
                creates = tuple(g for g in replay.creates if (part, g) not in kept)
                again = set(replay.creates) - set(creates)
                again_bytes = sum(problem.storages[g].size_bytes for g in again)
                if creates:
                    yield (
                        (part, number),
                        Replay(
                            index_of[part, replay.operation],
                            replay.variant,
                            self._mapped(part, replay.reads),
                            tuple(self.numbers[part, g] for g in creates),
                            replay.cost_ns,
                            replay.workspace_bytes + again_bytes,
                        ),
                    )

    def _outputs(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What is held until the backward ends, and what until the forward does."""
        held: set[int] = set()
        passing: set[int] = set()
        for part, (problem, ends) in enumerate(zip(self.parts, self.ends, strict=True)):
            named = {g for g in ends.outputs if g >= 0}
            held.update(self.numbers[part, g] for g in problem.outputs if g not in named)
            for output, g in enumerate(ends.outputs):
                if g >= 0:
                    only = (part, output) in self.linked and (part, output) not in self.returned
                    (passing if only else held).add(self.numbers[part, g])
        return tuple(sorted(held)), tuple(sorted(passing - held))

    def _gradients(self) -> tuple[int, ...]:
        """What the backwards leave behind, without what they hand to one another."""
        found: set[int] = set()
        for part, (problem, ends) in enumerate(zip(self.parts, self.ends, strict=True)):
            arguments = {link.argument for link in self.links if link.reader == part}
            handed = {ends.gradients[argument] for argument in arguments}
            own = {g for k, g in enumerate(ends.gradients) if k not in arguments}
            found.update(self.numbers[part, g] for g in problem.gradients if g in own - handed)
            found.update(self.numbers[part, g] for g in own & handed if g >= 0)
            unnamed = set(problem.gradients) - own - handed
            found.update(self.numbers[part, g] for g in unnamed)
        return tuple(sorted(found - {-1}))
