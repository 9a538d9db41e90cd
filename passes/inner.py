"""What higher-order operators hold while they run: the liveness of the graphs inside them.

Their graphs run as plain Python: a value is let go of after its last use. What operators inside
them hold for themselves is not counted, nor what an operator without a graph of its own does.
"""

from collections.abc import Iterator

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from fxremat.passes.joint import tensors_of
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


def workspace_bytes(node: fx.Node) -> int:
    """The most that a higher-order operator holds besides its inputs and results. [bytes]

    One branch of a ``cond`` runs, and its results are the operator's. Loops make the results of a
    turn while those of the one before are there.
    """
    if not isinstance(node.target, HigherOrderOperator):
        return 0
    peak_bytes = max((_peak_bytes(graph) for graph in graphs_inside(node)), default=0)
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


def _peak_bytes(module: fx.GraphModule) -> int:
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
        peak_bytes = max(peak_bytes, sum(live.values()) + workspace_bytes(node))
        live = {key: size for key, size in live.items() if last[key] > time}
    return peak_bytes
