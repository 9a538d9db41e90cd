"""The split of a rewritten joint graph into a forward and a backward.

``forward: primals -> (outputs, saved)``, ``backward: (saved, tangents) -> gradients``, with the
conventions of AOTAutograd: saved tensors stand after the forward's outputs, those that it saved
without a version check last; symbolic sizes come after them, and first into the backward. All of
them are handed on, so that their number is the same under every schedule.
"""

from dataclasses import dataclass

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat.passes.joint import is_primal, is_tangent
from fxremat.passes.rewrite import Rewritten
from fxremat.passes.symbolic import is_size, symbolic_again


@dataclass(frozen=True)
class Split:
    """The two graphs of one step.

    Attributes:
        forward: Primals in, outputs and saved values out.
        backward: Saved values and tangents in, gradients out.
        saved: Names of the saved values, in order.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: tuple[str, ...]


def split(joint: Rewritten) -> Split:
    """Divide a rewritten joint graph where its backward begins.

    Args:
        joint: The rewritten joint graph; it is left as it was.

    Returns:
        Both graphs. What is saved follows from the graph: what the backward reads of the forward.
    """
    graph = joint.module.graph
    (output,) = graph.find_nodes(op="output")
    returned = list(pytree.arg_tree_leaves(*output.args))
    descriptions = list(output.meta.get("desc", [None] * len(returned)))
    count = joint.num_forward_outputs
    placeholders = list(graph.find_nodes(op="placeholder"))
    primals = [node for node in placeholders if is_primal(node)]
    tangents = [node for node in placeholders if is_tangent(node)]
    forward = [
        n
        for n in graph.nodes
        if n.op not in ("placeholder", "output") and n.name not in joint.backward
    ]
    backward = [node for node in graph.nodes if node.name in joint.backward]
    saved = _crossing(primals, forward, backward, returned[count:])
    sizes = [node for node in primals if is_size(node)]
    handed = [*saved, *sizes]
    forward_graph = _extract(
        joint,
        primals,
        forward,
        returned[:count] + handed,
        descriptions[:count] + [None] * len(handed),
    )
    backward_graph = _extract(
        joint, sizes + saved + tangents, backward, returned[count:], descriptions[count:]
    )
    for part in (forward_graph, backward_graph):
        symbolic_again(part.graph)
    return Split(forward_graph, backward_graph, tuple(node.name for node in saved))


def _crossing(
    primals: list[fx.Node],
    forward: list[fx.Node],
    backward: list[fx.Node],
    gradients: list[fx.Node | None],
) -> list[fx.Node]:
    """What the backward reads of the forward, in graph order, version-checked values first."""
    read = {user for node in backward for user in node.all_input_nodes}
    read.update(node for node in gradients if isinstance(node, fx.Node))
    crossing = [node for node in (*primals, *forward) if node in read and not is_size(node)]
    return sorted(crossing, key=_unchecked)


def _unchecked(node: fx.Node) -> bool:
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def _extract(
    joint: Rewritten,
    inputs: list[fx.Node],
    body: list[fx.Node],
    outputs: list[fx.Node | None],
    descriptions: list[object],
) -> fx.GraphModule:
    """A graph of its own from a run of nodes."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in body:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    result = graph.output(tuple(copies[n] if isinstance(n, fx.Node) else n for n in outputs))
    result.meta["desc"] = descriptions
    graph.lint()
    return fx.GraphModule(joint.module, graph)


def saved_tensors(divided: Split) -> tuple[torch.Tensor, ...]:
    """Fake tensors of the saved values, in order."""
    nodes = list(divided.backward.graph.find_nodes(op="placeholder"))[: len(divided.saved)]
    return tuple(node.meta["val"] for node in nodes)
