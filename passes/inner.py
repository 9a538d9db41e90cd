"""What higher-order operators hold while they run: the liveness of the graphs inside them.

Their graphs run as plain Python: a value is let go of after its last use. Calls inside them are
priced as those outside are, for the sake of their workspaces. What a higher-order operator without
a graph of its own holds is not known.
"""

from collections.abc import Iterator

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from fxremat.passes.calls import Price, call_of
from fxremat.passes.joint import tensors_of
from fxremat.passes.opcall import OpCall
from fxremat.passes.storages import round_up

# Their workspace is what their graphs hold. Others (flex attention) compute besides.
_RUN_GRAPHS = frozenset({"cond", "scan", "while_loop", "invoke_subgraph", "associative_scan"})
_KNOWN = frozenset({"with_effects", "_assert_scalar", "sym_size"})


def graphs_inside(node: fx.Node) -> Iterator[fx.GraphModule]:
    """The graphs that a call takes as arguments."""
    owner = node.graph.owning_module
    for argument in node.all_input_nodes:
        if argument.op == "get_attr" and isinstance(argument.target, str) and owner is not None:
            found = getattr(owner, argument.target, None)
            if isinstance(found, fx.GraphModule):
                yield found


def calls_inside(node: fx.Node) -> Iterator[OpCall]:
    """What a higher-order operator calls in its graphs, and in the graphs of those."""
    for graph in graphs_inside(node):
        for each in graph.graph.nodes:
            if _is_priced(each):
                yield call_of(each)
            yield from calls_inside(each)


def _is_priced(node: fx.Node) -> bool:
    """Does it call an operator of which all arguments are known?"""
    if not isinstance(node.target, OpOverload):
        return False
    return all("val" in argument.meta for argument in node.all_input_nodes)


def workspace_bytes(node: fx.Node, price: Price) -> int:
    """The most that a higher-order operator holds besides its inputs and results. [bytes]

    One branch of a ``cond`` runs, and its results are the operator's. Loops make the results of a
    turn while those of the one before are there.
    """
    if not isinstance(node.target, HigherOrderOperator):
        return 0
    peak_bytes = max((_peak_bytes(graph, price) for graph in graphs_inside(node)), default=0)
    result_bytes = sum(_sizes(node).values())
    if node.target.name() == "cond":
        return max(0, peak_bytes - result_bytes)
    return peak_bytes + result_bytes


def is_unknown(node: fx.Node) -> bool:
    """Does it hold what nobody can tell beforehand?"""
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return target.name() not in _RUN_GRAPHS | _KNOWN
    return isinstance(target, OpOverload) and target.namespace not in (
        "aten", "prims", "quantized", "torchvision", "_c10d_functional", "fxremat",
    )  # fmt: skip


def _sizes(node: fx.Node) -> dict[int, int]:
    """Storages of a node's results with their bytes."""
    found: dict[int, int] = {}
    for tensor in tensors_of(node):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            size_bytes = storage.nbytes()
            known = size_bytes if isinstance(size_bytes, int) else 0
            found[storage._cdata] = round_up(known, tensor.device)
    return found


def _peak_bytes(module: fx.GraphModule, price: Price) -> int:
    """The most that a graph holds besides its inputs. [bytes]"""
    nodes = list(module.graph.nodes)
    last: dict[int, int] = {}
    given: set[int] = set()
    for time, node in enumerate(nodes):
        if node.op in ("placeholder", "get_attr"):
            given.update(_sizes(node))
        for each in (node, *node.all_input_nodes):
            last.update(dict.fromkeys(_sizes(each), time))
    live: dict[int, int] = {}
    peak_bytes = 0
    for time, node in enumerate(nodes):
        live |= {key: size for key, size in _sizes(node).items() if key not in given}
        inside_bytes = price(call_of(node)).workspace_bytes if _is_priced(node) else 0
        inside_bytes = max(inside_bytes, workspace_bytes(node, price))
        peak_bytes = max(peak_bytes, sum(live.values()) + inside_bytes)
        live = {key: size for key, size in live.items() if last[key] > time}
    return peak_bytes
