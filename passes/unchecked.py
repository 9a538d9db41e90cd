"""What an autograd node keeps without a version check: tensors that a custom function set on ctx.

Private to torch: AOTAutograd keeps them in a list on its node, where tensors that went through
``save_for_backward`` are handed out for each backward anew. The list outlives the backward, and so
does what it holds, however early the backward's graph lets go of it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_LIST = "_tensors_no_vc_check"


class _Once:
    """Tensors that are held until somebody reads them: torch unpacks them, or adds them to a list.

    Args:
        tensors: What is held.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = list(tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[torch.Tensor]:
        tensors, self.tensors = self.tensors, []
        return iter(tensors)

    def __radd__(self, others: list[Any]) -> list[Any]:
        return [*others, *self]


def let_go(context: object) -> None:
    """Let a node hold its unchecked tensors no longer than until its backward has taken them.

    Args:
        context: The node, before a backward that does not keep its graph.
    """
    kept = getattr(context, _LIST, None)
    if kept:
        setattr(context, _LIST, _Once(kept))
