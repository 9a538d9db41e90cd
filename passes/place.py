"""The order of the backward: operations move up where less is held that way.

Autograd runs the two products of a linear layer's backward in the order of a formula: first the
gradient of its input, then that of its weight. The other way round, the layer's input is gone
before the gradient of its size is made, and what a replay of that input needs is gone as well. Such
changes are found here for any graph, before anything is planned, so that every plan gains by them.

An operation moves up past others that it does not depend on. Two readings of the step judge each
place: what the forward made is *saved* and held from the start, or *replayed* just before its first
reader, with what its own operation reads beside it. Neither may hold more than before, and one must
hold less. Both are readings of a whole class of plans, so the order is no part of a plan.

What has an effect, draws random numbers or is not an operator of torch keeps its place, and nothing
moves past it: the values of the step stay the same to the bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch._ops import OpOverload

from fxremat.passes.effects import has_effect, is_random
from fxremat.passes.extract import Analysis
from fxremat.passes.joint import Joint
from fxremat.passes.storages import is_held_by_caller

WINDOW = 48  # operations that one may move past

_Pair = tuple[int, int]  # bytes of both readings: saved, replayed


@dataclass(frozen=True, slots=True)
class Item:
    """One operation of the backward.

    Attributes:
        reads: Storages that it reads.
        creates: Storages that it makes.
        after: Positions, in the order as it was, of the operations that make what it reads.
        fixed: It keeps its place, and nothing moves past it.
    """

    reads: tuple[int, ...]
    creates: tuple[int, ...]
    after: frozenset[int] = frozenset()
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the items hold.

    Attributes:
        size_bytes: Of each storage; 0 where it is held throughout. [bytes]
        beside_bytes: For what the forward made: what its replay reads. Others are not here. [bytes]
        kept: Storages that nobody frees before the end: the gradients that are returned.
    """

    size_bytes: Sequence[int]
    beside_bytes: dict[int, int]
    kept: frozenset[int] = frozenset()


def place(analysis: Analysis) -> Joint:
    """Put the operations of the backward into an order that holds less.

    Args:
        analysis: Of the joint graph.

    Returns:
        A joint graph that computes the same; the argument's own where nothing moves.
    """
    backward = [name for name in analysis.operations if name not in analysis.forward]
    order = ordered(_items(analysis, backward), _sizes(analysis))
    if order == list(range(len(backward))):
        return analysis.joint
    return _reordered(analysis, [backward[position] for position in order])


def ordered(items: Sequence[Item], sizes: Sizes) -> list[int]:
    """Positions of the items in an order that holds less, by both readings.

    Args:
        items: The operations, in an order that works.
        sizes: What they hold.

    Returns:
        The positions that they had, in the order in which they are to run.
    """
    walk = _Walk(items, sizes)
    for place_ in range(len(items)):
        walk.settle(place_)
    return walk.order


class _Walk:
    """Goes through the items once; those behind it stand where they will.

    ``left`` counts the readers of each storage from the current place on. ``enter`` is held when
    the item at a place begins, ``live`` while it runs.
    """

    def __init__(self, items: Sequence[Item], sizes: Sizes) -> None:
        self.items, self.sizes = items, sizes
        self.order = list(range(len(items)))
        self.left = [0] * len(sizes.size_bytes)
        for item in items:
            for g in item.reads:
                self.left[g] += 1
        self.readers = list(self.left)
        made = {g for item in items for g in item.creates}
        given = [g for g, n in enumerate(self.left) if n and g not in made]
        saved_bytes = sum(sizes.size_bytes[g] for g in given)
        alone = [g for g in given if g not in sizes.beside_bytes]
        self.enter: list[_Pair] = [(saved_bytes, sum(sizes.size_bytes[g] for g in alone))]
        self.live: list[_Pair] = []

    def run(self, item: Item, enter: _Pair) -> tuple[_Pair, _Pair]:
        """What is held while an item runs that comes next, and after it."""
        size_bytes, beside_bytes = self.sizes.size_bytes, self.sizes.beside_bytes
        saved, replayed = enter
        makes = sum(size_bytes[g] for g in item.creates)
        saved, replayed, beside = saved + makes, replayed + makes, 0
        freed = 0
        for g in item.reads:
            if g in beside_bytes and self.left[g] == self.readers[g]:
                replayed += size_bytes[g]
                beside = max(beside, beside_bytes[g])
            if self.left[g] == 1 and g not in self.sizes.kept:
                freed += size_bytes[g]
        freed += sum(
            size_bytes[g] for g in item.creates if not self.readers[g] and g not in self.sizes.kept
        )
        # A replay is over before its reader makes anything.
        during = max(replayed, replayed - makes + beside)
        return (saved, during), (saved - freed, replayed - freed)

    def settle(self, place_: int) -> None:
        """Find the place of the item that stands at this one, and go on to the next."""
        item = self.items[self.order[place_]]
        live, leave = self.run(item, self.enter[place_])
        self.live.append(live)
        self.enter.append(leave)
        self._step(item, -1)
        if not item.fixed:
            self._move_up(place_)

    def _step(self, item: Item, by: int) -> None:
        """The item has run, or has not."""
        for g in item.reads:
            self.left[g] += by

    def _move_up(self, start: int) -> None:
        """Move an item up to the last place that is better than the one before."""
        moving = self.order[start]
        item = self.items[moving]
        accepted = start
        back: list[Item] = [item]
        self._step(item, 1)
        worst_new, worst_old = (0, 0), (0, 0)
        for place_ in range(start - 1, max(-1, start - 1 - WINDOW), -1):
            other = self.items[self.order[place_]]
            if other.fixed or self.order[place_] in item.after:
                break
            self._step(other, 1)
            back.append(other)
            enter = self.enter[place_]
            first, between = self.run(item, enter)
            self._step(item, -1)
            second, _ = self.run(other, between)
            self._step(item, 1)
            worst_old = _worst(worst_old, self.live[place_], self.live[place_ + 1])
            worst_new = _worst(worst_new, second)
            new = _worst(worst_new, first)
            if _better(new, worst_old):
                self._apply(accepted, place_)
                accepted, worst_new, worst_old = place_, (0, 0), (0, 0)
        for passed in reversed(back):
            self._step(passed, -1)

    def _apply(self, start: int, to: int) -> None:
        """Put the item at ``start`` to ``to``, and reckon anew what is held from there on."""
        self.order.insert(to, self.order.pop(start))
        done: list[Item] = []
        for place_ in range(to, start + 1):
            item = self.items[self.order[place_]]
            self.live[place_], self.enter[place_ + 1] = self.run(item, self.enter[place_])
            self._step(item, -1)
            done.append(item)
        for item in done:
            self._step(item, 1)


def _worst(*pairs: _Pair) -> _Pair:
    return max(saved for saved, _ in pairs), max(replayed for _, replayed in pairs)


def _better(new: _Pair, old: _Pair) -> bool:
    """Neither is more, and one is less."""
    return new != old and new[0] <= old[0] and new[1] <= old[1]


def _items(analysis: Analysis, backward: Sequence[str]) -> list[Item]:
    position = {name: index for index, name in enumerate(backward)}
    behind: dict[fx.Node, frozenset[int]] = {}  # operations that a node needs, through views
    for node in analysis.joint.graph.nodes:
        needs = [
            frozenset({position[n.name]}) if n.name in position else behind[n]
            for n in node.all_input_nodes
        ]
        behind[node] = frozenset().union(*needs)
    return [
        Item(
            analysis.reads[name],
            analysis.storages.creates[name],
            behind[analysis.nodes[name]],
            fixed=not _moves(analysis.nodes[name]),
        )
        for name in backward
    ]


def _moves(node: fx.Node) -> bool:
    """May it run earlier or later without a difference?"""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    dynamic = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return not (is_random(node) or has_effect(node) or dynamic & set(target.tags))


def _sizes(analysis: Analysis) -> Sizes:
    nodes, table = analysis.nodes, analysis.storages
    joint = analysis.joint
    held = {g for n in joint.forward_outputs if isinstance(n, fx.Node) for g in table.of[n.name]}
    size_bytes = [
        0 if g in held or is_held_by_caller(nodes[owner]) else size
        for g, (owner, size) in enumerate(zip(table.owner, table.size_bytes, strict=True))
    ]
    beside_bytes = {
        g: sum(size_bytes[read] for read in analysis.reads[name])
        for name in analysis.operations
        if name in analysis.forward
        for g in table.creates[name]
        if g not in held
    }
    kept = {g for n in joint.gradients if isinstance(n, fx.Node) for g in table.of[n.name]}
    return Sizes(size_bytes, beside_bytes, frozenset(kept))


def _reordered(analysis: Analysis, backward: Sequence[str]) -> Joint:
    """The graph with the backward's operations in another order; views follow their readers."""
    joint, nodes = analysis.joint, analysis.nodes
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> None:
        stack = [node]
        while stack:
            missing = [n for n in stack[-1].all_input_nodes if n not in copies]
            if missing:
                stack.extend(missing)
                continue
            top = stack.pop()
            if top not in copies:
                copies[top] = graph.node_copy(top, copies.__getitem__)

    for node in joint.graph.nodes:
        if node.op == "placeholder" or node.name in analysis.forward:
            copy(node)
    for name in backward:
        copy(nodes[name])
    for node in joint.graph.nodes:  # views that only the output reads, and the output
        copy(node)
    graph.lint()
    module = fx.GraphModule(joint.module, graph)
    return replace(joint, module=module, traced=joint.traced or joint.module)
