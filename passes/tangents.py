"""Who holds the tangents while a backward runs? That differs between releases of torch.

Up to 2.11 AOTAutograd's runtime keeps them in a tuple until the backward has returned; later ones
let go of them, and they die with their last reader. Up to 2.11 it also expects tangents to be
contiguous, or in channels last, and copies others; later ones expect them to be laid out as the
outputs are. Both decide what counts at the peak, so they are asked rather than assumed, once in a
process.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_function
from torch._prims_common import suggest_memory_format
from torch.multiprocessing.reductions import StorageWeakRef

from fxremat.passes.realmode import real_mode


def outlives_backward(tangent: object) -> bool:
    """Is a tangent kept until the backward ends, whoever has read it?

    The one number that ``loss.backward()`` starts from is: Python keeps it while the engine runs.
    """
    if not isinstance(tangent, torch.Tensor):
        return False
    return tangent.numel() == 1 or tangents_held()


@lru_cache(maxsize=1)
def tangents_held() -> bool:
    """Does torch keep the tangents until the backward has returned?

    Must be called outside a trace: it compiles one operator and runs its backward.
    """
    found: list[bool] = []

    def forward_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return gm.forward

    def backward_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        def run(args: list[Any]) -> Any:
            tangent = StorageWeakRef(args[-1].untyped_storage())
            result = gm(*args)
            args.clear()
            found.append(not tangent.expired())
            return result

        run._boxed_call = True  # type: ignore[attr-defined]  # why: torch looks for it on the instance
        return run

    with real_mode(), torch.enable_grad(), torch.random.fork_rng(devices=()):
        probe = aot_function(torch.sin, forward_compiler, backward_compiler)
        value = torch.ones(3, requires_grad=True)
        (probe(value) * torch.ones(3)).sum().backward()  # a tangent of its own, that nobody copies
    return found[0]


def ask_torch() -> None:
    """Find out both; inside a trace it is too late."""
    tangents_held()
    permuted_tangents_copied()


def copied_tangent(output: torch.Tensor) -> bool:
    """Does torch copy the tangent of an output that is laid out like the output?

    Args:
        output: A fake one will do.
    """
    if not permuted_tangents_copied():
        return False
    return not output.is_contiguous(memory_format=suggest_memory_format(output))


@lru_cache(maxsize=1)
def permuted_tangents_copied() -> bool:
    """Does torch copy tangents that are neither contiguous nor in channels last?

    Must be called outside a trace: it compiles one operator and runs its backward.
    """
    found: list[bool] = []

    def forward_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return gm.forward

    def backward_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        def run(args: list[Any]) -> Any:
            found.append(bool(args[-1].is_contiguous()))
            return gm(*args)

        run._boxed_call = True  # type: ignore[attr-defined]  # why: torch looks for it on the instance
        return run

    def turned(value: torch.Tensor) -> torch.Tensor:
        return value.t().sin()

    with real_mode(), torch.enable_grad(), torch.random.fork_rng(devices=()):
        probe = aot_function(turned, forward_compiler, backward_compiler)
        value = torch.ones(3, 2, requires_grad=True)
        (probe(value) * torch.ones(3, 2).t()).sum().backward()
    return found[0]
