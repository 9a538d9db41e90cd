"""What may run twice: the reason why a forward operation must be saved, or nothing.

What cannot be proved replayable is saved, and the report says why.
"""

from collections.abc import Collection

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils.checkpoint import CheckpointPolicy

from fxremat.passes.joint import Joint, is_primal
from fxremat.passes.storages import StorageTable

# Forward operators that add with atomics on CUDA: a second run may round otherwise.
NONDETERMINISTIC_ON_CUDA = frozenset(
    {
        "aten.scatter_add", "aten.scatter_reduce", "aten.index_add", "aten.index_put",
        "aten._index_put_impl", "aten.put", "aten.bincount", "aten.histc", "aten.kthvalue",
        "aten.median", "aten.cumsum", "aten.index_reduce", "aten.scatter", "aten.segment_reduce",
    }
)  # fmt: skip


def is_random(node: fx.Node) -> bool:
    """Does it draw from a generator?

    Attention operators bear the tag for every probability; with a dropout of 0 they draw nothing.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return _argument(node, "dropout_p", default=1.0) != 0.0


def has_effect(node: fx.Node) -> bool:
    """Does it do more than return a value?"""
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.is_mutable or target.name().startswith(
            ("aten::_assert", "aten::sym_constrain")
        )
    return isinstance(target, HigherOrderOperator)


def why_saved(
    node: fx.Node, joint: Joint, storages: StorageTable, replayable: Collection[str] = ()
) -> str:
    """Why a forward operation must not run twice.

    Args:
        node: A node that allocates.
        joint: Its graph.
        storages: Of that graph.
        replayable: Custom operators that the user says compute the same each time, and no more.

    Returns:
        The reason in words; empty when it may be replayed as it is.
    """
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return f"{target.__name__} is a higher-order operator"
    if not isinstance(target, OpOverload):
        return "not an operator of torch"
    if target.namespace in ("_c10d_functional", "c10d", "c10d_functional"):
        return "a collective runs once"
    if target.namespace not in ("aten", "prims") and target.name() not in replayable:
        return f"custom operator {target.name()}, which replayable= does not name"
    if target._schema.is_mutable:
        return "it writes to its inputs"
    if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
        return "the user's checkpoint policy says MUST_SAVE"
    if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(target.tags):
        return "its size depends on data"
    written = _written_inputs(node, joint, storages)
    if written:
        return f"it reads {', '.join(written)}, which the step writes"
    if _on_cuda(node) and (
        f"aten.{target._opname}" in NONDETERMINISTIC_ON_CUDA or _is_transposed_convolution(node)
    ):
        return "a second run on CUDA may round otherwise"
    return ""


def _written_inputs(node: fx.Node, joint: Joint, storages: StorageTable) -> list[str]:
    """Primals among what a node reads, through any view, that the step writes to."""
    written = {
        g: primal.name
        for primal in joint.graph.find_nodes(op="placeholder")
        if is_primal(primal) and primal.name in joint.mutated
        for g in storages.of[primal.name]
    }
    read = {g for user in node.all_input_nodes for g in storages.of[user.name]}
    return [name for g, name in written.items() if g in read]


def _is_transposed_convolution(node: fx.Node) -> bool:
    """Is it computed like a convolution's gradient, for which cuDNN may add with atomics?"""
    if node.target is not torch.ops.aten.convolution.default:
        return False
    return bool(_argument(node, "transposed", default=False)) and not (
        torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    )


def _on_cuda(node: fx.Node) -> bool:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, tuple | list) and value else value
    return isinstance(first, torch.Tensor) and first.device.type == "cuda"


def _argument(node: fx.Node, name: str, *, default: object) -> object:
    """The value of a named argument of a call, its schema's default if not given."""
    assert isinstance(node.target, OpOverload)
    if name in node.kwargs:
        return node.kwargs[name]
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[position] if position < len(node.args) else argument.default_value
    return default
