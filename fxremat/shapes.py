"""Which calls of one callable differ in nothing but the sizes of their tensors.

The first two shapes of a kind of call get static graphs. From the third on one symbolic graph
serves all others, unless the model turned out not to have one.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import torch
from torch.utils import _pytree as pytree

from fxremat.errors import InfeasibleBudgetError

_NAMED = 6  # shapes in an error
STATIC = 2  # shapes of one kind of call with a graph of their own


@dataclass
class Shapes:
    """The shapes that the calls of one callable have had.

    Attributes:
        seen: Kind of call -> the first shapes that it had.
        refused: Kinds that have no symbolic graph.
    """

    seen: dict[Hashable, list[Hashable]] = field(default_factory=dict)
    refused: set[Hashable] = field(default_factory=set)

    def are_many(self, kind: Hashable, shapes: Hashable) -> bool:
        """Is a symbolic graph due? Remembers the shapes."""
        first = self.seen.setdefault(kind, [])
        if shapes in first or kind in self.refused:
            return False
        if len(first) < STATIC:
            first.append(shapes)
            return False
        return True


def kind_and_shapes(given: object, *state: Hashable) -> tuple[Hashable, Hashable]:
    """What a call is but for sizes, and the sizes.

    Args:
        given: Its arguments, nested as they are.
        *state: What else a graph depends on, such as whether a module trains.
    """
    leaves, spec = pytree.tree_flatten(given)
    kinds = tuple(_kind(leaf) for leaf in leaves)
    shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
    return (str(spec), kinds, *state), shapes


def naming(error: InfeasibleBudgetError, tensors: Iterable[torch.Tensor]) -> InfeasibleBudgetError:
    """The same error with the shapes of the call that does not fit, where others did."""
    shapes = dict.fromkeys(str(tuple(tensor.shape)) for tensor in tensors)
    if not shapes:
        return error
    named = ", ".join(list(shapes)[:_NAMED]) + (", ..." if len(shapes) > _NAMED else "")
    text = f"{error} It is the call with arguments of the shapes {named} that does not fit."
    return InfeasibleBudgetError(text, error.budget_bytes, error.floor_bytes)


def of_one_piece(error: InfeasibleBudgetError) -> InfeasibleBudgetError:
    """The same error, of a piece between graph breaks while later ones are not known."""
    text = (
        f"{error} That is for one piece and those before it: with fullgraph=False later pieces are "
        "seen when they are reached, and may need more. A call with a large budget sees them all; "
        "fxremat.report(model).floor_bytes is then the least that works."
    )
    return InfeasibleBudgetError(text, error.budget_bytes, error.floor_bytes)


def _kind(leaf: object) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim(), leaf.device.type, leaf.requires_grad
    if isinstance(leaf, bool | int | float | str | type(None)):
        return type(leaf), leaf
    return type(leaf).__qualname__
