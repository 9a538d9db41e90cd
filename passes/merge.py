"""Common subexpressions of the forward, merged before planning only.

Models compute the same mask in every layer, and the default partition saves every copy. Equal pure
operations of which the backward reads the first become one. Only such are merged: their first copy
lives until the backward anyway, so no moment of the step holds more than before.

After the rewrite no such pass runs; it would merge replays with what they replay.
"""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from fxremat.passes.effects import has_effect, is_random
from fxremat.passes.extract import Analysis
from fxremat.passes.joint import Joint, copy_graph, tensors_of


def merge_equal(analysis: Analysis) -> Joint:
    """Merge equal operations of the forward.

    Args:
        analysis: Of the joint graph.

    Returns:
        A joint graph with the same results; the argument's own where nothing is to be merged.
    """
    first = _first_copies(analysis)
    if not first:
        return analysis.joint
    joint = analysis.joint
    graph, copies = copy_graph(joint.graph)
    for name, kept in first.items():
        copies[analysis.nodes[name]].replace_all_uses_with(copies[analysis.nodes[kept]])
    for node in reversed(graph.nodes):
        if not node.users and node.op == "call_function" and _is_pure(node):
            graph.erase_node(node)
    graph.lint()
    module = fx.GraphModule(joint.module, graph)
    same = {
        StorageWeakRef(gone.untyped_storage()): StorageWeakRef(stays.untyped_storage())
        for name, kept in first.items()
        for gone, stays in zip(
            tensors_of(analysis.nodes[name]), tensors_of(analysis.nodes[kept]), strict=True
        )
    }
    return replace(joint, module=module, same=same, traced=joint.module)


def _first_copies(analysis: Analysis) -> dict[str, str]:
    """Operation -> the equal operation before it that stands for it."""
    read = _read_by_backward(analysis)
    returned = _returned(analysis)
    numbers: dict[fx.Node, Hashable] = {}
    known: dict[Hashable, int] = {}  # so that the keys of long chains stay small
    kept: dict[Hashable, str] = {}
    merged: dict[str, str] = {}
    for node in analysis.joint.graph.nodes:
        key = _key_of(node, numbers)
        numbers[node] = number = node.name if key is None else known.setdefault(key, len(known))
        created = analysis.storages.creates.get(node.name, ())
        if node.name not in analysis.reads or node.name not in analysis.forward or not created:
            continue
        if number in kept and not returned.intersection(created):
            merged[node.name] = kept[number]
        elif read.intersection(created) and len(created) == 1:
            kept[number] = node.name
    return merged


def _returned(analysis: Analysis) -> set[int]:
    """Storages that the caller gets: to each output its own, to write to as it likes."""
    of, outputs = analysis.storages.of, analysis.joint.forward_outputs
    return {g for node in outputs if isinstance(node, fx.Node) for g in of[node.name]}


def _read_by_backward(analysis: Analysis) -> set[int]:
    """Storages that the backward reads or returns."""
    of = analysis.storages.of
    read = {
        g
        for name in analysis.operations
        if name not in analysis.forward
        for g in analysis.reads[name]
    }
    read.update(g for n in analysis.joint.gradients if isinstance(n, fx.Node) for g in of[n.name])
    return read


def _key_of(node: fx.Node, numbers: Mapping[fx.Node, Hashable]) -> Hashable | None:
    """Equal for nodes that compute the same; None where that is not known."""
    if node.op != "call_function" or not _is_pure(node):
        return None
    try:
        key = (node.target, _key(node.args, numbers), _key(node.kwargs, numbers))
        hash(key)
    except TypeError:
        return None
    return key


def _key(value: Any, numbers: Mapping[fx.Node, Hashable]) -> Hashable:
    """A hashable form of an argument; 1, 1.0 and True differ."""
    if isinstance(value, fx.Node):
        return ("node", numbers[value])
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(_key(v, numbers) for v in value))
    if isinstance(value, dict):
        return tuple((name, _key(value[name], numbers)) for name in sorted(value))
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise TypeError("a symbol has no key")
    return (type(value).__name__, repr(value) if isinstance(value, float) else value)


def _is_pure(node: fx.Node) -> bool:
    """Does it always compute the same from the same arguments, and nothing else?"""
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator"
    if node.target.namespace not in ("aten", "prims"):
        return False
    uninitialised = node.target._opname in ("empty", "empty_like", "empty_strided", "new_empty")
    dynamic = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return not (
        is_random(node) or has_effect(node) or uninitialised or dynamic & set(node.target.tags)
    )
