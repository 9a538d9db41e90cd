"""Values whose size only the step knows, refused in the words of what the user wrote."""

import operator
from typing import NamedTuple

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxremat.errors import UnsupportedGraphError
from fxremat.passes.joint import source_of, target_name


class Cause(NamedTuple):
    """What makes values of a size that nobody knows beforehand.

    Attributes:
        words: It, as the user knows it.
        remedy: What does the same with a fixed size.
    """

    words: str
    remedy: str


_CHOICE = "use torch.where or multiply by the mask, which keep the size fixed"
_MASK = Cause("indexing with a boolean mask", _CHOICE)
_UNIQUE = Cause("torch.unique", "make the distinct values before the call and pass them")
_LOOP = Cause(
    "a while_loop through which gradients flow (they need the values of every turn)",
    "use a scan or a Python loop with a fixed number of turns",
)
_NONZERO = Cause("torch.nonzero", f"{_CHOICE}, or torch.nonzero_static with its size=")
_CAUSES = {
    "nonzero": _NONZERO,
    "argwhere": _NONZERO,
    "index": _MASK,
    "masked_select": Cause("masked_select", _CHOICE),
    "repeat_interleave": Cause(
        "repeat_interleave with a tensor of repeats", "pass output_size=, the fixed size of it all"
    ),
    **dict.fromkeys(("unique", "_unique", "_unique2", "unique_dim", "unique_consecutive"), _UNIQUE),
    **dict.fromkeys(("while_loop", "while_loop_stack_output"), _LOOP),
}
_ANY = Cause("an operator", "return or compute something of a fixed size, such as a mask or a sum")


def unsized(node: fx.Node, value: object) -> UnsupportedGraphError:
    """The error for a value of unknown size: what makes it, where, and what to do instead.

    Args:
        node: Of a Dynamo or a joint graph.
        value: One of its results.
    """
    source = _first(node, value)
    words, remedy = _cause(source)
    line = source_of(source) or source_of(node) or "an unknown line"
    return UnsupportedGraphError(
        f"how much {words} at {line} returns is known only when the step runs, and a plan needs "
        f"every size before.\nRemedy: {remedy}; or compute it outside of the optimised callable.",
        source.name,
        target_name(source),
        source_of(source),
    )


def _first(node: fx.Node, value: object) -> fx.Node:
    """The first node of the graph whose size depends on the same unknown numbers."""
    unknown = _symbols(value)
    for each in node.graph.nodes:
        made = each.meta.get("val", each.meta.get("example_value"))
        if each.op not in ("placeholder", "output") and any(
            _symbols(v) & unknown for v in (made if isinstance(made, list | tuple) else [made])
        ):
            return each  # type: ignore[no-any-return]
    return node


def _symbols(value: object) -> set[object]:
    return set(free_unbacked_symbols(value)) if isinstance(value, torch.Tensor) else set()


def _cause(node: fx.Node) -> Cause:
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        if isinstance(node.args[0].meta.get("example_value"), torch.Tensor):  # Dynamo's h[...]
            return _MASK if any(_is_mask(n) for n in node.all_input_nodes[1:]) else _ANY
        node = node.args[0]
    return _CAUSES.get(_name(node), _ANY)


def _is_mask(node: fx.Node) -> bool:
    return getattr(node.meta.get("example_value"), "dtype", None) in (torch.bool, torch.uint8)


def _name(node: fx.Node) -> str:
    """What a node calls, in one word."""
    target = node.target
    if isinstance(target, OpOverload):
        return target._opname
    if isinstance(target, HigherOrderOperator):
        return str(target.name())
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))
