"""From a joint graph to a problem: fold views away, price operations, say what may be replayed."""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from fxremat.costtable import Cost
from fxremat.passes.calls import (
    Price,
    call_of,
    from_mask_call,
    has_mask,
    state_bytes,
)
from fxremat.passes.effects import has_effect, is_random, why_saved
from fxremat.passes.gradients import copied_bytes
from fxremat.passes.inner import calls_inside, workspace_bytes
from fxremat.passes.joint import Joint, is_tangent, module_of, source_of, target_name
from fxremat.passes.opcall import OpCall
from fxremat.passes.phases import forward_names
from fxremat.passes.reuse import Reuse, find_reuses
from fxremat.passes.storages import StorageTable, find_storages, is_held_by_caller
from fxremat.passes.tangents import outlives_backward
from fxremat.problem import Kind, Operation, RematProblem, Replay, Storage


@dataclass(frozen=True)
class Analysis:
    """What the analyses found in one joint graph.

    Attributes:
        joint: The graph.
        storages: Its storages; a problem extracted from it numbers them alike.
        forward: Names of the forward's nodes.
        operations: Names of the nodes that allocate or must run, forward first.
        reads: For each of them, the storages that it reads.
        reuses: Those among them that write over an input, which is then their result's storage.
    """

    joint: Joint
    storages: StorageTable
    forward: frozenset[str]
    operations: tuple[str, ...]
    reads: dict[str, tuple[int, ...]]
    reuses: Mapping[str, Reuse] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        """Name -> node."""
        return {node.name: node for node in self.joint.graph.nodes}


def analyse(joint: Joint, *, reuse: bool = False) -> Analysis:
    """Run every analysis on a joint graph.

    Args:
        joint: The joint graph.
        reuse: Let backward operations write over inputs that nobody reads afterwards.

    Returns:
        The tables that ``extract`` and the rewrite share.
    """
    storages = find_storages(joint)
    forward = forward_names(joint)
    operations = [n for n in joint.graph.nodes if _runs(n, storages)]
    ordered = [n for n in operations if n.name in forward]
    ordered += [n for n in operations if n.name not in forward]
    reads = _reads(ordered, storages)
    reuses = find_reuses(joint, storages, forward, reads) if reuse else {}
    if reuses:
        storages = find_storages(joint, {name: r.argument for name, r in reuses.items()})
        reads = _reads(ordered, storages)
    return Analysis(joint, storages, forward, tuple(n.name for n in ordered), reads, reuses)


def _reads(operations: Sequence[fx.Node], storages: StorageTable) -> dict[str, tuple[int, ...]]:
    """For each operation, the storages behind its arguments."""
    return {
        n.name: tuple(sorted({g for user in n.all_input_nodes for g in storages.of[user.name]}))
        for n in operations
    }


def _runs(node: fx.Node, storages: StorageTable) -> bool:
    """Is it an operation? What allocates, and what has an effect; parts and views are not."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return storages.allocates(node) or has_effect(node)


def calls(analysis: Analysis) -> list[OpCall]:
    """Every call that the step or a replay may make, for pricing."""
    nodes = analysis.nodes
    found = [call_of(nodes[name]) for name in analysis.operations]
    found += [
        from_mask_call(nodes[name])
        for name in analysis.operations
        if name in analysis.forward and has_mask(nodes[name])
    ]
    found += [call for name in analysis.operations for call in calls_inside(nodes[name])]
    return found


def extract(
    analysis: Analysis,
    price: Price,
    *,
    outputs_held: bool,
    resident_bytes: int,
    replayable: Collection[str] = (),
) -> RematProblem:
    """Make the problem of a joint graph.

    Args:
        analysis: Of the joint graph.
        price: Cost [ns] and workspace [bytes] of a call.
        outputs_held: The caller keeps the outputs until the backward ends.
        resident_bytes: Held throughout, by whomever. [bytes]
        replayable: Custom operators that may run again.

    Returns:
        The problem; storage ``g`` of it is storage ``g`` of the analysis, states of generators
        come after those.
    """
    nodes, table = analysis.nodes, analysis.storages
    index_of = {name: index for index, name in enumerate(analysis.operations)}
    storages = [
        Storage(
            value,
            size_bytes,
            _kind(nodes[owner]),
            index_of.get(owner, -1),
            held=is_tangent(nodes[owner]) and outlives_backward(nodes[owner].meta.get("val")),
        )
        for value, owner, size_bytes in zip(
            _value_names(analysis), table.owner, table.size_bytes, strict=True
        )
    ]
    operations: list[Operation] = []
    replays: list[Replay] = []
    for index, name in enumerate(analysis.operations):
        node = nodes[name]
        cost = price(call_of(node))
        inside_bytes = workspace_bytes(node, price)
        cost = replace(cost, workspace_bytes=max(cost.workspace_bytes, inside_bytes))
        creates = table.creates[name]
        _enlarge(storages, creates, cost)
        in_forward = name in analysis.forward
        reason = why_saved(node, analysis.joint, table, replayable) if in_forward else ""
        if in_forward and not reason and creates:
            state = _add_state(node, index, storages)
            creates = creates if state is None else (*creates, state)
            replays += _replays(node, index, analysis, price, cost, state)
            if is_random(node) and state is None:
                reason = "it draws random numbers from a generator that cannot be put back"
        operations.append(
            Operation(
                name, target_name(node), analysis.reads[name], creates,
                cost.cost_ns, cost.workspace_bytes,
                must_run=in_forward and (is_random(node) or has_effect(node)),
                why_saved=reason, source=source_of(node), module=module_of(node),
            )
        )  # fmt: skip
    joint = analysis.joint
    ends, inner = joint.forward_outputs, joint.updates | joint.lent
    _add_outside(joint, _num_forward(analysis), storages, operations)
    return RematProblem(
        storages=tuple(storages),
        operations=tuple(operations),
        num_forward=_num_forward(analysis),
        replays=tuple(replays),
        outputs=_returned(analysis, [n for i, n in enumerate(ends) if i not in inner]),
        updates=_returned(analysis, [n for i, n in enumerate(ends) if i in inner]),
        gradients=_returned(analysis, analysis.joint.gradients),
        resident_bytes=resident_bytes,
        outputs_held=outputs_held,
        copied_bytes=copied_bytes(analysis.joint, table),
    )


def _num_forward(analysis: Analysis) -> int:
    return sum(name in analysis.forward for name in analysis.operations)


def _add_outside(
    joint: Joint, num_forward: int, storages: list[Storage], operations: list[Operation]
) -> None:
    """Charge what autograd holds outside the graph for outputs that are views of others."""
    if joint.beside_bytes:
        name = "gradients_beside_the_graph"
        storages.append(Storage(name, joint.beside_bytes, Kind.TANGENT, held=True))
    if joint.turn_bytes and num_forward < len(operations):
        first = operations[num_forward]
        held_bytes = max(first.workspace_bytes, joint.turn_bytes)
        operations[num_forward] = replace(first, workspace_bytes=held_bytes)


def _value_names(analysis: Analysis) -> list[str]:
    """A unique name for each storage: of one part of a result, the node that takes it."""
    table = analysis.storages
    names = list(table.owner)
    for owner, created in table.creates.items():
        parts = (
            {g: f"{owner}.{i}" for i, g in enumerate(table.of[owner])} if len(created) > 1 else {}
        )
        for user in analysis.nodes[owner].users:
            for g in table.of.get(user.name, ()) if user.target is operator.getitem else ():
                parts[g] = user.name
        for g in created:
            names[g] = parts.get(g, owner)
    return names


def _kind(owner: fx.Node) -> Kind:
    if is_tangent(owner):
        return Kind.TANGENT
    return Kind.PRIMAL if is_held_by_caller(owner) else Kind.VALUE


def _enlarge(storages: list[Storage], creates: tuple[int, ...], cost: Cost) -> None:
    """Charge what an operator's result really holds where its fake tensor says less.

    A reduced loss such as ``mse_loss`` returns a number that keeps the whole elementwise result.
    Where it is not known which of several results holds more, each of them counts as if it did.
    """
    more_bytes = cost.held_bytes - sum(storages[g].size_bytes for g in creates)
    if creates and more_bytes > 0:
        unknown = [g for g in creates if not storages[g].size_bytes]
        for g in unknown or creates:
            size_bytes = storages[g].size_bytes + more_bytes
            storages[g] = replace(storages[g], size_bytes=size_bytes)


def _add_state(node: fx.Node, index: int, storages: list[Storage]) -> int | None:
    """Give a random operation the storage of its generator's state; returns its number."""
    size_bytes = state_bytes(node)
    if size_bytes is None:
        return None
    storages.append(Storage(f"{node.name}_rng_state", size_bytes, Kind.VALUE, index, lazy=True))
    return len(storages) - 1


def _replays(
    node: fx.Node,
    index: int,
    analysis: Analysis,
    price: Price,
    cost: Cost,
    state: int | None,
) -> list[Replay]:
    """The ways to run one replayable forward operation again."""
    reads, creates = analysis.reads[node.name], analysis.storages.creates[node.name]
    if not is_random(node):
        return [Replay(index, "same", reads, creates, cost.cost_ns, cost.workspace_bytes)]
    found = []
    if has_mask(node):
        result, mask = creates
        again = price(from_mask_call(node))
        both = tuple(sorted({*reads, mask}))
        found.append(
            Replay(index, "from_mask", both, (result,), again.cost_ns, again.workspace_bytes)
        )
    if state is not None:
        second_bytes = state_bytes(node) or 0  # the state that is put back afterwards
        both = tuple(sorted({*reads, state}))
        workspace_bytes = cost.workspace_bytes + second_bytes
        found.append(Replay(index, "redraw", both, creates, cost.cost_ns, workspace_bytes))
    return found


def _returned(analysis: Analysis, values: list[fx.Node | None]) -> tuple[int, ...]:
    """Storages behind what is returned, without repeats."""
    found = {
        g for node in values if isinstance(node, fx.Node) for g in analysis.storages.of[node.name]
    }
    return tuple(sorted(found))
