"""The call that each operation and each replay makes, so that it can be priced and rewritten."""

import operator
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fxremat.costtable import Cost
from fxremat.passes.effects import is_random
from fxremat.passes.joint import target_name
from fxremat.passes.opcall import OpCall

CPU_STATE_BYTES = 5056  # torch.get_rng_state(): the Mersenne Twister's state and its bookkeeping

NATIVE_DROPOUT = torch.ops.aten.native_dropout.default
FROM_MASK = torch.ops.aten.native_dropout_backward.default


def call_of(node: fx.Node) -> OpCall:
    """What a node calls, with values in place of nodes."""
    assert callable(node.target), f"{node.name} calls nothing"
    return OpCall(
        node.target,
        fx.node.map_arg(node.args, lambda n: n.meta.get("val")),
        fx.node.map_arg(node.kwargs, lambda n: n.meta.get("val")),
        node.meta.get("val"),
    )


def has_mask(node: fx.Node) -> bool:
    """Is it a dropout whose result can be made again from its mask?"""
    if node.target is not NATIVE_DROPOUT or node.args[2] is False:
        return False
    if float(node.args[1]) >= 1.0:  # type: ignore[arg-type]  # why: fx types arguments loosely
        return False  # its result is +0 everywhere; a product with the mask has signs
    return {user.args[1] for user in node.users if user.target is operator.getitem} == {0, 1}


def mask_arguments(node: fx.Node, value: Any, mask: Any) -> tuple[Any, Any, float]:
    """Arguments of ``native_dropout_backward`` that give the result of a ``native_dropout``.

    Both multiply by the mask and by ``1 / (1 - p)``. On the CPU aten computes that scale in double.
    On CUDA its kernel rounds ``1 - p`` to float first, unless it works in double: for p = 0.15 the
    scales differ in the last bit.
    """
    keep = 1.0 - float(node.args[1])  # type: ignore[arg-type]  # why: fx types arguments loosely
    result = node.meta["val"][0]
    if result.device.type == "cuda" and result.dtype != torch.float64:
        (keep,) = struct.unpack("f", struct.pack("f", keep))
    return value, mask, 0.0 if keep == 0.0 else 1.0 / keep


def from_mask_call(node: fx.Node) -> OpCall:
    """The call that makes a dropout's result again from its mask."""
    value = node.args[0].meta["val"]  # type: ignore[union-attr]  # why: the first argument is a node
    return OpCall(FROM_MASK, mask_arguments(node, value, node.meta["val"][1]), {}, value)


def state_bytes(node: fx.Node) -> int | None:
    """Device bytes of the generator state that a redraw needs; None where it cannot be redrawn."""
    if not is_random(node) or not isinstance(node.target, OpOverload):
        return None
    devices = {
        leaf.device.type
        for argument in node.all_input_nodes
        if isinstance(leaf := argument.meta.get("val"), torch.Tensor)
    }
    devices |= {torch.device(str(d)).type for d in [node.kwargs.get("device")] if d is not None}
    if devices == {"cpu"}:
        return CPU_STATE_BYTES
    return 0 if devices == {"cuda"} else None  # CUDA's states are host tensors


def describe(node: fx.Node) -> str:
    """A node with its operator, for error messages."""
    return f"{node.name!r} ({target_name(node)})"


Price = Callable[[OpCall], Cost]
"""What a call costs."""
