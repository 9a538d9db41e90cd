"""Strides as the kernels make them, where torch's fake tensors bear others.

The fake result of ``_log_softmax_backward_data`` lies like the gradient it is given, that of
``native_batch_norm_backward`` like its input; the kernels return contiguous ones. What follows is
then priced for layouts that never occur, a copy that a later operator makes of them is not
foreseen, and what should be written over in place is not. So each operation is looked at when it is
run to be measured: how its results lay then is what counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fxremat.passes.joint import Joint, copy_graph, tensors_of

RETURNS_CONTIGUOUS = frozenset({torch.ops.aten._log_softmax_backward_data.default})
"""Known without a look, for graphs whose sizes are symbols and devices that are not there."""

Lies = Callable[[fx.Node], Sequence[tuple[int, ...]]]
"""How the results of a node really lie; empty where nobody looked."""


def with_real_strides(joint: Joint, lies: Lies = lambda node: ()) -> Joint | None:
    """Correct the fake tensors of a joint graph.

    Args:
        joint: The joint graph; it is left as it was.
        lies: What was seen of its operations.

    Returns:
        A graph with the same nodes, whose fake tensors have the strides of the real ones; the
        argument itself where they have already; None where the correction cannot be followed up.
    """
    wrong = {node.name for node in joint.graph.nodes if _real_strides(node, lies)}
    if not wrong:
        return joint
    graph, _ = copy_graph(joint.graph)
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        follows = not changed.isdisjoint(node.all_input_nodes)
        try:
            with unset_fake_temporarily():  # the values have a mode of their own
                if follows:
                    node.meta["val"] = _result(node)
                if node.name in wrong:
                    _lay(node, _real_strides(node, lies))
        except Exception:  # noqa: BLE001  # a view that needs the wrong strides, a table with others
            return None
        if follows or node.name in wrong:
            changed.add(node)
    return replace(joint, module=fx.GraphModule(joint.module, graph), traced=joint.module)


def _real_strides(node: fx.Node, lies: Lies) -> Sequence[tuple[int, ...]]:
    """How its results lie where its fake ones lie otherwise; empty where they do not."""
    target, values = node.target, list(tensors_of(node))
    if not isinstance(target, OpOverload) or any(r.alias_info for r in target._schema.returns):
        return ()
    if target in RETURNS_CONTIGUOUS:
        return () if all(v.is_contiguous() for v in values) else [_packed(v) for v in values]
    if any(isinstance(n, torch.SymInt) for v in values for n in (*v.shape, *v.stride())):
        return ()
    found = lies(node)
    if len(found) != len(values) or all(map(_lies_so, values, found)):
        return ()
    return found


def _packed(value: torch.Tensor) -> tuple[int, ...]:
    return value.contiguous().stride()


def _lies_so(value: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Does a tensor have these strides, where they matter?"""
    if value.dim() != len(stride) or not value.numel():
        return True
    steps = zip(value.shape, value.stride(), stride, strict=True)
    return all(size == 1 or mine == other for size, mine, other in steps)


def _lay(node: fx.Node, strides: Sequence[tuple[int, ...]]) -> None:
    """Give the fake results of a node these strides."""
    left = iter(strides)

    def laid(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.new_empty_strided(value.shape, next(left))

    node.meta["val"] = torch.utils._pytree.tree_map(laid, node.meta["val"])


def _result(node: fx.Node) -> object:
    """What a node returns for the fake tensors of its inputs."""
    args = fx.node.map_arg(node.args, lambda n: n.meta.get("val"))
    kwargs = fx.node.map_arg(node.kwargs, lambda n: n.meta.get("val"))
    assert callable(node.target)
    found: object = node.target(*args, **kwargs)
    return found
