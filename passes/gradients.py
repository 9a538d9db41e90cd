"""What autograd copies when it stores gradients.

``AccumulateGrad`` keeps the tensor that the backward returned if its layout is the parameter's and
nobody else refers to it; otherwise it copies (torch/csrc/autograd/functions/accumulate_grad.h,
``obeys_layout_contract``). A sum's gradient, for example, is one number expanded, and is copied.
"""

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


def copied_bytes(joint: Joint, storages: StorageTable) -> int:
    """The most that copies of gradients add after the backward has returned.

    Args:
        joint: The joint graph.
        storages: Of that graph.

    Returns:
        Bytes of the copies that stay, and of the largest original that lives beside its copy.
        [bytes]
    """
    pairs = [
        (gradient, primal)
        for gradient, primal in _pairs(joint)
        if isinstance(gradient, fx.Node) and isinstance(primal.meta.get("val"), torch.Tensor)
    ]
    users = [gradient for gradient, _ in pairs]
    kept = {
        gradient for gradient, primal in pairs if _fits(gradient.meta["val"], primal.meta["val"])
    }
    stored: set[fx.Node] = set()
    stay_bytes = largest_bytes = 0
    for gradient, primal in pairs:
        if gradient in kept and users.count(gradient) == 1:
            continue
        if gradient in kept and users.count(gradient) > 1 and gradient not in stored:
            stored.add(gradient)  # the last of them takes the tensor itself
            continue
        value = primal.meta["val"]
        copy_bytes = round_up(value.numel() * gradient.meta["val"].element_size(), value.device)
        original_bytes = sum(storages.size_bytes[g] for g in storages.of[gradient.name])
        if gradient in kept or original_bytes < copy_bytes:
            stay_bytes += copy_bytes
        else:
            largest_bytes = max(largest_bytes, copy_bytes)
    return stay_bytes + largest_bytes


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
