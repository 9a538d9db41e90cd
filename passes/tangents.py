"""Who holds the tangents while a backward runs? That differs between releases of torch.

Up to 2.11 AOTAutograd's runtime keeps them in a tuple until the backward has returned; later ones
let go of them, and they die with their last reader. Up to 2.11 it also expects tangents to be
contiguous, or in channels last, and copies others; later ones expect them to be laid out as the
outputs are. Both decide what counts at the peak, so they are asked rather than assumed, once in a
process.
"""

import sys
from collections.abc import Callable, Sequence
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

    Must be called outside a trace, as ``_probed`` compiles one operator.
    """

    def look(args: list[Any], run: Callable[..., Any]) -> tuple[bool, Any]:
        tangent = StorageWeakRef(args[-1].untyped_storage())
        result = run(*args)
        args.clear()
        return not tangent.expired(), result

    return _probed(torch.sin, (3,), look)


@lru_cache(maxsize=1)
def permuted_tangents_copied() -> bool:
    """Does torch copy tangents that are neither contiguous nor in channels last?

    Must be called outside a trace, as ``_probed`` compiles one operator.
    """

    def turned(value: torch.Tensor) -> torch.Tensor:
        return value.t().sin()

    def look(args: list[Any], run: Callable[..., Any]) -> tuple[bool, Any]:
        return bool(args[-1].is_contiguous()), run(*args)

    return _probed(turned, (3, 2), look)


def ask_torch() -> None:
    """Find out all of it; inside a trace it is too late."""
    tangents_held()
    permuted_tangents_copied()
    _references()


@lru_cache(maxsize=1)
def _references() -> int:
    """References to a tangent that autograd made, as a hook before the backward sees them."""
    found: list[int] = []
    with real_mode(), torch.enable_grad():
        result = torch.ones(3, requires_grad=True).sin()
        assert result.grad_fn is not None
        result.grad_fn.register_prehook(lambda tangents: found.append(_count(tangents)[0]))
        (result * torch.ones_like(result)).sum().backward()
    return found[0]


def _count(tangents: Sequence[object]) -> list[int]:
    return [sys.getrefcount(tangents[i]) for i in range(len(tangents))]


def given(tangents: Sequence[object]) -> bool:
    """Did the caller hand some of these to ``backward`` and hold them itself until that returns?

    Args:
        tangents: The tuple that a hook before the backward gets.
    """
    counts = _count(tangents)
    return any(
        isinstance(tangent, torch.Tensor) and tangent.numel() > 1 and count > _references()
        for tangent, count in zip(tangents, counts, strict=True)
    )


def copied_tangent(output: torch.Tensor) -> bool:
    """Does torch copy the tangent of an output that is laid out like the output?

    Args:
        output: A fake one will do.
    """
    if not permuted_tangents_copied():
        return False
    return not output.is_contiguous(memory_format=suggest_memory_format(output))


def _probed(
    function: Callable[[torch.Tensor], torch.Tensor],
    shape: tuple[int, ...],
    look: Callable[[list[Any], Callable[..., Any]], tuple[bool, Any]],
) -> bool:
    """Compile a function with AOTAutograd and look at the arguments of its backward.

    Args:
        function: Of one tensor.
        shape: Of that tensor.
        look: Told the arguments of the backward and how to run it; says what was seen, and the
            gradients.
    """
    found: list[bool] = []

    def forward_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return gm.forward

    def backward_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        def run(args: list[Any]) -> Any:
            seen, result = look(args, gm)
            found.append(seen)
            return result

        run._boxed_call = True  # type: ignore[attr-defined]  # why: torch looks for it on the instance
        return run

    with real_mode(), torch.enable_grad(), torch.random.fork_rng(devices=()):
        probe = aot_function(function, forward_compiler, backward_compiler)
        result = probe(torch.ones(shape, requires_grad=True))
        # The tangent is a tensor of its own, laid out like the result; nobody has to copy it.
        (result * torch.ones_like(result)).sum().backward()
    return found[0]
