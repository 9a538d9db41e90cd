"""Calls that would train without a plan: how they are told, and what is said of them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxremat.errors import CaptureError, OptionError, UnsupportedGraphError
from fxremat.passes.bypass import kept_off
from fxremat.passes.seeding import tensors_in


def trainable(tensors: Iterable[torch.Tensor]) -> bool:
    """Does one of them need gradients?"""
    return any(tensor.requires_grad for tensor in tensors)


def computed(output: Any, given: Any) -> bool:
    """Does an output need gradients that is neither an argument nor a parameter itself?"""
    known = {id(tensor) for tensor in tensors_in(given)}
    return trainable(t for t in tensors_in(output) if not t.is_leaf and id(t) not in known)


def outside(output: Any, given: Any) -> list[str]:
    """Backward nodes that keep tensors and belong to no planned graph, by name."""
    stop = {t.grad_fn for t in tensors_in(given)}
    stack = [t.grad_fn for t in tensors_in(output)]
    seen, found = {None, *stop}, []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not node.name().startswith("CompiledFunction") and _keeps_tensors(node):
            found.append(node.name())
        stack.extend(follower for follower, _ in node.next_functions)
    return sorted(set(found))


def _keeps_tensors(node: torch.autograd.graph.Node) -> bool:
    saved = (getattr(node, name) for name in dir(node) if name.startswith("_saved_"))
    return any(isinstance(value, torch.Tensor) for value in saved)


def uncounted(name: str, found: Iterable[str]) -> CaptureError:
    """The error of a call whose pieces leave operators to eager execution."""
    return CaptureError(
        f"between its graph breaks {name} runs operators that belong to no planned graph and keep "
        f"tensors that no plan counts ({', '.join(found)}): Dynamo does not trace a forward in "
        "pieces where the break stands in a loop, in a with-block, or in one of torch.nn's own "
        "containers. Remedy: move the break out of there, or say with reserve= what they hold."
    )


def unplanned(name: str, cause: str = "") -> CaptureError:
    """The error of a call that trains without a plan."""
    cause = cause or kept_off() or "something around it that keeps Dynamo from tracing"
    return CaptureError(
        f"{name} was called for training and no planned graph can run, so the budget would not "
        f"hold: the cause is {cause}.\nRemedy: take that away, call it under torch.no_grad(), or "
        "take the plan away with fxremat.restore(model)."
    )


def nested(name: str, inside: Iterable[str]) -> OptionError:
    """The error of a call that has other optimised modules inside."""
    names = ", ".join(dict.fromkeys(inside))
    return OptionError(
        f"{name} contains {names}, which has a plan of its own: one step cannot follow two. "
        "Optimise the outer one alone (fxremat.restore takes the inner plan away), or the inner "
        "one alone.",
        "target",
        name,
    )


def refuse_forward_mode(name: str, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse tensors with tangents: the compiled step would lose them, or fail in torch's words.

    Raises:
        UnsupportedGraphError: One has a tangent of the forward mode.
    """
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise UnsupportedGraphError(
            f"{name} was called with dual numbers (torch.autograd.forward_ad), and a plan is for "
            "the backward of a step.\nRemedy: take the plan away for that with "
            "fxremat.restore(model)."
        )


def refuse_subclasses(name: str, inputs: Iterable[Any]) -> None:
    """Refuse tensors of classes with a behaviour or memory of their own.

    Raises:
        UnsupportedGraphError: There is one.
    """
    for value in inputs:
        if not isinstance(value, torch.Tensor) or _is_plain(value):
            continue
        nested = "pad it to a plain one" if value.is_nested else "pass its plain tensors"
        raise UnsupportedGraphError(
            f"{name} reads a tensor of class {type(value).__name__} of shape "
            f"{tuple(value.shape)}, and plans know plain tensors only: what such a class holds and "
            f"does is its own.\nRemedy: {nested}, and make it outside of the optimised callable."
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    if is_traceable_wrapper_subclass(tensor):
        return False
    return type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter | FakeTensor)
