"""The reference: AOTAutograd's default partition, run by the same executor.

It is torch's own partitioner, so that a fault of ours cannot hide in it, with two repairs, both
since fx counts random operators as impure: the partition leaves dead ones in the backward, where
they would draw from the generator once more, and takes those that nobody reads for saved values.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._functorch.partitioners import default_partition

from fxremat.passes.effects import has_effect, is_random
from fxremat.passes.joint import Joint, copy_graph
from fxremat.passes.phases import forward_names


def reference_partition(
    module: fx.GraphModule,
    inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Divide a joint graph as AOTAutograd does by default.

    Args:
        module: The joint graph.
        inputs: Its example inputs.
        num_fwd_outputs: How many outputs belong to the forward.
        static_lifetime_input_indices: As AOTAutograd passes it.

    Returns:
        Forward and backward.
    """
    indices = list(static_lifetime_input_indices or ())
    read, unread = _without_unread(module)
    forward, backward = default_partition(
        read,
        inputs,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_indices=indices,
    )
    draws = unread & forward_names(Joint(module, num_fwd_outputs))
    _keep_draws([n for n in module.graph.nodes if n.name in draws and is_random(n)], forward)
    for node in reversed(backward.graph.nodes):
        if node.op == "call_function" and not node.users and not has_effect(node):
            backward.graph.erase_node(node)  # a draw, or what has taken a part of its result
    backward.recompile()
    return forward, backward


def _without_unread(joint: fx.GraphModule) -> tuple[fx.GraphModule, set[str]]:
    """The joint graph less what nobody reads, and the names of that.

    The partition would take unread draws for saved values, and run them in the backward as well.
    """
    unread: set[str] = set()
    graph, _ = copy_graph(joint.graph)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and not has_effect(node):
            unread.add(node.name)
            graph.erase_node(node)
    return fx.GraphModule(joint, graph), unread


def _keep_draws(draws: Sequence[fx.Node], forward: fx.GraphModule) -> None:
    """Put the draws of a joint graph that nobody reads where eager makes them."""
    present = {node.name: node for node in forward.graph.nodes}
    (output,) = forward.graph.find_nodes(op="output")
    for node in draws:
        nodes = list(node.graph.nodes)
        later = (present[n.name] for n in nodes[nodes.index(node) :] if n.name in present)
        after = next((n for n in later if n.op == "call_function"), output)
        with forward.graph.inserting_before(after):
            _copy(node, forward.graph, present)
    forward.recompile()


def _copy(node: fx.Node, graph: fx.Graph, present: dict[str, fx.Node]) -> fx.Node:
    """A copy of a node, after copies of what it needs that is not there."""
    if node.name not in present:
        for needed in node.all_input_nodes:
            _copy(needed, graph, present)
        present[node.name] = graph.node_copy(node, lambda n: present[n.name])
    return present[node.name]
