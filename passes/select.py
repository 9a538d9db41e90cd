"""``differentiate``: which outputs a backward will go through; the rest of them is detached.

While Dynamo traces, the selected tensors are marked with an operator that computes nothing; in the
graph that it hands to the backend, every other output is then detached and the mark removed. That
way it does not matter how the model packs its outputs (tuples, dataclasses, caches).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat.errors import OptionError
from fxremat.passes.joint import copy_graph

Key = str | int
WITHOUT_BACKWARD = "no backward"  # such calls often lack what the training step's output has


@torch.library.custom_op("fxremat::select", mutates_args=())
def select(tensors: list[torch.Tensor], names: str) -> torch.Tensor:
    """Marks tensors while tracing; never runs in a step."""
    return torch.empty(0)


@select.register_fake
def _(tensors: list[torch.Tensor], names: str) -> torch.Tensor:
    return torch.empty(0)


def mark(output: Any, keys: tuple[Key, ...]) -> torch.Tensor:
    """Mark the tensors below the given entries of an output. Dynamo traces this.

    Args:
        output: What the optimised callable returned.
        keys: Dict keys, attribute names or positions at its top level.

    Returns:
        An empty tensor that stands for the mark; it must be returned from the traced function.
    """
    found: list[torch.Tensor] = []
    if not torch.is_grad_enabled():
        return select(found, WITHOUT_BACKWARD)  # type: ignore[no-any-return]  # why: custom operators are untyped
    absent = ""
    for key in keys:
        entry = _entry(output, key)
        if entry is None:
            absent = absent + "," + str(key)
        else:
            found.extend(
                leaf for leaf in pytree.tree_leaves(entry) if isinstance(leaf, torch.Tensor)
            )
    marked: torch.Tensor = select(found, absent + ";" + ",".join(_names(output)))
    return marked


def _entry(output: Any, key: Key) -> Any:
    if isinstance(output, torch.Tensor):
        return output if key == 0 else None
    if isinstance(output, Mapping) and key in output:
        return output[key]
    if isinstance(key, str):
        named = not isinstance(output, Mapping | tuple | list) or key in getattr(
            output, "_fields", ()
        )
        return getattr(output, key, None) if named else None
    if isinstance(output, Mapping):
        values = list(output.values())
        return values[key] if -len(values) <= key < len(values) else None
    if isinstance(output, Sequence) and -len(output) <= key < len(output):
        return output[key]
    return None


def _names(output: Any) -> list[str]:
    if isinstance(output, Mapping):
        return [str(name) for name in output]
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return list(output._fields)
    if isinstance(output, tuple | list):
        return [str(position) for position in range(len(output))]
    return ["0"]


def detach_the_rest(graph: fx.GraphModule, keys: tuple[Key, ...]) -> fx.GraphModule:
    """Detach every output of a Dynamo graph that was not marked.

    Args:
        graph: The graph as Dynamo hands it to a backend; it is left as it was.
        keys: What was asked for, for the error.

    Returns:
        A graph with the same outputs, of which only the marked ones need gradients.

    Raises:
        OptionError: An entry does not exist, or holds no tensor.
    """
    graph = fx.GraphModule(graph, copy_graph(graph.graph)[0])
    marks = graph.graph.find_nodes(op="call_function", target=torch.ops.fxremat.select.default)
    marks += [n for n in graph.graph.nodes if n.op == "call_function" and n.target is select]
    if not marks:
        raise OptionError("the traced output has nothing to select from.", "differentiate", keys)
    (node,) = marks
    if node.args[1] == WITHOUT_BACKWARD:
        _replace(graph, node)
        graph.recompile()
        return graph
    absent, _, names = str(node.args[1]).partition(";")
    known = tuple(name for name in names.split(",") if name)
    if absent or not node.args[0]:
        wrong = absent.strip(",") or ", ".join(map(str, keys))
        raise OptionError(
            f"differentiate names {wrong!r}, which is not a tensor of the output; entries "
            "that exist: "
            f"{', '.join(known)}.",
            "differentiate",
            keys,
            known,
        )
    selected = set(node.args[0])
    (output,) = graph.graph.find_nodes(op="output")
    _replace(graph, node)
    with graph.graph.inserting_before(output):
        output.args = fx.node.map_arg(
            output.args,
            lambda n: n if n in selected or n.op == "placeholder" else _detached(graph.graph, n),
        )
    graph.recompile()
    return graph


def _replace(graph: fx.GraphModule, node: fx.Node) -> None:
    """An empty tensor in place of the mark."""
    with graph.graph.inserting_before(node):
        empty = graph.graph.call_function(torch.empty, ((0,),))
        empty.meta.update(node.meta)
    node.replace_all_uses_with(empty)
    graph.graph.erase_node(node)


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor) and not value.requires_grad:
        return node
    detached = graph.call_method("detach", (node,))
    detached.meta.update(node.meta)
    return detached
