"""The autograd node behind a compiled graph: who it belongs to, when its backward starts, its end.

Private to torch: AOTAutograd's autograd functions are instances of ``BackwardCFunction``, which are
their own contexts, die with the graph that leads to them, and run hooks before their backward.

The engine runs the hooks of a node with gradients on exactly if ``create_graph=True``: second
derivatives are refused there, when the backward starts, not when terms are missing.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction

try:
    from torch._C._autograd import _top_saved_tensors_default_hooks
except ImportError as error:  # pragma: no cover - depends on the release of torch
    raise ImportError(
        f"fxremat needs torch._C._autograd._top_saved_tensors_default_hooks, which torch "
        f"{torch.__version__} does not have; torch 2.11 to 2.13 do"
    ) from error

from fxremat.errors import UnsupportedGraphError
from fxremat.passes.tracing import keeps_graph
from fxremat.passes.unchecked import let_go

WRITTEN = (
    "memory of an argument, parameter or buffer that the backward reads has been written since the "
    "forward, or other memory of the same storage; eager raises there as well.\n"
    "Remedy: write after the backward, or give what is written memory of its own: clone() it."
)
_DEPTH = 32  # views between an output and the node that made it


class Watcher(Protocol):
    """Is told what happens to one compiled graph."""

    def coming(self, args: Sequence[Any]) -> Sequence[Any]:
        """A forward is about to run; what to run it with."""

    def unchecked(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        """What autograd saves of a forward's inputs without a look at their versions."""

    def passed(self, args: Sequence[Any], outputs: Sequence[Any], context: object) -> None:
        """A forward has run; without a backward its context is None."""

    def turns(self, context: object, tangents: Sequence[object]) -> None:
        """The backward of a context starts; tangents that nobody gave are ``None``."""


def checkpointed() -> bool:
    """Does ``torch.utils.checkpoint`` with ``use_reentrant=False`` run what runs now?"""
    hooks = _top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


def watched(compiled: Callable[..., Any], watcher: Watcher) -> Callable[..., Any]:
    """Let a watcher know of each forward and backward of a compiled graph.

    Args:
        compiled: Takes the graph's inputs, returns its outputs.
        watcher: Is told.

    Returns:
        The same, with a hook on the autograd node of each call.
    """

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        given = watcher.coming(args)
        before = {id(node): node for node in _nodes(args)}  # nodes are kept, so ids stay theirs
        outputs = compiled(*given)
        returned = outputs if isinstance(outputs, list | tuple) else (outputs,)
        found = _nodes((*returned, *args))
        context = next((n for n in found if id(n) not in before), None)
        watcher.passed(args, returned, context)
        if context is not None:
            # The node holds its hooks. Detached tensors share their version with the original.
            kept = [(t.detach(), t._version) for t in watcher.unchecked(args)]
            turn = _Turn(watcher, weakref.ref(context), kept)
            context.register_prehook(turn)
        return outputs

    shielded: Callable[..., Any] = torch._dynamo.disable(run, reason="runs outside the trace")
    return shielded


class _Turn:
    """The hook of one forward: runs when its backward starts."""

    def __init__(
        self,
        watcher: Watcher,
        reference: "weakref.ref[Any]",
        kept: list[tuple[torch.Tensor, int]],
    ) -> None:
        self.watcher, self.reference, self.kept = watcher, reference, kept
        self.freed = False  # what it had saved is gone

    def __call__(self, tangents: Sequence[object]) -> None:
        if torch.is_grad_enabled():
            raise UnsupportedGraphError(
                "backward(create_graph=True) asks for a graph of the backward, and fxremat plans "
                "first derivatives only. Run steps that need second derivatives unoptimised: "
                "fxremat.restore(model)."
            )
        if self.freed:
            raise UnsupportedGraphError(
                "a second backward runs through one forward, and the first has freed what it had "
                "saved: an optimised callable is one graph, however unrelated its outputs are.\n"
                "Remedy: add the losses up and call backward once, or say retain_graph=True in the "
                "first."
            )
        if any(tensor._version != version for tensor, version in self.kept):
            raise UnsupportedGraphError(WRITTEN)
        context = self.reference()
        self.watcher.turns(context, tangents)
        self.freed = not keeps_graph()
        if self.freed:
            let_go(context)
            self.kept = []


def _nodes(values: Iterable[Any]) -> list[BackwardCFunction]:
    """The nodes of compiled graphs that lie next behind some tensors, through views."""
    found: dict[int, BackwardCFunction] = {}
    for value in values:
        node = value.grad_fn if isinstance(value, torch.Tensor) else None
        for _ in range(_DEPTH):
            if node is None or isinstance(node, BackwardCFunction):
                break
            node = node.next_functions[0][0] if node.next_functions else None
        if isinstance(node, BackwardCFunction):
            found.setdefault(id(node), node)
    return list(found.values())
