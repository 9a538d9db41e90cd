"""Who holds the tangents while a backward runs? That differs between releases of torch.

Up to 2.11 AOTAutograd's runtime keeps them in a tuple until the backward has returned; later ones
let go of them, and they die with their last reader. It decides whether a tangent counts at the
peak, so it is asked rather than assumed, once in a process.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_function
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
