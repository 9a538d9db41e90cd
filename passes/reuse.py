"""Backward operations that can write their result over an input that nobody reads afterwards.

The backward of a loss over a large vocabulary holds tensors of the logits' size three times over,
and every residual connection adds two gradients into a third. Where an operation reads an input
elementwise and is its last reader, its ``out=`` overload can put the result there: the same kernel
on the same values gives the same bits, and one tensor less is held.

Only what the backward itself has made is overwritten. Saved values may be read by a second backward
(``retain_graph``), tangents belong to autograd, and whether a replayed value dies at a place is for
the planner to say.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fxremat.passes.joint import Joint
from fxremat.passes.storages import StorageTable
from fxremat.passes.symbolic import place_of

try:
    from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
except ImportError as error:  # pragma: no cover - depends on the release of torch
    raise ImportError(
        f"fxremat needs torch._C._dispatch_has_kernel_for_dispatch_key, which torch "
        f"{torch.__version__} does not have; torch 2.11 to 2.13 do"
    ) from error

# Not elementwise, but they read a row of the gradient for its sum before they write it, and each
# element of it once more as they write that element (aten/src/ATen/native: cpu/SoftMaxKernel.cpp,
# cuda/SoftMax.cu, cuda/PersistentSoftmax.cuh).
ROW_BY_ROW: Mapping[OpOverload, int] = {
    torch.ops.aten._log_softmax_backward_data.default: 0,
    torch.ops.aten._softmax_backward_data.default: 0,
}


@dataclass(frozen=True, slots=True)
class Reuse:
    """How an operation writes over an input.

    Attributes:
        argument: Name of the node that it writes over.
        target: Its overload with an ``out=`` argument.
        out: Name of that argument.
    """

    argument: str
    target: OpOverload
    out: str


def find_reuses(
    joint: Joint,
    storages: StorageTable,
    forward: frozenset[str],
    reads: Mapping[str, tuple[int, ...]],
) -> dict[str, Reuse]:
    """Find the backward operations that can write over an input.

    Args:
        joint: The joint graph.
        storages: Its storages.
        forward: Names of the forward's nodes.
        reads: For each operation in the order that it runs, the storages that it reads.

    Returns:
        Name of an operation -> what it writes over.
    """
    nodes = {node.name: node for node in joint.graph.nodes}
    last = {g: name for name, read in reads.items() for g in read}
    returned = {g for n in joint.outputs if isinstance(n, fx.Node) for g in storages.of[n.name]}

    def is_free(g: int, reader: str) -> bool:
        """Does the storage end with this reader, and did the backward make it?"""
        owner = nodes[storages.owner[g]]
        made_here = owner.op == "call_function" and owner.name not in forward and _is_aten(owner)
        return made_here and g not in returned and last.get(g) == reader

    found: dict[str, Reuse] = {}
    for name in reads:
        node = nodes[name]
        if name in forward or len(storages.creates[name]) != 1 or not _is_aten(node):
            continue
        if node.kwargs:  # keyword arguments, such as a factor of add, are rare in a backward
            continue
        for argument in _candidates(node):
            (g,) = storages.of[argument.name]
            others = [n for n in node.all_input_nodes if g in storages.of[n.name]]
            alike = all(_geometry(n) == _geometry(argument) for n in others)
            alike = alike and place_of(argument) == place_of(node)
            if alike and is_free(g, name):
                overload = out_overload(node.target, _device(node))
                if overload is not None:
                    found[name] = Reuse(argument.name, *overload)
                break
    return found


def _is_aten(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten"


def _candidates(node: fx.Node) -> list[fx.Node]:
    """Inputs with the geometry of the result that fill their storage, where it may be written.

    With a result to write to, an elementwise kernel may walk its operands in another order, or not
    in vectors, where their strides leave a choice (complex quotients then differ in their last
    bits). So all of them must lie alike. A kernel of rows copies what is not contiguous first, and
    its fake result may bear other strides than the real one.
    """
    target = node.target
    result = node.meta.get("val")
    assert isinstance(target, OpOverload)  # by _is_aten
    if not isinstance(result, torch.Tensor) or not _lie_alike(target, result, _operands(node)):
        return []
    if any(place_of(n) != place_of(node) for n in node.all_input_nodes if not _is_single(n)):
        return []  # they lie alike at these sizes only
    if target in ROW_BY_ROW:
        given = [node.args[ROW_BY_ROW[target]]]
    elif torch.Tag.pointwise in target.tags:
        given = list(node.args)
    else:
        return []
    wanted = _geometry(node)
    return [
        argument
        for argument in given
        if isinstance(argument, fx.Node) and wanted is not None and _geometry(argument) == wanted
    ]


def _is_single(node: fx.Node) -> bool:
    """Is it a number, or a tensor of one element at any sizes?"""
    sizes = next(iter(place_of(node)), ())
    return all(size == 1 for size in sizes)


def _operands(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that it reads."""
    values = (source.meta.get("val") for source in node.all_input_nodes)
    return [value for value in values if isinstance(value, torch.Tensor)]


def _lie_alike(target: OpOverload, result: torch.Tensor, operands: Iterable[torch.Tensor]) -> bool:
    """Do the operands leave a kernel one way to walk them, that of its result?"""
    if target in ROW_BY_ROW:
        return all(t.is_contiguous() and t.shape == result.shape for t in (result, *operands))
    place = (result.shape, result.stride())
    return all(
        t.dtype in (result.dtype, torch.bool) and (t.numel() == 1 or (t.shape, t.stride()) == place)
        for t in operands
    )


def write_over(
    functional: OpOverload, overload: OpOverload, out: str, written: torch.Tensor, *args: Any
) -> Any:
    """Run an operation over one of its inputs, if it lies as the trace said.

    A fake tensor can bear other strides than the real one (that of ``_log_softmax_backward_data``
    does, where the gradient is not contiguous). The real ones are looked at once more.

    Args:
        functional: The operator.
        overload: Its overload with an ``out=`` argument.
        out: Name of that argument.
        written: Which input to write over.
        *args: The operator's arguments.

    Returns:
        What the operator returns.
    """
    operands = [value for value in args if isinstance(value, torch.Tensor)]
    if _lie_alike(functional, written, operands):
        return overload(*args, **{out: written})
    return functional(*args)


def _geometry(node: fx.Node) -> tuple[object, ...] | None:
    """Equal for tensors that lay the same elements out alike; None unless it fills its storage."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.storage_offset() != 0:
        return None
    if value.is_conj() or value.is_neg():
        return None  # it shows other values than it stores
    if value.numel() * value.element_size() != value.untyped_storage().nbytes():
        return None
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return None  # it repeats elements, or leaves some out
        expected *= size
    return tuple(value.shape), value.stride(), value.dtype, value.device


def _device(node: fx.Node) -> str:
    device: torch.device = node.meta["val"].device
    return device.type


@lru_cache(maxsize=1024)
def out_overload(target: OpOverload, device_type: str) -> tuple[OpOverload, str] | None:
    """The overload of an operator that writes where it is told to.

    Args:
        target: The functional overload.
        device_type: "cpu" or "cuda".

    Returns:
        The overload and the name of its ``out=`` argument; None where there is none with a kernel
        of its own (torch makes the others by computing a result and copying it).
    """
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    packet = target.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        outs = [a.name for a in arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if len(outs) == 1 and rest == wanted:
            kernel = has_kernel(overload.name(), device_type.upper())
            return (overload, outs[0]) if kernel else None
    return None
