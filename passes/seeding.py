"""A loss for any output, with gradients that are the same in every run and memory of its own."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxremat.errors import VerificationError

SEED = 20_260


class _Seed(torch.autograd.Function):
    """A loss whose gradients are fixed random weights; it allocates nothing but those.

    It stands for the weighted sum of the outputs: the gradients are those of that sum, without the
    products that the sum would leave in memory. Its value is a view of a tensor that is there
    already, so that it does not hold an output which the caller releases.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(o.size(), o.stride(), o.dtype, o.device) for o in outputs]
        return value.view(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        weights = []
        for number, (size, stride, dtype, device) in enumerate(ctx.shapes):
            generator = torch.Generator(device).manual_seed(SEED + number)
            if any(n > 1 and step == 0 for n, step in zip(size, stride, strict=True)):
                weight = torch.empty(size, dtype=dtype, device=device)  # one place per element
            else:
                weight = torch.empty_strided(size, stride, dtype=dtype, device=device)
            weights.append(weight.normal_(generator=generator))
        ctx.kept = [weight for weight in weights if weight.numel() == 1]  # as loss.backward() does
        return None, *weights


@lru_cache(maxsize=8)
def unit(device: torch.device) -> torch.Tensor:
    """The value of every seeded loss on a device, and its gradient."""
    return torch.ones((), device=device)


def seeded_loss(output: Any) -> torch.Tensor:
    """A loss over all differentiable outputs, the same in every run; none of them may be empty."""
    wanted = [leaf for leaf in tensors_in(output) if leaf.requires_grad and leaf.numel()]
    computed = [leaf for leaf in wanted if not leaf.is_leaf]  # of others the gradient is a weight
    wanted = computed or wanted
    if not wanted:
        raise VerificationError(
            "no output requires a gradient, so there is no backward to verify. Call the model in "
            "training mode, with gradients on."
        )
    seed: Callable[..., torch.Tensor] = _Seed.apply
    return seed(unit(wanted[0].device), *wanted)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of a nested output, inside caches and other plain objects too, each once."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        top = stack.pop()
        if id(top) in seen:
            continue
        seen.add(id(top))
        if isinstance(top, torch.Tensor):
            yield top
            continue
        leaves = pytree.tree_leaves(top)
        if len(leaves) == 1 and leaves[0] is top:
            stack.extend(reversed(list(getattr(top, "__dict__", {}).values())))
        else:
            stack.extend(reversed(leaves))
