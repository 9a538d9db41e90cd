"""What autograd copies when it stores gradients.

``AccumulateGrad`` keeps the tensor that the backward returned if its layout is the parameter's and
nobody else refers to it; otherwise it copies (torch/csrc/autograd/functions/accumulate_grad.h,
``obeys_layout_contract``). A sum's gradient, for example, is one number expanded, and is copied;
so are the slices of the gradient of a ``cat`` of weights, which share one storage until the last.
"""

from collections import Counter

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    TangentAOTInput,
)
from torch.utils import _pytree as pytree

from fxremat.passes.joint import Joint, is_primal
from fxremat.passes.storages import StorageTable, round_up
from fxremat.passes.tangents import outlives_backward

_BLOCK = 60  # rows and columns


def copied_bytes(joint: Joint, storages: StorageTable) -> int:
    """The most that copies of gradients add after the backward has returned.

    In which order autograd stores them is not known. An original is there until the last gradient
    that shares its storage has been stored, and longer where others hold it.

    Args:
        joint: The joint graph.
        storages: Of that graph.

    Returns:
        Bytes of copies less those of originals that are gone, at the worst moment. [bytes]
    """
    pairs = [
        (gradient, primal)
        for gradient, primal in _pairs(joint)
        if isinstance(gradient, fx.Node) and isinstance(primal.meta.get("val"), torch.Tensor)
    ]
    uses = Counter(gradient for gradient, _ in pairs)
    views = Counter(tuple(storages.of[gradient.name]) for gradient in uses)
    outside = _outside(joint)
    held = {g for node in outside for g in storages.of[node.name]}
    copies: dict[tuple[int, ...], list[int]] = {}
    block_bytes = 0
    for gradient, primal in pairs:
        key = tuple(storages.of[gradient.name])
        value = gradient.meta["val"]
        if _fits(value, primal.meta["val"]) and gradient not in outside:
            # The last of several variables takes the tensor itself, if it has no views besides.
            uses[gradient] -= 1 if views[key] == 1 or uses[gradient] == 1 else 0
            if not uses[gradient]:
                held.update(key)
                continue
        size_bytes = primal.meta["val"].numel() * value.element_size()
        copies.setdefault(key, []).append(round_up(size_bytes, value.device))
        block_bytes = max(block_bytes, _block_bytes(value, primal.meta["val"]))
    stay_bytes = most_bytes = 0
    for key, sizes_bytes in copies.items():
        all_bytes = sum(sizes_bytes)
        left_bytes = all_bytes  # when the last of them has been stored, or all but one
        if held.isdisjoint(key):
            gone_bytes = sum(storages.size_bytes[g] for g in key)
            left_bytes = max(all_bytes - gone_bytes, all_bytes - min(sizes_bytes), 0)
            if len(sizes_bytes) == 1:
                left_bytes = max(all_bytes - gone_bytes, 0)
        stay_bytes += left_bytes
        most_bytes = max(most_bytes, all_bytes - left_bytes)
    return stay_bytes + most_bytes + block_bytes


def _block_bytes(gradient: torch.Tensor, variable: torch.Tensor) -> int:
    """Of a transposed matrix the CPU copies blocks (aten/src/ATen/native/Copy.cpp). [bytes]"""
    turned = (
        gradient.device.type == "cpu"
        and gradient.dim() == 2
        and gradient.numel() >= _BLOCK**2
        and gradient.stride() == (1, gradient.shape[0])
        and variable.is_contiguous()
    )
    return _BLOCK**2 * gradient.element_size() if turned else 0


def _outside(joint: Joint) -> set[fx.Node]:
    """What others hold when the backward ends: inputs, outputs, tangents that outlive it."""
    inner = joint.updates | joint.lent
    found = {n for i, n in enumerate(joint.forward_outputs) if n is not None and i not in inner}
    for node in joint.graph.find_nodes(op="placeholder"):
        if is_primal(node) or outlives_backward(node.meta.get("val")):
            found.add(node)
    return found


def _pairs(joint: Joint) -> list[tuple[fx.Node | None, fx.Node]]:
    """Gradients with their primals; tokens of effects stand among the primals without one."""
    primals = [node for node in joint.graph.find_nodes(op="placeholder") if is_primal(node)]
    described = joint.output_descriptions[joint.num_forward_outputs :]
    if not any(isinstance(each, GradAOTOutput) for each in described):
        return list(zip(joint.gradients, primals, strict=False))
    by_description = {node.meta.get("desc"): node for node in primals}
    return [
        (gradient, by_description[each.grad_of])
        for gradient, each in zip(joint.gradients, described, strict=True)
        if isinstance(each, GradAOTOutput) and each.grad_of in by_description
    ]


def _fits(gradient: torch.Tensor, variable: torch.Tensor) -> bool:
    """Is a gradient laid out as its variable wants it?"""
    if not _is_dense(variable):
        return gradient.is_contiguous()
    if gradient.dim() != variable.dim():  # a broadcast one, which autograd sums
        return False
    return all(
        size == 1 or mine == wanted
        for size, mine, wanted in zip(
            gradient.shape, gradient.stride(), variable.stride(), strict=True
        )
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Do its elements fill one piece of memory, each once, in some order of its dimensions?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def drop_gradients_of_writes(
    module: fx.GraphModule, num_forward_outputs: int, leaves: frozenset[int]
) -> None:
    """Let a leaf that the step writes to have no gradient by that, as in eager.

    A leaf can only be written to without gradients, but AOTAutograd's backward hands it the tangent
    of its new value, which is zero: an optimizer would take that for a gradient and move it.

    Args:
        module: A joint graph as AOTAutograd traced it; its output is edited.
        num_forward_outputs: How many outputs belong to the forward.
        leaves: Arguments that others have not computed.
    """
    (output,) = module.graph.find_nodes(op="output")
    described = list(output.meta.get("desc", ()))

    def is_of_write(position: int, value: object) -> bool:
        each = described[position] if position < len(described) else None
        if position < num_forward_outputs or not isinstance(each, GradAOTOutput):
            return False
        source = each.grad_of
        tangent = value.meta.get("desc") if isinstance(value, fx.Node) else None
        return (
            isinstance(source, PlainAOTInput)
            and source.idx in leaves
            and isinstance(tangent, TangentAOTInput)
            and isinstance(tangent.output, InputMutationAOTOutput)
            and tangent.output.mutated_input == source
        )

    flat, spec = pytree.tree_flatten(output.args)
    kept = [None if is_of_write(i, value) else value for i, value in enumerate(flat)]
    if kept != flat:
        output.args = pytree.tree_unflatten(kept, spec)
        module.recompile()
