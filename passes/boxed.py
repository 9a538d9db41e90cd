"""The eager executor: fx code that frees each value after its last use, its inputs included.

A boxed callable takes one list and empties it, so that nobody but the graph holds the saved values
while the backward runs. Private to torch: ``_BoxedCodeGen`` and the ``_boxed_call`` mark.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

try:
    from torch.fx.graph import _BoxedCodeGen
except ImportError as error:  # pragma: no cover - depends on the release of torch
    raise ImportError(
        f"fxremat needs torch.fx.graph._BoxedCodeGen, which torch {torch.__version__} does "
        "not have; "
        "torch 2.11 to 2.13 do"
    ) from error

Boxed = Callable[[list[Any]], Sequence[Any]]


def boxed(module: fx.GraphModule) -> Boxed:
    """Make a boxed callable of a graph.

    Args:
        module: The graph; its code is generated anew.

    Returns:
        A callable that takes its arguments in one list, empties the list, and returns a sequence.
    """
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    code: Boxed = module.forward
    return dispatching(lambda: code)


def dispatching(choose: Callable[[], Boxed]) -> Boxed:
    """A boxed callable that asks each time which code to run."""

    def run(args: list[Any]) -> Sequence[Any]:
        return choose()(args)

    run._boxed_call = True  # type: ignore[attr-defined]  # why: torch looks for it on the instance
    return run


def leaving_out(code: Boxed, absent: Callable[[], Collection[int]]) -> Boxed:
    """The same callable, with ``None`` in some places of what it returns.

    Args:
        code: A boxed callable.
        absent: Says, after each run, which places.
    """

    def run(args: list[Any]) -> Sequence[Any]:
        found, places = code(args), absent()
        if not places:
            return found
        return [None if place in places else value for place, value in enumerate(found)]

    run._boxed_call = True  # type: ignore[attr-defined]  # why: torch looks for it on the instance
    return run
