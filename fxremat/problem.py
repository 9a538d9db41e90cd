"""The rematerialisation problem: one training step as operations and storages, without torch.

Names: an *operation* allocates; views, ``getitem`` and shape arithmetic are folded away. A
*storage* is what an operation allocates; all sizes are per storage. The step is the forward
operations in order, then the backward operations in order. A *replay* is one way of running a
forward operation again in the backward; most operations have one, a dropout has two (from its
mask, or by drawing again from the saved state of the generator), an operation that must not run
twice has none.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from fxremat.budget import format_bytes

SCHEMA_VERSION = 1


class Kind(StrEnum):
    """Where a storage comes from."""

    PRIMAL = (
        "primal"  # parameters, buffers, inputs, constants: resident, size counted in resident_bytes
    )
    TANGENT = "tangent"  # arrives when the backward starts
    VALUE = "value"  # made by an operation


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory that one operation allocates, or that the step is given.

    Attributes:
        name: Name of the fx node that owns it; unique within the problem.
        size_bytes: What the device's allocator takes for it, rounded as that allocator does.
            [bytes]
        kind: Where it comes from.
        producer: Index of the operation that allocates it; -1 for primals and tangents.
        held: Of a tangent: somebody outside keeps it until the backward has ended, while autograd
            copies gradients too.
        lazy: It exists only when a replay reads it (the saved state of a generator).
    """

    name: str
    size_bytes: int
    kind: Kind
    producer: int = -1
    lazy: bool = False
    held: bool = False

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise ValueError(f"storage {self.name!r}: {self.size_bytes} bytes")


@dataclass(frozen=True, slots=True)
class Operation:
    """One node that allocates, in the forward or in the backward.

    Attributes:
        name: Name of the fx node; unique within the problem.
        target: The operator, such as ``aten.addmm.default``.
        reads: Storages it reads, through any view; sorted, without repeats.
        creates: Storages it allocates.
        cost_ns: Time to run it once. [ns]
        workspace_bytes: Held while it runs, besides what it reads and creates. [bytes]
        must_run: It draws random numbers or has an effect: it runs exactly once, even unread.
        why_saved: Why no replay of it is allowed; empty when there is one.
        source: The user's line, ``file.py:12``, if known.
        module: Path of the module that ran it, ``transformer.h.0.attn``, if known.
    """

    name: str
    target: str
    reads: tuple[int, ...]
    creates: tuple[int, ...]
    cost_ns: int
    workspace_bytes: int = 0
    must_run: bool = False
    why_saved: str = ""
    source: str = ""
    module: str = ""


@dataclass(frozen=True, slots=True)
class Replay:
    """One way to make storages of a forward operation again in the backward.

    Attributes:
        operation: Index of the forward operation.
        variant: ``"same"`` runs the same operator on the same inputs; ``"from_mask"`` applies a
            saved dropout mask; ``"redraw"`` runs it under the saved state of its generator.
        reads: Storages that it reads; sorted, without repeats.
        creates: Storages of the operation that it makes anew; a subset of ``Operation.creates``.
        cost_ns: Time to run it once, with the cost of keeping a generator state. [ns]
        workspace_bytes: Held while it runs, besides what it reads and creates. [bytes]
    """

    operation: int
    variant: str
    reads: tuple[int, ...]
    creates: tuple[int, ...]
    cost_ns: int
    workspace_bytes: int = 0


@dataclass(frozen=True, repr=False)
class RematProblem:
    """One training step, ready to be planned.

    Attributes:
        storages: All of them, in graph order.
        operations: Forward operations in order, then backward operations in order.
        num_forward: How many of ``operations`` belong to the forward.
        replays: All allowed replays, in order of their operation; the cheapest in bytes of state
            first where an operation has several.
        outputs: Storages that the forward hands to the caller.
        updates: Storages that the forward hands back to be copied into inputs; freed at its end.
        gradients: Storages that the backward hands to autograd.
        resident_bytes: Parameters, buffers, inputs, existing gradients and reserve. [bytes]
        outputs_held: The caller keeps the outputs until the backward ends.
        copied_bytes: Held in the end by autograd's copies of gradients, above the gradients.
            [bytes]
        in_flight: Forwards alive at once before their backwards.
        unrewritten_peak_bytes: Peak of the step as it was, before equal operations were merged,
            with resident bytes; 0: that of saving everything here. [bytes]
        costs: Where the costs come from: "measured", "roofline", "uniform" or a table's name.
        device: The device that the costs and sizes are of, such as "cpu".
        name: What was captured, for people.
    """

    storages: tuple[Storage, ...]
    operations: tuple[Operation, ...]
    num_forward: int
    replays: tuple[Replay, ...]
    outputs: tuple[int, ...]
    gradients: tuple[int, ...]
    resident_bytes: int = 0
    outputs_held: bool = True
    copied_bytes: int = 0
    in_flight: int = 1
    unrewritten_peak_bytes: int = 0
    costs: str = "uniform"
    device: str = "cpu"
    name: str = ""
    updates: tuple[int, ...] = ()
    versions: tuple[tuple[str, str], ...] = field(default=())

    def __post_init__(self) -> None:
        """Check what every reader relies on."""
        if not 0 <= self.num_forward <= len(self.operations):
            raise ValueError(f"num_forward {self.num_forward} of {len(self.operations)} operations")
        if self.in_flight < 1:
            raise ValueError(f"in_flight is {self.in_flight}; at least 1 forward is alive")
        made: set[int] = {g for g, s in enumerate(self.storages) if s.kind is not Kind.VALUE}
        for index, operation in enumerate(self.operations):
            for g in operation.reads:
                if g not in made:
                    raise ValueError(
                        f"operation {operation.name!r} reads storage {g} before it is made"
                    )
            for g in operation.creates:
                if self.storages[g].producer != index:
                    raise ValueError(
                        f"storage {g} does not name {operation.name!r} as its producer"
                    )
            made.update(operation.creates)
        for replay in self.replays:
            operation = self.operations[replay.operation]
            if replay.operation >= self.num_forward or not set(replay.creates) <= set(
                operation.creates
            ):
                raise ValueError(f"a replay of {operation.name!r} creates what it may not")

    def __repr__(self) -> str:
        """One line; ``save`` writes everything."""
        return (
            f"RematProblem({self.name!r}: {len(self.forward)} forward and {len(self.backward)} "
            f"backward operations, {len(self.replays)} replays, "
            f"resident {format_bytes(self.resident_bytes)}, {self.costs} costs, {self.device})"
        )

    def save(self, path: "str | Path") -> None:
        """Write the problem to one JSON file, which ``fxremat.load`` reads."""
        from fxremat.io import save_problem  # the file format knows the problem, not the reverse

        save_problem(self, path)

    @property
    def forward(self) -> tuple[Operation, ...]:
        """The forward operations."""
        return self.operations[: self.num_forward]

    @property
    def backward(self) -> tuple[Operation, ...]:
        """The backward operations."""
        return self.operations[self.num_forward :]

    @cached_property
    def step_ns(self) -> int:
        """Cost of the unrewritten step. [ns]"""
        return sum(operation.cost_ns for operation in self.operations)

    @cached_property
    def replays_of(self) -> dict[int, tuple[int, ...]]:
        """Storage -> indices of the replays that create it, in the order of ``replays``."""
        found: dict[int, list[int]] = {}
        for index, replay in enumerate(self.replays):
            for g in replay.creates:
                found.setdefault(g, []).append(index)
        return {g: tuple(indices) for g, indices in found.items()}

    @cached_property
    def sizes_bytes(self) -> tuple[int, ...]:
        """Size of each storage. [bytes]"""
        return tuple(storage.size_bytes for storage in self.storages)

    @cached_property
    def operation_reads(self) -> tuple[tuple[int, ...], ...]:
        """What each operation reads, without primals, which are there in any case."""
        return tuple(self._made(operation.reads) for operation in self.operations)

    @cached_property
    def replay_reads(self) -> tuple[tuple[int, ...], ...]:
        """What each replay reads, without primals."""
        return tuple(self._made(replay.reads) for replay in self.replays)

    def _made(self, reads: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(g for g in reads if self.storages[g].kind is not Kind.PRIMAL)

    @cached_property
    def waiting_bytes(self) -> int:
        """Gradients of a forward that has run back while another one in flight runs back. [bytes]

        They are in ``.grad``, or wait in autograd when one backward goes through both: then it adds
        them up one by one, each sum in memory of its own.
        """
        made = {g for g in self.gradients if self.storages[g].kind is not Kind.PRIMAL}
        sizes = [self.storages[g].size_bytes for g in made]
        return sum(sizes) + max(sizes, default=0)

    def beside_bytes(self, flight_bytes: int) -> int:
        """Held at most for the other forwards in flight while one runs back. [bytes]

        Args:
            flight_bytes: Held for each of them that waits for its backward. [bytes]
        """
        if self.in_flight == 1:
            return 0
        return (self.in_flight - 2) * flight_bytes + max(flight_bytes, self.waiting_bytes)

    @cached_property
    def candidates(self) -> tuple[int, ...]:
        """Storages of the forward that the backward or a replay may read: what can be saved."""
        read = {g for operation in self.backward for g in operation.reads}
        read.update(g for replay in self.replays for g in replay.reads)
        return tuple(
            g
            for g, s in enumerate(self.storages)
            if g in read and s.kind is Kind.VALUE and s.producer < self.num_forward
        )
