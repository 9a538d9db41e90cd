"""In-place writes that no trace repeats as eager makes them.

A trace writes into a copy and carries the result over to what the tensor was a view of. That goes
wrong silently in two ways:

- ``v.normal_()`` draws in another order, or by another algorithm, where the memory of ``v`` is not
  contiguous; the copy is, so the values and the generator's state would be others.
  ``alpha_dropout`` draws into such a mask where its argument is permuted, and what ``rrelu``
  returns is laid out otherwise, so that ``rand_like`` of it draws otherwise.
- In ``w.expand(3, 5).zero_()`` several elements share one place; carried over, they are added up.
"""

import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxremat.errors import UnsupportedGraphError
from fxremat.passes.joint import source_of, target_name

# Their kernels have a faster way that fills contiguous memory; no property of an operator says so.
_FILLS = frozenset({"normal", "bernoulli", "exponential"})
_MASKED = frozenset({"alpha_dropout", "rrelu"})  # fill something like their argument in place
_IN_PLACE = frozenset(
    {
        operator.iadd, operator.iand, operator.ifloordiv, operator.ilshift, operator.imatmul,
        operator.imod, operator.imul, operator.ior, operator.ipow, operator.irshift,
        operator.isub, operator.itruediv, operator.ixor, operator.setitem,
    }
)  # fmt: skip


def refuse_writes(graph: fx.GraphModule) -> None:
    """Refuse in-place draws into strided memory, and writes into memory that elements share.

    Args:
        graph: Of Dynamo, with the graphs inside it.

    Raises:
        UnsupportedGraphError: There is such a write; names its line.
    """
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            _refuse_in(module.graph)


def _refuse_in(graph: fx.Graph) -> None:
    shared: set[fx.Node] = set()  # expanded, or a view of what is
    for node in graph.nodes:
        for written in _written(node):
            value = _tensor(written)
            if value is None:
                continue
            if written in shared:
                why = (
                    "writes into an expanded tensor, of which several elements share one place. A "
                    "graph would add them up.\nRemedy: write into what was expanded, or call "
                    ".clone() before."
                )
                raise _refusal(node, why)
            if _draws(node) and not value.is_contiguous():
                why = (
                    "draws random numbers in place into a tensor that is not contiguous (strides "
                    f"{tuple(value.stride())}). A graph would draw others than eager does.\n"
                    "Remedy: draw without writing in place (inplace=False; "
                    "x.copy_(torch.randn_like(x))), or call .contiguous() before."
                )
                raise _refusal(node, why)
        if _draws_like_its_argument(node):
            why = (
                "draws random numbers for a tensor that is not contiguous. A graph would draw "
                "others than eager does.\nRemedy: call .contiguous() before."
            )
            raise _refusal(node, why)
        behind = (each for each in node.all_input_nodes if each in shared)
        if _is_expanded(_tensor(node)) or any(_views(node, each) for each in behind):
            shared.add(node)


def _refusal(node: fx.Node, why: str) -> UnsupportedGraphError:
    line = source_of(node)
    words = f"{node.name!r} at {line or 'an unknown line'} {why}"
    return UnsupportedGraphError(words, node.name, target_name(node), line)


def _tensor(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def _is_expanded(value: torch.Tensor | None) -> bool:
    if value is None:
        return False
    pairs = zip(value.shape, value.stride(), strict=True)
    return any(isinstance(step, int) and step == 0 and size != 1 for size, step in pairs)


def _views(node: fx.Node, other: fx.Node) -> bool:
    """Does a node's result, or a part of it (``unbind``), share memory with that of another?"""
    return not _storages(node).isdisjoint(_storages(other))


def _storages(node: fx.Node) -> set[int]:
    values = tree_leaves(node.meta.get("example_value"))
    tensors = (v for v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided)
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _name(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name if isinstance(name, str) else ""


def _draws(node: fx.Node) -> bool:
    """Does a call draw otherwise where memory is not contiguous?"""
    name = _name(node).rstrip("_")
    return name in _FILLS or "dropout" in name


def _draws_like_its_argument(node: fx.Node) -> bool:
    """Does a call draw in place into memory that lies as its argument does, and train?"""
    name = _name(node).rstrip("_")
    value = next((v for n in node.all_input_nodes if (v := _tensor(n)) is not None), None)
    if name not in _MASKED or value is None or torch.empty_like(value).is_contiguous():
        return False
    arguments = dict(_named(node))
    flags = [each for each in node.args if isinstance(each, bool)] or [name != "rrelu"]
    return bool(arguments.get("training", arguments.get("train", all(flags))))


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that a call writes into."""
    if node.op not in ("call_method", "call_function"):
        return
    name, arguments = _name(node), dict(_named(node))
    inplace = arguments.get("inplace") is True and arguments.get("training", True) is not False
    own = name.endswith("_") and not name.endswith("__") and not _only_turns(name)
    if own or inplace or node.target in _IN_PLACE:
        first = next(iter(node.args), arguments.get("input", arguments.get("self")))
        if isinstance(first, fx.Node):
            yield first
    out = arguments.get("out")
    for each in out if isinstance(out, tuple | list) else (out,):
        if isinstance(each, fx.Node):
            yield each


def _only_turns(name: str) -> bool:
    """Does a method change how a tensor looks at its memory, and not what is there?"""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet else []
    return not overloads or any(torch.Tag.inplace_view in each.tags for each in overloads)


def _named(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """Arguments of a call of a Python function, by name where it has a signature."""
    try:
        names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]  # why: methods have none
    except (TypeError, ValueError):
        names = []
    yield from zip(names, node.args, strict=False)
    yield from node.kwargs.items()
