"""Second derivatives are refused when the first backward starts, not when terms are missing.

The engine runs the hooks of a node with gradients on exactly if ``create_graph=True``.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from fxremat.errors import UnsupportedGraphError


def refusing_second_order(
    compiled: Callable[..., Any], before: Callable[[], None] | None = None
) -> Callable[..., Any]:
    """Let the backward of a compiled graph raise where a graph of it is asked for.

    Args:
        compiled: Takes the graph's inputs, returns its outputs.
        before: Also called when a backward starts.

    Returns:
        The same, with a hook on the outputs' node.
    """

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        for value in outputs if isinstance(outputs, list | tuple) else (outputs,):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                value.grad_fn.register_prehook(_refuse)
                if before is not None:
                    value.grad_fn.register_prehook(lambda _: before())
                break
        return outputs

    shielded: Callable[..., Any] = torch._dynamo.disable(run, reason="runs outside the trace")
    return shielded


def _refuse(_gradients: tuple[torch.Tensor, ...]) -> None:
    if torch.is_grad_enabled():
        raise UnsupportedGraphError(
            "backward(create_graph=True) asks for a graph of the backward, and fxremat plans first "
            "derivatives only. Run steps that need second derivatives unoptimised: "
            "fxremat.restore(model)."
        )
