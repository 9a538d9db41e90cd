"""Which nodes belong to the forward and which to the backward."""

from torch import fx

from fxremat.passes.joint import Joint, is_primal, is_tangent


def forward_names(joint: Joint) -> frozenset[str]:
    """Names of the nodes that the forward runs.

    A node belongs to the forward when AOTAutograd traced it there or a forward output needs it, and
    it does not depend on a tangent. The rest of the graph is the backward. This is the division of
    AOTAutograd's default partition.

    Args:
        joint: The joint graph.

    Returns:
        Names, primals and constants included.
    """
    needs_tangent: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if is_tangent(node) or any(user in needs_tangent for user in node.all_input_nodes):
            needs_tangent.add(node)
    needed: set[fx.Node] = {node for node in joint.forward_outputs if isinstance(node, fx.Node)}
    for node in reversed(joint.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return frozenset(
        node.name
        for node in joint.graph.nodes
        if node.op != "output"
        and node not in needs_tangent
        and (
            is_primal(node)
            or node in needed
            or node.meta.get("partitioner_tag") in ("is_forward", "must_be_in_forward")
        )
    )
