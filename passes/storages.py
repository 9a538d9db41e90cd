"""Which node allocates which storage, and which nodes are views of it.

The joint graph is the place to resolve aliases: in a split backward a saved view of a parameter
looks like a storage of its own.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from fxremat.errors import UnsupportedGraphError
from fxremat.passes.joint import Joint, is_tangent, source_of, target_name, tensors_of
from fxremat.passes.unsized import unsized


@dataclass(frozen=True)
class StorageTable:
    """The storages of a joint graph, numbered in graph order.

    Attributes:
        owner: For each storage, the name of the node that allocates it or brings it in.
        size_bytes: For each storage, its bytes as the allocator rounds them. [bytes]
        of: For each node, the storages that its result refers to, in order of the result.
        creates: For each node, the storages that it allocates.
    """

    owner: tuple[str, ...]
    size_bytes: tuple[int, ...]
    of: dict[str, tuple[int, ...]]
    creates: dict[str, tuple[int, ...]]

    def allocates(self, node: fx.Node) -> bool:
        """Does the node allocate, so that it is an operation?"""
        return node.op == "call_function" and bool(self.creates[node.name])


def find_storages(joint: Joint, written: Mapping[str, str] | None = None) -> StorageTable:
    """Resolve every alias of a joint graph.

    Args:
        joint: The joint graph, with fake tensors in ``meta["val"]``.
        written: Node -> the node over which it writes its result, instead of allocating one.

    Returns:
        The table.

    Raises:
        UnsupportedGraphError: A tensor has no storage, or a size that is not known.
    """
    number: dict[StorageWeakRef, int] = {}
    owner: list[str] = []
    sizes: list[int] = []
    of: dict[str, tuple[int, ...]] = {}
    creates: dict[str, tuple[int, ...]] = {}
    twins: dict[StorageWeakRef, set[int]] = {}
    for node in joint.graph.nodes:
        if node.op == "output":
            continue
        mine: list[int] = []
        new: list[int] = []
        masked = _masked_out(node)
        for tensor in tensors_of(node):
            key = StorageWeakRef(_storage(node, tensor))
            key = joint.same.get(key, key)
            if written and node.name in written:
                (number[key],) = of[written[node.name]]
            if key in number and is_tangent(node):
                twins.setdefault(key, {number.pop(key)}).add(len(owner))
            elif key in twins:
                number[key] = _twin_behind(node, of, twins[key])
            if key not in number:
                number[key] = len(owner)
                owner.append(node.name)
                fake_bytes = 0 if id(tensor) in masked else _size_bytes(node, tensor)
                sizes.append(_kept_bytes(node, of, sizes) or fake_bytes)
                new.append(number[key])
            mine.append(number[key])
        of[node.name], creates[node.name] = tuple(mine), tuple(new)
    _check_tuples(joint, creates)
    return StorageTable(tuple(owner), tuple(sizes), of, creates)


def _twin_behind(node: fx.Node, of: Mapping[str, tuple[int, ...]], twins: set[int]) -> int:
    """Which of several tangents a node is a view of, that share a storage in the trace alone.

    An output that is returned twice has one fake tensor and two tangents.
    """
    behind = (g for argument in node.all_input_nodes for g in of[argument.name] if g in twins)
    return next(behind, min(twins))


def _storage(node: fx.Node, tensor: torch.Tensor) -> torch.UntypedStorage:
    if tensor.layout is not torch.strided:
        raise _not_strided(node, tensor)
    return tensor.untyped_storage()


def _not_strided(node: fx.Node, tensor: torch.Tensor) -> UnsupportedGraphError:
    line = source_of(node) or "an unknown line"
    of_forward = node.meta.get("fwd_source_fn_stack") or ()  # only nodes of a backward have it
    if any("embedding" in str(each).lower() for each in of_forward):
        words = f"the gradient of an embedding at {line} is a sparse tensor ({tensor.layout})"
        remedy = "say sparse=False to that nn.Embedding or nn.EmbeddingBag"
    else:
        words = f"{node.name!r} ({target_name(node)}) at {line} is a tensor of {tensor.layout}"
        remedy = "compute that value outside of the optimised callable"
    return UnsupportedGraphError(
        f"{words}, and plans know strided tensors only.\nRemedy: {remedy}.",
        node.name,
        target_name(node),
        source_of(node),
    )


def _masked_out(node: fx.Node) -> set[int]:
    """Which of its results a backward operator is told to leave out, by id.

    Some fake kernels return them all the same (``native_batch_norm_backward``).
    """
    target, results = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload) or not isinstance(results, tuple | list):
        return set()
    mask: object = node.kwargs.get("output_mask")
    for argument, value in zip(target._schema.arguments, node.args, strict=False):
        mask = value if argument.name == "output_mask" else mask
    if not isinstance(mask, list | tuple) or len(mask) != len(results):
        return set()
    return {id(result) for result, wanted in zip(results, mask, strict=True) if wanted is False}


_SCATTERS = ("copy", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter")


def _kept_bytes(node: fx.Node, of: dict[str, tuple[int, ...]], sizes: list[int]) -> int:
    """What the result holds since it keeps its first argument's place in a storage. [bytes]

    These operators clone the whole storage that the argument is a part of
    (``clone_preserve_strides``), unless elements of the argument share memory. Fake tensors do not
    always know how large that is: those of torch's cache of fake results forget it.
    """
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return 0
    first = node.args[0] if node.args else None
    if target._opname not in _SCATTERS or not isinstance(first, fx.Node):
        return 0
    value = first.meta.get("val")
    if not isinstance(value, torch.Tensor) or len(of[first.name]) != 1:
        return 0
    shares = any(n > 1 and step == 0 for n, step in zip(value.shape, value.stride(), strict=True))
    return 0 if shares else sizes[of[first.name][0]]


def _size_bytes(node: fx.Node, tensor: torch.Tensor) -> int:
    size_bytes = tensor.untyped_storage().nbytes()
    if is_tangent(node) and tensor.numel():  # of a part of a storage, it has the part's size
        size_bytes = span_bytes(tensor)
    if not isinstance(size_bytes, int):
        raise unsized(node, tensor)
    return round_up(size_bytes, tensor.device)


def span_bytes(tensor: torch.Tensor) -> int:
    """From the first element of a tensor that has some to its last: what one laid out alike takes.

    [bytes]
    """
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * step for n, step in pairs)) * tensor.element_size()


CUDA_BLOCK_BYTES = 512  # c10/cuda/CUDACachingAllocator.h: kMinBlockSize


def round_up(size_bytes: int, device: torch.device) -> int:
    """Bytes that the allocator of a device counts for a request of that many. [bytes]"""
    if device.type != "cuda":
        return size_bytes
    return -(-size_bytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES


def _check_tuples(joint: Joint, creates: dict[str, tuple[int, ...]]) -> None:
    """Parts of a result belong to the node that returns it: ``getitem`` allocates nothing."""
    for node in joint.graph.nodes:
        if node.target is operator.getitem and creates[node.name]:
            line = source_of(node) or "an unknown line"
            raise UnsupportedGraphError(
                "a region that is marked with torch.compiler.nested_compile_region is called more "
                f"than once (at {line}), and torch's trace does not say what of the later calls "
                "shares memory.\nRemedy: take the mark away; a plan needs no regions.",
                node.name,
                target_name(node),
                source_of(node),
            )


def is_held_by_caller(node: fx.Node) -> bool:
    """Is it memory that exists before the step: a primal or a constant?"""
    return node.op == "get_attr" or (node.op == "placeholder" and not is_tangent(node))
