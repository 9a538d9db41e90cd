"""Faults planted in the two graphs of a plan, to see whether they are found."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx

from fxremat.errors import VerificationError
from fxremat.passes.split import Split, split
from tests.steps import Make

aten = torch.ops.aten
Plant = Callable[[Split], None]


@dataclass(frozen=True)
class Fault:
    """A fault and what must come of it.

    Attributes:
        make: Makes the callable and its arguments.
        plant: Edits the graphs of a plan.
        error: What it must be found as, exactly.
        words: What the error says, as a pattern.
        options: Of ``verify``.
    """

    make: Make
    plant: Plant
    error: type[VerificationError]
    words: str
    options: dict[str, Any] = field(default_factory=dict)


def planted(monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    """Have every plan carry a fault from now on."""

    def faulty(joint: Any) -> Split:
        divided: Split = split(joint)
        plant(divided)
        for module in (divided.forward, divided.backward):
            module.graph.lint()
            module.recompile()
        return divided

    monkeypatch.setattr("fxremat.pipeline.split", faulty)


def named(graph: fx.Graph, part: str) -> fx.Node:
    """The first call whose name has a part."""
    found: fx.Node
    for found in graph.nodes:
        if found.op == "call_function" and part in found.name:
            return found
    raise AssertionError(f"no {part!r} among {[n.name for n in graph.nodes]}")


@contextmanager
def at_end(graph: fx.Graph) -> Iterator[fx.Node]:
    """New nodes stand before the output, which is given."""
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        yield output


def returned(output: fx.Node) -> list[Any]:
    """What a graph returns."""
    (values,) = output.args
    assert isinstance(values, tuple | list)
    return list(values)


def replace_output(graph: fx.Graph, number: int, made: Callable[[Any], Any]) -> None:
    """Return something else in one place."""
    with at_end(graph) as output:
        values = returned(output)
        values[number] = made(values[number])
        output.args = (tuple(values),)


def call(graph: fx.Graph, function: Any, *args: Any) -> fx.Node:
    """A call with the metadata of its first argument, where that is a node."""
    node = graph.call_function(function, args)
    if args and isinstance(args[0], fx.Node):
        node.meta = dict(args[0].meta)
    return node


def redraw_without_state(graphs: Split) -> None:
    """Draw anew, not from the saved state."""
    for node in graphs.backward.graph.nodes:
        if "run_with_rng_state" in str(node.target):
            node.target, node.args = node.args[1], node.args[2:]
            return
    raise AssertionError("nothing is drawn again")


def retarget(part: str, target: Any) -> Plant:
    """Compute something else in the backward."""

    def plant(graphs: Split) -> None:
        node = named(graphs.backward.graph, part)
        node.target, node.args, node.kwargs = target, node.args[:1], {}

    return plant


def read_another(graphs: Split) -> None:
    """Replay a product from its first factor twice."""
    node = named(graphs.backward.graph, "mul_replay")
    assert isinstance(node.args[0], fx.Node)
    node.args = (node.args[0], node.args[0])


def update_twice(graphs: Split) -> None:
    """Average the mean of a batch into the running mean a second time."""
    graph = graphs.forward.graph
    norm = named(graph, "native_batch_norm")
    assert callable(norm.target)
    assert "functional" in str(norm.target)
    first = next(n for n in norm.users if n.args[1] == 3)
    with graph.inserting_after(first):
        args = (*norm.args[:3], first, *norm.args[4:])
        twice = graph.call_function(norm.target, args, norm.kwargs)
    with graph.inserting_after(twice):
        second = graph.call_function(operator.getitem, (twice, 3))
    second.meta = dict(first.meta)
    (output,) = graph.find_nodes(op="output")
    output.replace_input_with(first, second)


def read_after_write(graphs: Split) -> None:
    """Save a buffer that is overwritten, and compute what was saved from it in the backward."""
    forward, backward = graphs.forward.graph, graphs.backward.graph
    saved = next(n for n in backward.find_nodes(op="placeholder") if n.name.startswith("exp"))
    made = next(n for n in forward.nodes if n.name == saved.name)
    (output,) = forward.find_nodes(op="output")
    output.replace_input_with(made, made.all_input_nodes[0])
    with backward.inserting_before(next(n for n in backward.nodes if n.op != "placeholder")):
        anew = call(backward, aten.exp.default, saved)
    saved.replace_all_uses_with(anew, delete_user_cb=lambda user: user is not anew)


def write_to_saved(graphs: Split) -> None:
    """Scale, in the backward, what it was given."""
    graph = graphs.backward.graph
    primal = next(n for n in graph.find_nodes(op="placeholder") if n.name.startswith("primals"))
    with at_end(graph):
        call(graph, aten.mul_.Tensor, primal, 1.5)


def write_an_input_twice(graphs: Split) -> None:
    """Double what is copied into an argument."""
    replace_output(graphs.forward.graph, 0, lambda n: call(n.graph, aten.add.Tensor, n, n))


def draw_once_more(graphs: Split) -> None:
    """One number that nobody reads."""
    with at_end(graphs.backward.graph):
        graphs.backward.graph.call_function(aten.rand.default, ([1],))


def drop_gradient(graphs: Split) -> None:
    replace_output(graphs.backward.graph, 0, lambda _: None)


def invent_gradient(graphs: Split) -> None:
    """Zeros where the step has no gradient."""
    graph = graphs.backward.graph
    (output,) = graph.find_nodes(op="output")
    number = returned(output).index(None)
    replace_output(graph, number, lambda _: graph.call_function(aten.zeros.default, ([6, 6],)))


LEAKED: list[torch.Tensor] = []


def keep(value: torch.Tensor) -> None:
    LEAKED.append(value)


def leak(part: str, *, backward: bool) -> Plant:
    """Keep a value for ever."""

    def plant(graphs: Split) -> None:
        graph = (graphs.backward if backward else graphs.forward).graph
        node = named(graph, part)
        with graph.inserting_after(node):
            graph.call_function(keep, (node,))

    return plant


def ulp(value: torch.Tensor) -> torch.Tensor:
    """The same but for the last bit of one element."""
    changed = value.clone()
    first = changed.view(-1)[:1]
    first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))
    return changed


class Later:
    """An operator that is right the first time."""

    def __init__(self) -> None:
        self.__name__ = "later"
        self.calls = 0

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return value if self.calls == 1 else value + 1


def fail(value: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a kernel that does not exist")


def in_output(number: int, function: Any) -> Plant:
    """Something else is returned by the forward."""

    def plant(graphs: Split) -> None:
        graph = graphs.forward.graph
        replace_output(graph, number, lambda n: call(graph, function, n))

    return plant


def in_gradient(function: Any, number: int = 0) -> Plant:
    """Something else is returned by the backward."""

    def plant(graphs: Split) -> None:
        graph = graphs.backward.graph
        replace_output(graph, number, lambda n: call(graph, function, n))

    return plant


def err_later(graphs: Split) -> None:
    in_output(1, Later())(graphs)


def columns_first(value: torch.Tensor) -> torch.Tensor:
    return value.t().contiguous().t()


def one_for_both(graphs: Split) -> None:
    """The first output stands for the second."""
    graph = graphs.forward.graph
    (output,) = graph.find_nodes(op="output")
    first = returned(output)[0]
    replace_output(graph, 1, lambda _: first)


def one_memory_for_both(graphs: Split) -> None:
    """The second output is a view of the first."""
    one_for_both(graphs)
    in_output(1, aten.alias.default)(graphs)
