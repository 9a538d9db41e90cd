"""Which gradients a backward owes, given the outputs that it was started from.

Where the loss uses some of a step's outputs only, eager leaves the gradients of everything else
``None``, and an optimizer passes those parameters by. AOTAutograd puts zeros in the place of a
missing tangent, and hands zeros on: a weight decay would then shrink a head that nobody trained.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import ForwardTokenAOTOutput, TangentAOTInput

from fxremat.passes.joint import Joint, is_tangent


@dataclass(frozen=True)
class Reach:
    """Which gradients depend on which tangents.

    Attributes:
        tangents: For each value that the autograd node returned, its tangent's bit; 0 for none.
        gradients: For each gradient, the bits of the tangents that lead to it.
    """

    tangents: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()

    def absent(self, arrived: Sequence[object]) -> frozenset[int]:
        """The gradients that no tangent that has arrived leads to.

        Args:
            arrived: For each value that the autograd node returned, its tangent or ``None``.
        """
        if len(arrived) != len(self.tangents):
            return frozenset()
        missing = present = 0
        for bit, tangent in zip(self.tangents, arrived, strict=True):
            missing |= bit if tangent is None else 0
            present |= bit if tangent is not None else 0
        return frozenset(
            i for i, bits in enumerate(self.gradients) if bits & missing and not bits & present
        )


def references(args: Sequence[object]) -> tuple[Callable[[], torch.Tensor | None], ...]:
    """The arguments that take a gradient, without keeping them alive."""
    return tuple(
        weakref.ref(a) if isinstance(a, torch.Tensor) and a.requires_grad else _nothing
        for a in args
    )


def _nothing() -> None:
    return None


def has_hooks(value: object) -> bool:
    """Does autograd run hooks when it comes to a value, with or without a gradient?"""
    if not isinstance(value, torch.Tensor):
        return False
    after = getattr(value, "_post_accumulate_grad_hooks", None) if value.is_leaf else None
    return bool(value._backward_hooks or after)


def untouched(joint: Joint) -> frozenset[int]:
    """The inputs to which no gradient comes, whichever tangents there are."""
    return frozenset(i for i, n in enumerate(joint.gradients) if not isinstance(n, fx.Node))


def reach_of(joint: Joint) -> Reach:
    """Follow every tangent of a joint graph to the gradients."""
    bits: dict[fx.Node, int] = {}
    of_output: dict[object, int] = {}
    for node in joint.graph.nodes:
        bits[node] = 0
        for source in node.all_input_nodes:
            bits[node] |= bits[source]
        described = node.meta.get("desc")
        if is_tangent(node) and isinstance(described, TangentAOTInput):
            bits[node] = of_output[described.output] = 1 << len(of_output)
    returned = joint.output_descriptions[: joint.num_forward_outputs]
    return Reach(
        tuple(of_output.get(d, 0) for d in returned if not isinstance(d, ForwardTokenAOTOutput)),
        tuple(bits[n] if isinstance(n, fx.Node) else 0 for n in joint.gradients),
    )
