"""Symbolic sizes: a joint graph that serves many sizes, and the same graph at some of them.

Analyses and costs want numbers. ``at_sizes`` makes a copy of a symbolic graph whose fake tensors
have those of one call; its nodes, and the numbers that they compute from symbols, stay, so that a
rewrite of it runs at any sizes. ``symbolic_again`` gives such a rewrite the symbols back that
AOTAutograd looks for.

Numbers that the graph reads off tensors are computed from its symbolic inputs instead: the backward
has those, and need not keep a tensor for its shape.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from fxremat.errors import UnsupportedGraphError
from fxremat.passes.joint import Joint, copy_graph, source_of, target_name

try:
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis
except ImportError as error:  # pragma: no cover - depends on the release of torch
    raise ImportError(
        f"fxremat needs torch.utils._sympy, which torch {torch.__version__} does not have; "
        "torch 2.11 to 2.13 do"
    ) from error

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
SYMBOLIC = "symbolic_val"  # in the metadata of a node: its value before sizes were put in

Sizes = tuple[tuple[str, int], ...]
"""Symbols by name, with their values."""


@dataclass(frozen=True)
class Place:
    """Where a call shows the value of a symbol: an argument, or one of its dimensions."""

    symbol: str
    argument: int
    dimension: int = -1  # of a tensor; else the argument is the number

    def read(self, args: Sequence[Any]) -> int:
        """The symbol's value in a call."""
        value = args[self.argument]
        if self.dimension >= 0:
            value = value.shape[self.dimension]
        return int(value.node.hint if isinstance(value, torch.SymInt) else value)


def places(graph: fx.GraphModule) -> tuple[Place, ...]:
    """Where a call of a graph that Dynamo captured shows the values of its symbols."""
    found: dict[str, Place] = {}
    values = [n.meta.get("example_value") for n in graph.graph.find_nodes(op="placeholder")]
    for argument, value in enumerate(values):
        if isinstance(value, torch.SymInt) and (symbol := _symbol(value)):
            found[symbol] = Place(symbol, argument)
    for argument, value in enumerate(values):
        for dimension, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if symbol := _symbol(size):
                found.setdefault(symbol, Place(symbol, argument, dimension))
    return tuple(found.values())


def sizes_of(found: Sequence[Place], args: Sequence[Any]) -> Sizes:
    """The symbols of a graph with their values in a call."""
    return tuple((place.symbol, place.read(args)) for place in found)


def _symbol(size: object) -> str:
    """The name of a size that is a symbol by itself; empty for others."""
    if not isinstance(size, torch.SymInt):
        return ""
    expression = size.node.expr
    return str(expression) if expression.is_symbol else ""


def is_symbolic(module: fx.GraphModule) -> bool:
    """Does a graph take symbolic sizes?"""
    return any(
        isinstance(value, torch.SymInt) or (isinstance(value, torch.Tensor) and _has_symbols(value))
        for node in module.graph.find_nodes(op="placeholder")
        for value in [node.meta.get("val")]
    )


def _has_symbols(tensor: torch.Tensor) -> bool:
    return any(isinstance(n, torch.SymInt) for n in (*tensor.shape, *tensor.stride()))


def at_sizes(joint: Joint, sizes: Sizes) -> Joint:
    """The same joint graph at given sizes.

    Args:
        joint: A symbolic joint graph; it is left as it was.
        sizes: The value of each symbol.

    Returns:
        A graph with the same nodes and fake tensors of known sizes.

    Raises:
        UnsupportedGraphError: A node cannot be evaluated, or its size is known only when it runs.
    """
    graph, _ = copy_graph(joint.graph)
    module = fx.GraphModule(joint.module, graph)
    _compute_from_inputs(graph)
    with unset_fake_temporarily(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        _Evaluation(module, dict(sizes)).run()
    return replace(joint, module=module, traced=joint.module)


def _compute_from_inputs(graph: fx.Graph) -> None:
    """Compute what is read off the shapes of tensors from the symbolic inputs."""
    inputs = {
        value.node.expr: node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(value := node.meta.get("val"), torch.SymInt) and value.node.expr.is_symbol
    }
    for node in list(graph.nodes):
        value = node.meta.get("val")
        reads_shape = any(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes)
        if node.op != "call_function" or not isinstance(value, SYMBOLS) or not reads_shape:
            continue
        expression = value.node.expr
        if not expression.free_symbols <= inputs.keys():
            continue  # evaluated where it stands
        with graph.inserting_before(node):
            env = {s: fx.Proxy(inputs[s]) for s in expression.free_symbols}
            made = sympy_interp(PythonReferenceAnalysis, env, expression)
        if isinstance(made, fx.Proxy):
            made.node.meta = dict(node.meta)
            node.replace_all_uses_with(made.node)
            graph.erase_node(node)


class _Evaluation:
    """Evaluates a graph node by node on fake tensors of known sizes."""

    def __init__(self, module: fx.GraphModule, sizes: Mapping[str, int]) -> None:
        self.module = module
        self.sizes = sizes
        self.bases: dict[StorageWeakRef, torch.Tensor] = {}

    def run(self) -> None:
        for node in self.module.graph.nodes:
            if node.op == "output":
                continue
            before = node.meta.get("val")
            if node.op == "call_function":
                value = self._call(node)
            else:
                value = pytree.tree_map(lambda leaf, node=node: self._known(node, leaf), before)
            node.meta["val"] = value
            node.meta[SYMBOLIC] = before

    def _call(self, node: fx.Node) -> Any:
        def value_of(argument: fx.Node) -> Any:
            if argument.op == "get_attr" and isinstance(argument.target, str):
                found = operator.attrgetter(argument.target)(self.module)
                if isinstance(found, fx.GraphModule):
                    raise _refused(node, "it has graphs inside it")
            return argument.meta["val"]

        if node.meta.get("saved_tensor_with_no_vc_check"):
            raise _refused(node, "it is saved without a version check")
        assert callable(node.target)
        target: Callable[..., Any] = node.target
        args = fx.node.map_arg(node.args, value_of)
        kwargs = fx.node.map_arg(node.kwargs, value_of)
        try:
            return target(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise _depends_on_values(node) from error
        except Exception as error:  # an operator's fake may raise anything
            raise _refused(node, f"{type(error).__name__}: {error}") from error

    def _known(self, node: fx.Node, value: Any) -> Any:
        """A value of an input with numbers in the place of symbols."""
        if isinstance(value, torch.Tensor):
            return self._tensor(node, value)
        return self._number(node, value)

    def _number(self, node: fx.Node, value: Any) -> Any:
        if not isinstance(value, SYMBOLS):
            return value
        expression = value.node.expr
        missing = {str(s) for s in expression.free_symbols} - self.sizes.keys()
        if missing:
            raise _refused(node, f"{', '.join(sorted(missing))} is known only when the step runs")
        found = expression.xreplace({s: self.sizes[str(s)] for s in expression.free_symbols})
        kind = {torch.SymInt: int, torch.SymFloat: float}.get(type(value), bool)
        return kind(found)

    def _tensor(self, node: fx.Node, value: torch.Tensor) -> torch.Tensor:
        """A fake tensor of known sizes; those that share a storage go on sharing one."""
        if value.layout is not torch.strided:
            raise _refused(node, f"its layout is {value.layout}")
        shape = [self._number(node, n) for n in value.shape]
        stride = [self._number(node, n) for n in value.stride()]
        offset = self._number(node, value.storage_offset())
        storage = value.untyped_storage()
        elements = self._number(node, storage.nbytes()) // value.element_size()
        key = StorageWeakRef(storage)
        base = self.bases.get(key)
        if base is None or base.dtype != value.dtype:
            device = value.fake_device if isinstance(value, FakeTensor) else value.device
            base = torch.empty(elements, dtype=value.dtype, device=device)
            self.bases.setdefault(key, base)
        return torch.as_strided(base, shape, stride, offset)


def _depends_on_values(node: fx.Node) -> UnsupportedGraphError:
    line = source_of(node) or "an unknown line"
    return UnsupportedGraphError(
        f"the size of {node.name!r} ({target_name(node)}) at {line} "
        "depends on values that only the step knows.\nRemedy: use torch.where or a mask of a fixed "
        "size, or compute it outside of the optimised callable.",
        node.name,
        target_name(node),
        source_of(node),
    )


def _refused(node: fx.Node, why: str) -> UnsupportedGraphError:
    return UnsupportedGraphError(
        f"{node.name!r} ({target_name(node)}) at {source_of(node) or 'an unknown line'} cannot be "
        f"planned for symbolic sizes: {why}. Say dynamic=False: each shape gets its own graph.",
        node.name,
        target_name(node),
        source_of(node),
    )


def symbolic_again(graph: fx.Graph) -> None:
    """Give the numbers of a rewritten graph their symbols back; tensors keep their known sizes.

    AOTAutograd counts the symbols that are saved. Of saved tensors with symbolic sizes it would
    note the places, and those differ from one schedule to the next.
    """
    for node in graph.nodes:
        before = node.meta.pop(SYMBOLIC, None)
        if isinstance(before, SYMBOLS):
            node.meta["val"] = before


def is_size(node: fx.Node) -> bool:
    """Is it a symbolic input: a number that the graph is told?"""
    return node.op == "placeholder" and isinstance(node.meta.get(SYMBOLIC), torch.SymInt)


def place_of(node: fx.Node) -> tuple[tuple[object, ...], ...]:
    """Symbolic sizes and strides of a node's tensor: equal if they are at any sizes.

    Empty where no sizes were put in, and where they cannot vary.
    """
    value = node.meta.get(SYMBOLIC)
    if not isinstance(value, torch.Tensor):
        return ()
    return tuple(_text(n) for n in value.shape), tuple(_text(n) for n in value.stride())


def _text(size: object) -> object:
    return str(size.node.expr) if isinstance(size, torch.SymInt) else size
