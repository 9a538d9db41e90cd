"""Inputs that a step writes to, and what else lies in their memory.

AOTAutograd writes to inputs when the forward has run. How inputs overlap it sees when it traces,
and no guard sees it again: inputs that overlap then are handed over as views of one base, cut out
where they lay, and the bytes of the base are planned for; all others are taken for apart. So each
call is compared with the one that was traced.

Inputs that lie apart in one storage have one counter of versions. A write to one of them makes
autograd take the others for written, which it then refuses to hand to the backward. Those are saved
without its check (``unchecked``); whoever runs the step compares their versions.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._subclasses.fake_tensor import FakeTensor

from fxremat.errors import UnsupportedGraphError
from fxremat.passes.joint import Joint, primals_of, tensors_of
from fxremat.passes.symbolic import is_symbolic

MARK = "saved_tensor_with_no_vc_check"  # AOTAutograd's, in the metadata of a node
_REMEDY = "Remedy: give what is written memory of its own in every call: clone() one of the two."
MOVED = (
    "{name} writes to its inputs, and {one} and {other} lie otherwise to each other than when it "
    "was traced: the graph would read or write the wrong places, or hold more.\n" + _REMEDY
)
JOINED = (
    "{name} writes to {other}, and {one}, which its backward reads, is a part of the same storage "
    "and was not when it was traced: autograd would take it for written.\n" + _REMEDY
)
TWO_STORAGES = (
    "{name} writes to its inputs, and {one} and {other} overlap without torch knowing, as tensors "
    "from one NumPy array do: the graph would take them for apart.\n" + _REMEDY
)
SYMBOLIC = (
    "{name} writes to an input that shares memory with another, and cannot be planned for symbolic "
    "sizes. Say dynamic=False: each shape gets its own graph."
)
Pair = tuple[Any, ...]
"""Two inputs, and how they lie to each other."""
_FAKE = 48  # bits of an address within a storage that has none


class Span(NamedTuple):
    """The memory that a tensor reaches over; a tuple, since every call makes one of each input.

    Attributes:
        start: Where its first element is. [address]
        end: Behind its last element. [address]
        storage: The number of its storage.
    """

    start: int
    end: int
    storage: int


Spans = Sequence[Span | None]
"""For each input its memory; None where it has none."""


@dataclass(frozen=True)
class Aliases:
    """What a graph writes to, and how that lay to the other inputs when it was traced.

    Attributes:
        written: Inputs that the step writes to, or that are handed over as views of such.
        merged: Those that are handed over as views of a base.
        overlaps: Pairs that reach over the same memory, and how; as ``_overlaps`` finds them.
        apart: Inputs that nothing is written to, in a storage where something is.
        places: Names of primals -> the inputs that they are.
        names: Of the inputs, for people.
    """

    written: frozenset[int] = frozenset()
    merged: frozenset[int] = frozenset()
    overlaps: frozenset[Pair] = frozenset()
    apart: frozenset[int] = frozenset()
    places: Mapping[str, int] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    def check(self, name: str, args: Sequence[Any], saved: Iterable[str]) -> None:
        """Look whether the inputs of a call lie as those that were traced.

        Args:
            name: What was optimised.
            args: The inputs of the call.
            saved: Names of primals that the backward gets.

        Raises:
            UnsupportedGraphError: Two overlap otherwise, or the backward reads one that has come
                into a storage where the step writes.
        """
        if not self.written:
            return
        spans = spans_of(args)
        different = self.overlaps ^ _overlaps(spans, args, self.written, self.merged)
        if different:
            pair = min(different, key=lambda each: (each[0] == each[1], str(each)))
            raise UnsupportedGraphError(self._text(MOVED, name, pair[0], pair[1]))
        found = _sharing(spans, self.written) - self.apart
        for i in sorted(found.intersection(self._inputs(saved))):
            other = next(w for w in sorted(self.written) if _one_storage(spans, i, w))
            raise UnsupportedGraphError(self._text(JOINED, name, i, other))

    def unchecked(self, args: Sequence[Any], saved: Iterable[str]) -> list[torch.Tensor]:
        """Inputs that the backward gets without a look at their versions."""
        return [args[i] for i in sorted(self.apart.intersection(self._inputs(saved)))]

    def mark(self, joint: Joint) -> "Aliases":
        """Mark, in another trace of the same graph, what is saved without a check; itself again."""
        described = {node: node.meta.get("desc") for node in primals_of(joint)}
        apart = {
            node
            for node, d in described.items()
            if isinstance(d, PlainAOTInput) and d.idx in self.apart
        }
        _mark(joint.graph, apart)
        return self

    def _inputs(self, names: Iterable[str]) -> set[int]:
        return {self.places[name] for name in names if name in self.places}

    def _text(self, text: str, name: str, one: int, other: int) -> str:
        return text.format(name=name, one=self.names[one], other=self.names[other])


def aliases_of(joint: Joint, inputs: Sequence[tuple[str, Any]], name: str) -> Aliases:
    """Find what a graph writes to, and mark what has to be saved without a check of its version.

    Args:
        joint: As AOTAutograd traced it; some of its inputs get a mark in their metadata.
        inputs: Names and values of the call that was traced.
        name: What was optimised.

    Raises:
        UnsupportedGraphError: AOTAutograd takes two inputs for apart that are not, or the graph is
            symbolic: places and versions are known for given sizes.
    """
    if not joint.mutated:
        return Aliases()
    names, args = tuple(each for each, _ in inputs), [value for _, value in inputs]
    described = {node: node.meta.get("desc") for node in primals_of(joint)}
    places = {n.name: d.idx for n, d in described.items() if isinstance(d, PlainAOTInput)}
    spans = spans_of(args)
    tensors = frozenset(i for i, span in enumerate(spans) if span is not None)
    merged = tensors - {*places.values()}
    written = merged | {places[each] for each in joint.mutated if each in places}
    overlaps, apart = _overlaps(spans, args, written, merged), _sharing(spans, written)
    for one, other, *_ in sorted(overlaps, key=str):
        if not _one_storage(spans, one, other):
            raise UnsupportedGraphError(
                TWO_STORAGES.format(name=name, one=names[one], other=names[other])
            )
    if is_symbolic(joint.module) and (overlaps or apart):
        raise UnsupportedGraphError(SYMBOLIC.format(name=name))
    return Aliases(written, merged, overlaps, apart, places, names).mark(joint)


def _mark(graph: fx.Graph, inputs: Collection[fx.Node]) -> None:
    """Mark inputs, and the views of them, which torch's own partition may save in their place."""
    storages = {t.untyped_storage()._cdata for node in inputs for t in tensors_of(node)}
    if not storages:
        return
    for node in graph.nodes:
        if any(t.untyped_storage()._cdata in storages for t in tensors_of(node)):
            node.meta[MARK] = True


def spans_of(args: Sequence[Any]) -> list[Span | None]:
    """The memory of each input."""
    return [_span(value) if isinstance(value, torch.Tensor) else None for value in args]


def _span(tensor: torch.Tensor) -> Span | None:
    if tensor.layout is not torch.strided or not (size_bytes := tensor.nbytes):
        return None
    storage = tensor.untyped_storage()._cdata
    start = 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()
    if not start:  # fake tensors have no memory, nor have those on ``meta``
        start = (storage << _FAKE) + int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.is_contiguous():
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        size_bytes = (1 + sum((n - 1) * step for n, step in pairs)) * tensor.element_size()
    return Span(start, start + size_bytes, storage)


def _overlaps(
    spans: Spans, args: Sequence[Any], written: Collection[int], merged: Collection[int]
) -> frozenset[Pair]:
    """Pairs of a written input and another that reach over the same memory.

    Each pair comes with its distance, which says at given sizes how they overlap. Inputs that are
    handed over as views come with their base and where in it they lie.
    """
    found: set[Pair] = set()
    reaching: list[tuple[int, int, int]] = []  # over what comes next: start, end, input
    last = 0
    for start, end, i in sorted((s[0], s[1], i) for i, s in enumerate(spans) if s is not None):
        reaching = [each for each in reaching if each[1] > start] if last > start else []
        for other, _, j in reaching:
            both_merged = i in merged and j in merged
            if (i in written or j in written) and not both_merged:
                found.add((min(i, j), max(i, j), (start - other) * (1 if i > j else -1)))
        reaching.append((start, end, i))
        last = max(last, end)
    for i in merged:
        first = next(j for j in sorted(merged) if _one_storage(spans, i, j))
        found.add((first, i, *_in_base(args[i])))
    return frozenset(found)


def _in_base(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where a view lies in its base, and what the base is like."""
    base = tensor._base
    if base is None:
        return tensor.storage_offset(), tensor.untyped_storage().nbytes()
    like = (tuple(base.shape), base.stride(), base.storage_offset())
    return tensor.storage_offset(), *like


def _sharing(spans: Spans, written: Collection[int]) -> frozenset[int]:
    """Inputs that are not written to, in a storage where something is."""
    storages = {span.storage for i in written if (span := spans[i]) is not None}
    return frozenset(
        i
        for i, span in enumerate(spans)
        if span is not None and i not in written and span.storage in storages
    )


def _one_storage(spans: Spans, i: int, j: int) -> bool:
    one, other = spans[i], spans[j]
    return one is not None and other is not None and one.storage == other.storage


_ARGUMENT = re.compile(r"^L\['(?:args|kwargs)'\]\[([^\]]+)\]")
_LOCAL = re.compile(r"^L\['(\w+)'\]$")
_ROOT = re.compile(r"^(?:G\['__import_[^']*'\]\.\w+|L\['(?:target|self)'\])(?:\.__self__)?\.?")
_PART = re.compile(r"_(?:modules|parameters|buffers)\['([^']*)'\]")


def input_name(node: fx.Node) -> str:
    """What a user calls an input of a graph that Dynamo captured.

    Args:
        node: Its placeholder.
    """
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    text = name() if callable(name) else name  # a method up to torch 2.11
    if not isinstance(text, str):
        return node.name
    if _ARGUMENT.match(text):
        return _ARGUMENT.sub(r"argument \1", text)
    if local := _LOCAL.match(text):
        return local[1]
    return _PART.sub(r"\1", _ROOT.sub("", text)) or node.name
