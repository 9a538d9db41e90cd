"""Random layered training steps, made as problems without torch: for sizes that no model has.

The forward is a graph in layers. An operation reads one to three values, mostly of the layer before
it; a few reach far back, as skip connections do, and a few may not run twice. The backward is
autograd's: one operation for each of the forward, in reverse, which reads the gradient of the
result and some of the operands, and sums where a value has several readers.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from fxremat.problem import Kind, Operation, RematProblem, Replay, Storage

KIB = 1024
MOST_WIDE = 8  # operations of a layer
BYTES_PER_US = 1_000_000  # a device that moves 1 TB/s
CALL_NS = 4_000
INPUT = 0  # its storage


@dataclass
class _Made:
    """What a forward operation was."""

    out: int
    operands: tuple[int, ...]
    weight_bytes: int


@dataclass
class _Recorder:
    """Storages and operations in the order in which they are made."""

    rng: random.Random
    storages: list[Storage] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)

    def run(
        self, name: str, reads: Sequence[int], sizes_bytes: Sequence[int], factor: float
    ) -> int:
        """Append an operation that is ``factor`` times as slow as moving its bytes."""
        index, first = len(self.operations), len(self.storages)
        for part, size_bytes in enumerate(sizes_bytes):
            label = name if part == 0 else f"{name}.{part}"
            self.storages.append(Storage(label, size_bytes, Kind.VALUE, index))
        inputs = tuple(sorted(set(reads)))
        moved_bytes = sum(sizes_bytes) + sum(self.storages[g].size_bytes for g in inputs)
        cost_ns = CALL_NS + round(factor * moved_bytes * 1000 / BYTES_PER_US)
        workspace_bytes = self.size_bytes() if self.rng.random() < 0.05 else 0
        creates = tuple(range(first, len(self.storages)))
        target = name.rstrip("0123456789_")
        self.operations.append(Operation(name, target, inputs, creates, cost_ns, workspace_bytes))
        return first

    def allow_replay(self) -> None:
        """Let the last operation run again."""
        last = self.operations[-1]
        index = len(self.operations) - 1
        self.replays.append(
            Replay(index, "same", last.reads, last.creates, last.cost_ns, last.workspace_bytes)
        )

    def size_bytes(self) -> int:
        """64 KiB to 16 MiB, small ones as often as large ones. [bytes]"""
        return round(64 * KIB * 2 ** self.rng.uniform(0, 8)) // 512 * 512


def random_problem(forward: int, seed: int = 0) -> RematProblem:
    """Make a step.

    Args:
        forward: Operations of its forward, the loss among them.
        seed: Equal ones give equal problems.

    Returns:
        The problem; the peak of its plain step is well above what is resident.
    """
    rng = random.Random(f"{forward} {seed}")
    recorder = _Recorder(rng)
    recorder.storages.append(Storage("x", recorder.size_bytes(), Kind.PRIMAL))
    made = _forward(recorder, forward)
    num_forward = len(recorder.operations)
    recorder.storages.append(Storage("tangent", 512, Kind.TANGENT))
    gradients = _backward(recorder, made, len(recorder.storages) - 1)
    weights_bytes = sum(each.weight_bytes for each in made)
    return RematProblem(
        storages=tuple(recorder.storages),
        operations=tuple(recorder.operations),
        num_forward=num_forward,
        replays=tuple(recorder.replays),
        outputs=(made[-1].out,),
        gradients=tuple(gradients),
        resident_bytes=weights_bytes + recorder.storages[INPUT].size_bytes,
        costs="random",
        name=f"random-{forward}",
    )


def _forward(recorder: _Recorder, number: int) -> list[_Made]:
    """The layers, and a loss that reads every value nobody else reads."""
    rng = recorder.rng
    layers: list[list[int]] = [[INPUT]]
    made: list[_Made] = []
    unread: dict[int, None] = {}
    while len(made) < number - 1:
        layer: list[int] = []
        for _ in range(min(rng.randint(1, MOST_WIDE), number - 1 - len(made))):
            operands = _operands(rng, layers, unread)
            heavy = rng.random() < 0.3  # a product with a weight
            factor = rng.uniform(2, 30) if heavy else 1.0
            kind = "product" if heavy else "map"
            sizes_bytes = [recorder.size_bytes()]
            out = recorder.run(f"{kind}_{len(made)}", operands, sizes_bytes, factor)
            if rng.random() < 0.97:
                recorder.allow_replay()
            weight_bytes = recorder.size_bytes() // 4 if heavy else 0
            made.append(_Made(out, operands, weight_bytes))
            layer.append(out)
            for g in operands:
                unread.pop(g, None)
            unread[out] = None
        layers.append(layer)
    operands = tuple(unread)
    made.append(_Made(recorder.run("loss", operands, [512], 1.0), operands, 0))
    recorder.allow_replay()
    return made


def _operands(
    rng: random.Random, layers: list[list[int]], unread: dict[int, None]
) -> tuple[int, ...]:
    """One to three earlier values: of the last layer, rarely of any; one that waits is preferred.

    What nobody reads for long would make the loss read everything.
    """
    found: dict[int, None] = {}
    for _ in range(rng.choices((1, 2, 3), (5, 4, 1))[0]):
        layer = layers[-1] if rng.random() < 0.9 else rng.choice(layers)
        waiting = [g for g in layers[-1] if g in unread and g not in found]
        found[rng.choice(waiting or layer)] = None
    return tuple(found)


def _backward(recorder: _Recorder, made: list[_Made], tangent: int) -> list[int]:
    """The gradients of all weights and of the input, in the order in which they are ready."""
    rng = recorder.rng
    gradient_of = {made[-1].out: tangent}
    gradients: list[int] = []
    for index, each in reversed(list(enumerate(made))):
        reads = [gradient_of[each.out]]
        if each.weight_bytes:  # the gradient of a product reads what was multiplied
            reads += each.operands
        elif rng.random() < 0.7:
            reads.append(rng.choice((each.out, *each.operands)))
        sizes_bytes = [recorder.storages[g].size_bytes for g in each.operands]
        if each.weight_bytes:
            sizes_bytes.append(each.weight_bytes)
        factor = rng.uniform(4, 60) if each.weight_bytes else 1.0
        first = recorder.run(f"back_{index}", reads, sizes_bytes, factor)
        if each.weight_bytes:
            gradients.append(first + len(each.operands))
        for place, g in enumerate(each.operands):
            gradient_of[g] = _added(recorder, gradient_of.get(g), first + place)
    return [*gradients, gradient_of[INPUT]]


def _added(recorder: _Recorder, earlier: int | None, gradient: int) -> int:
    """The sum of what has come so far and one more."""
    if earlier is None:
        return gradient
    size_bytes = recorder.storages[gradient].size_bytes
    name = f"sum_{len(recorder.operations)}"
    return recorder.run(name, (earlier, gradient), [size_bytes], 1.0)
