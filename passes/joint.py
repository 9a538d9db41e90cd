"""The joint graph as AOTAutograd hands it to a partitioner, with what is known about its ends."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Joint:
    """A joint graph: primals and tangents in, forward outputs and gradients out.

    Attributes:
        module: The graph; nothing here edits it.
        num_forward_outputs: How many of its outputs belong to the forward.
        mutated: Names of the primals that the step writes to after the forward has run.
        updates: Which of the forward's outputs are what is written there, or tokens of effects.
        lent: Which of them the caller does not get: the runtime makes these outputs from inputs.
        beside_bytes: Held by autograd beside the graph while its backward runs. [bytes]
        turn_bytes: Held by autograd beside the graph when its backward begins. [bytes]
        same: Storages of operations that were merged away -> those that stand for them. Views keep
            the storage in their metadata that they were traced with.
        traced: The graph as it was traced, which keeps those storages alive.
    """

    module: fx.GraphModule
    num_forward_outputs: int
    mutated: frozenset[str] = frozenset()
    updates: frozenset[int] = frozenset()
    lent: frozenset[int] = frozenset()
    beside_bytes: int = 0
    turn_bytes: int = 0
    same: Mapping[StorageWeakRef, StorageWeakRef] = field(default_factory=dict)
    traced: fx.GraphModule | None = None

    @property
    def graph(self) -> fx.Graph:
        """The fx graph."""
        return self.module.graph

    @property
    def outputs(self) -> list[fx.Node | None]:
        """What it returns, flat: forward outputs, then gradients."""
        (output,) = self.graph.find_nodes(op="output")
        return list(pytree.arg_tree_leaves(*output.args))

    @property
    def forward_outputs(self) -> list[fx.Node | None]:
        """What the forward returns."""
        return self.outputs[: self.num_forward_outputs]

    @property
    def gradients(self) -> list[fx.Node | None]:
        """What the backward returns."""
        return self.outputs[self.num_forward_outputs :]

    @property
    def output_descriptions(self) -> list[object]:
        """AOTAutograd's description of each output, None where it gives none."""
        (output,) = self.graph.find_nodes(op="output")
        return list(output.meta.get("desc", [None] * len(self.outputs)))


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A graph that can be edited in place of another.

    Args:
        graph: The original.

    Returns:
        The copy, with the same names and metadata, and for each original node its copy.
    """
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, copies.__getitem__)
    return copy, copies


# How Dynamo writes the way to the optimised module: L['target'].__self__, L['self'],
# __closure__[0]...
_ROOT = re.compile(
    r"^(?:G\['__import_[^']*'\]\.\w+|[LG]\['\w+'\]|\w+)"
    r"(?:\.__self__|\.__closure__\[\d+\]\.cell_contents)*\.?"
)


def is_tangent(node: fx.Node) -> bool:
    """Is it an input that only the backward gets?"""
    return node.op == "placeholder" and ("tangents" in node.name or "bwd_" in node.name)


def is_primal(node: fx.Node) -> bool:
    """Is it an input of the forward?"""
    return node.op == "placeholder" and not is_tangent(node)


def primals_of(joint: Joint) -> list[fx.Node]:
    """The forward's inputs, in order."""
    return [node for node in joint.graph.find_nodes(op="placeholder") if is_primal(node)]


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """The (fake) tensors that a node returns, in order."""
    for leaf in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def source_of(node: fx.Node) -> str:
    """The user's line that a node comes from, as ``file.py:12``; empty if unknown."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith('File "')]
    lines = [line for line in lines if "/fxremat/install.py" not in line]  # calls the user's
    if not lines:
        return ""
    path, _, rest = lines[-1].removeprefix('File "').partition('", line ')
    return f"{path}:{rest.split(',')[0]}"


def module_of(node: fx.Node) -> str:
    """Path of the innermost module that a node comes from; empty if unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = _ROOT.sub("", str(list(stack.values())[-1][0]))
    return path.replace("._modules['", ".").replace("']", "")


def target_name(node: fx.Node) -> str:
    """The operator's name, such as ``aten.addmm.default``."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))
