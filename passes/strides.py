"""Strides as the kernels make them, where torch's fake tensors bear others.

The fake result of ``_log_softmax_backward_data`` lies like the gradient it is given; the kernels
return a contiguous one. What follows is then priced for layouts that never occur, and a copy that a
later operator makes of them is not foreseen. Gradients come transposed to a log-softmax wherever a
model moves the time axis to the front afterwards (CTC) or the classes to the end.
"""

from dataclasses import replace

import torch
from torch import fx

from fxremat.passes.joint import Joint, copy_graph

RETURNS_CONTIGUOUS = frozenset({torch.ops.aten._log_softmax_backward_data.default})


def with_real_strides(joint: Joint) -> Joint:
    """Correct the fake tensors of a joint graph.

    Args:
        joint: The joint graph; it is left as it was.

    Returns:
        A graph with the same nodes, whose fake tensors have the strides of the real ones; the
        argument itself where they have already, or where the correction cannot be followed up.
    """
    if not any(_is_wrong(node) for node in joint.graph.nodes):
        return joint
    graph, _ = copy_graph(joint.graph)
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if changed.isdisjoint(node.all_input_nodes) and not _is_wrong(node):
            continue
        try:
            value = _result(node)
        except RuntimeError:  # a view that needs the wrong strides: the step itself fails there
            return joint
        if node.target in RETURNS_CONTIGUOUS and isinstance(value, torch.Tensor):
            value = value.contiguous()
        node.meta["val"] = value
        changed.add(node)
    return replace(joint, module=fx.GraphModule(joint.module, graph), traced=joint.module)


def _is_wrong(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return (
        node.target in RETURNS_CONTIGUOUS
        and isinstance(value, torch.Tensor)
        and not value.is_contiguous()
    )


def _result(node: fx.Node) -> object:
    """What a node returns for the fake tensors of its inputs."""
    args = fx.node.map_arg(node.args, lambda n: n.meta.get("val"))
    kwargs = fx.node.map_arg(node.kwargs, lambda n: n.meta.get("val"))
    assert callable(node.target)
    found: object = node.target(*args, **kwargs)
    return found
