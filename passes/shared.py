"""Outputs of a traced function that refer to memory of its arguments, or of one another."""

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from fxremat.errors import UnsupportedGraphError
from fxremat.passes.joint import Joint, source_of, target_name
from fxremat.passes.storages import round_up, span_bytes
from fxremat.passes.tangents import copied_tangent
from fxremat.passes.unsized import unsized


@dataclass(frozen=True)
class Shared:
    """Outputs that refer to memory of others; AOTAutograd makes them when the graph has run.

    Autograd adds up the gradients of such outputs outside the graph.

    Attributes:
        lent: Outputs that are made from arguments.
        beside_bytes: Gradients of arguments that come by such outputs; held until the graph's own
            arrive. [bytes]
        turn_bytes: At most held while gradients of views of one value are added up, before the
            backward's graph begins. [bytes]
    """

    lent: frozenset[int] = frozenset()
    beside_bytes: int = 0
    turn_bytes: int = 0

    def within(self, joint: Joint) -> Joint:
        """A joint graph of the same function, with what is known of its outputs."""
        (output,) = joint.graph.find_nodes(op="output")
        described = list(output.meta.get("desc", ()))[: joint.num_forward_outputs]
        lent = frozenset(
            i
            for i, d in enumerate(described)
            if isinstance(d, PlainAOTOutput) and d.idx in self.lent
        )
        return replace(joint, lent=lent, beside_bytes=self.beside_bytes, turn_bytes=self.turn_bytes)


def shared_outputs(graph: torch.fx.GraphModule) -> Shared:
    """Find the outputs of a Dynamo graph that are views of arguments, or of one another."""
    (output,) = graph.graph.find_nodes(op="output")
    returned = [n for n in tree_leaves(output.args) if isinstance(n, torch.fx.Node)]
    given = {
        _storage_of(value)
        for node in graph.graph.find_nodes(op="placeholder")
        if isinstance(value := node.meta.get("example_value"), torch.Tensor)
    } - {-1}
    values = [node.meta.get("example_value") for node in returned]
    made = {id(node.meta.get("example_value")) for node in graph.graph.find_nodes(op="placeholder")}
    for node, value in zip(returned, values, strict=True):
        _refuse_unknown_size(node, value)
        if isinstance(value, torch.Tensor) and value.requires_grad and id(value) not in made:
            _refuse_cut_off(node, value)
            _refuse_overlap(node, value)
    lent = frozenset(
        i
        for i, value in enumerate(values)
        if isinstance(value, torch.Tensor) and _storage_of(value) in given
    )
    wholes = _whole_bytes(graph.graph)
    # A view beside one that takes no gradient is made outside the graph as well.
    seen = {_storage_of(v) for v in values if isinstance(v, torch.Tensor) and not v.requires_grad}
    tensors = {id(v): v for v in values if isinstance(v, torch.Tensor)}
    others = Counter(_storage_of(value) for value in tensors.values())
    beside_bytes = turn_bytes = 0
    for value in tensors.values():
        if not value.requires_grad:
            continue
        if (storage := _storage_of(value)) == -1:
            continue
        own_bytes, whole_bytes = value.numel() * value.element_size(), wholes[storage]
        if storage in given or storage in seen:
            _refuse_symbolic(value)
        if storage in given:
            beside_bytes += whole_bytes + (own_bytes if own_bytes < whole_bytes else 0)
        elif storage in seen:
            turn_bytes += 2 * whole_bytes + own_bytes
        seen.add(storage)
        beside_bytes += _copied_bytes(value)
        if value.numel() == 1 and others[storage] > 1:
            beside_bytes += own_bytes  # the gradient that ``backward`` starts from is held outside
    return Shared(lent, beside_bytes, turn_bytes)


def _copied_bytes(value: torch.Tensor) -> int:
    """Of a tangent that torch copies, at most: the copied one may be freed earlier. [bytes]"""
    if not copied_tangent(value):
        return 0
    _refuse_symbolic(value)
    size_bytes = max(span_bytes(value), value.numel() * value.element_size())
    return round_up(size_bytes, value.device) if value.numel() else 0


def _refuse_symbolic(value: torch.Tensor) -> None:
    sizes = (value.untyped_storage().nbytes(), value.numel())
    if not all(isinstance(size, int) for size in sizes):
        raise UnsupportedGraphError(
            "an output is an argument, or a view of one or of another output, and its size is "
            "symbolic.\nRemedy: return a clone of it, or say dynamic=False."
        )


def _refuse_unknown_size(node: torch.fx.Node, value: object) -> None:
    if isinstance(value, torch.Tensor) and free_unbacked_symbols(value):
        raise unsized(node, value)


def _refuse_cut_off(node: torch.fx.Node, value: torch.Tensor) -> None:
    """Refuse views made without gradients: eager's keep theirs, those of a graph hand them on."""
    if not value._is_view():
        return
    behind: object = value.grad_fn
    while (following := getattr(behind, "next_functions", ())) and len(following) == 1:
        behind = following[0][0]
    if behind is None:
        line = source_of(node) or "an unknown line"
        raise UnsupportedGraphError(
            f"the output {node.name!r} at {line} is a view that was made under torch.no_grad(). "
            "Eager gives its gradient to nobody, a graph would give it to what it is a view of.\n"
            "Remedy: return it detached, or make the view with gradients on.",
            node.name,
            target_name(node),
            source_of(node),
        )


def _refuse_overlap(node: torch.fx.Node, value: torch.Tensor) -> None:
    """Refuse windows that overlap: AOTAutograd copies their gradient into memory that overlaps.

    It knows of expanded tensors, which are the common case.
    """
    if value.layout is not torch.strided or not all(isinstance(n, int) for n in value.stride()):
        return
    reach = 0
    for step, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and step > 0:
            if step <= reach:
                break
            reach += (size - 1) * step
    else:
        return
    line = source_of(node) or "an unknown line"
    raise UnsupportedGraphError(
        f"several elements of the output {node.name!r} at {line} share one place in memory (sizes "
        f"{tuple(value.shape)}, strides {tuple(value.stride())}). Its gradient would be lost in "
        "parts.\nRemedy: return .contiguous() of it.",
        node.name,
        target_name(node),
        source_of(node),
    )


def _storage_of(value: torch.Tensor) -> int:
    """The storage of a tensor; -1 for those without one of their own, as inside of a vmap."""
    if value.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return -1
    address: int = value.untyped_storage()._cdata
    return address


_SCATTERS = ("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter")


def _whole_bytes(graph: torch.fx.Graph) -> dict[int, int]:
    """Bytes of the storages of a Dynamo graph. [bytes]

    These operators clone the whole storage that their argument is a part of, and a fake tensor that
    comes from torch's cache of fake results has lost that.
    """
    found: dict[int, int] = {}
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or (storage := _storage_of(value)) == -1:
            continue
        size_bytes = value.untyped_storage().nbytes()
        known = [int(size_bytes)] if isinstance(size_bytes, int) else [0]
        if getattr(node.target, "__name__", node.target) in _SCATTERS:
            first = node.args[0].meta.get("example_value") if node.args else None
            if isinstance(first, torch.Tensor):
                known.append(found.get(_storage_of(first), 0))
        found[storage] = max(found.get(storage, 0), *known)
    return found
