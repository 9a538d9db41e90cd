"""The rewrite: a joint graph and a schedule become a joint graph with explicit replay nodes.

The result is a whole graph that runs and compares on its own. Its order is the order that runs:
inputs, forward, backward with every replay just before the step that needs it, output. Replays are
real nodes with names that say what they copy (``addmm_3_replay``) and the metadata of the original.

Views cost nothing and are made where they are read: each phase, and each new copy of a storage,
gets views of its own. No pass that merges equal nodes may run after this one.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

from fxremat.errors import UnsupportedGraphError
from fxremat.passes.calls import FROM_MASK, call_of, describe, mask_arguments
from fxremat.passes.extract import Analysis
from fxremat.passes.joint import source_of
from fxremat.passes.reuse import write_over
from fxremat.problem import RematProblem
from fxremat.simulate import Schedule, Step

CONVERT = torch.ops.prims.convert_element_type.default
MULTIPLY = torch.ops.aten.mul.Tensor


@dataclass(frozen=True)
class Rewritten:
    """A rewritten joint graph.

    Attributes:
        module: The graph.
        num_forward_outputs: How many of its outputs belong to the forward.
        backward: Names of the nodes that run in the backward.
        replays: Names of the replay nodes among them, in order.
    """

    module: fx.GraphModule
    num_forward_outputs: int
    backward: frozenset[str]
    replays: tuple[str, ...]


def rewrite(
    analysis: Analysis, problem: RematProblem, schedule: Schedule, *, decomposed: bool = False
) -> Rewritten:
    """Write a schedule down as a graph.

    Args:
        analysis: Of the joint graph.
        problem: Extracted from the same analysis.
        schedule: What runs, in order.
        decomposed: Use only operators that Inductor does not decompose; it has done that by now.

    Returns:
        The rewritten joint graph; the original is left as it was.
    """
    return _Writer(analysis, problem, decomposed).write(schedule)


class _Writer:
    """Writes one graph.

    ``results`` holds the newest copy of each input and of what each operation returned, ``views``
    that of everything derived from them for free. A read takes the newest.
    """

    def __init__(self, analysis: Analysis, problem: RematProblem, decomposed: bool) -> None:
        self.decomposed = decomposed
        self.analysis = analysis
        self.problem = problem
        self.nodes = analysis.nodes
        self.graph = fx.Graph()
        self.results: dict[str, fx.Node] = {}
        self.views: dict[str, fx.Node] = {}
        self.states: dict[int, fx.Node] = {}  # saved generator states, by operation
        self.replays: list[str] = []
        self.in_backward = False

    def write(self, schedule: Schedule) -> Rewritten:
        joint = self.analysis.joint
        for node in joint.graph.find_nodes(op="placeholder"):
            self.results[node.name] = self.graph.node_copy(node)
        redrawn = {
            step.operation
            for step in schedule.backward
            if step.replay >= 0 and self.problem.replays[step.replay].variant == "redraw"
        }
        for index in schedule.forward:
            if index in redrawn:
                self._run_keeping_state(index)
            else:
                self._run(index)
        outputs = [self._output(node) for node in joint.forward_outputs]
        written = len(self.graph.nodes)
        self.views.clear()  # the backward makes its own
        self.in_backward = True
        for step in schedule.backward:
            if step.replay < 0:
                self._run(step.operation)
            else:
                self._replay(step)
        outputs += [self._output(node) for node in joint.gradients]
        backward = frozenset(node.name for node in list(self.graph.nodes)[written:])
        self.graph.output(tuple(outputs)).meta["desc"] = joint.output_descriptions
        self.graph.lint()
        module = fx.GraphModule(joint.module, self.graph)
        return Rewritten(module, joint.num_forward_outputs, backward, tuple(self.replays))

    def _output(self, node: fx.Node | None) -> fx.Node | None:
        return self._fetch(node) if isinstance(node, fx.Node) else node

    def _is_result(self, node: fx.Node) -> bool:
        """Is it an input, or what an operation returned, rather than derived for free?"""
        made = node.args[0] if is_part(node) else node
        return node.op == "placeholder" or (
            isinstance(made, fx.Node) and made.name in self.analysis.reads
        )

    def _fetch(self, node: fx.Node) -> fx.Node:
        """The copy that a read takes now; views are made on the way (a loop: chains are long)."""
        stack = [node]
        while stack:
            top = stack[-1]
            if self._is_result(top) or top.name in self.views:
                stack.pop()
                continue
            missing = [
                user
                for user in top.all_input_nodes
                if not self._is_result(user) and user.name not in self.views
            ]
            if missing:
                stack.extend(missing)
                continue
            self.views[top.name] = self.graph.node_copy(top, self._newest)
            stack.pop()
        return self._newest(node)

    def _newest(self, node: fx.Node) -> fx.Node:
        if self.in_backward and node.name in self.analysis.joint.mutated:
            raise UnsupportedGraphError(
                f"the backward reads {describe(node)}, which the step has overwritten by then. "
                "Clone it in the model before it is written.",
                node.name,
            )
        found = self.views.get(node.name) or self.results.get(node.name)
        if found is None:
            raise UnsupportedGraphError(
                f"{describe(node)} at {source_of(node) or 'an unknown line'} is read before the "
                "schedule has run it.",
                node.name,
            )
        return found

    def _call(
        self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Any, name: str
    ) -> fx.Node:
        """A new node that stands where ``node`` stood for its readers."""
        copy = self.graph.create_node("call_function", target, args, kwargs, name)
        copy.meta.update(node.meta)
        return copy

    def _arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = tuple(fx.node.map_arg(node.args, self._fetch))
        return args, dict(fx.node.map_arg(node.kwargs, self._fetch))

    def _run(self, index: int) -> None:
        """An operation in its own phase."""
        node = self.nodes[self.analysis.operations[index]]
        args, kwargs = self._arguments(node)
        reuse = self.analysis.reuses.get(node.name)
        if reuse is None:
            self._store(node, self._call(node, node.target, args, kwargs, node.name))
            return
        over = self._fetch(self.nodes[reuse.argument])
        args = (node.target, reuse.target, reuse.out, over, *args)
        copy = self._call(node, write_over, args, kwargs, node.name)
        copy.meta["functional"] = call_of(node)
        self._store(node, copy)

    def _run_keeping_state(self, index: int) -> None:
        """A random operation of the forward that a replay will draw again."""
        node = self.nodes[self.analysis.operations[index]]
        args, kwargs = self._arguments(node)
        pair = self._call(
            node, run_and_save_rng_state, (node.target, *args), kwargs, f"{node.name}_keeping_state"
        )
        state = self.graph.call_function(operator.getitem, (pair, 0))
        state.meta["val"] = pair.meta["val"] = host_state()
        result = self._call(node, operator.getitem, (pair, 1), {}, node.name)
        self.states[index] = state
        self._store(node, result)

    def _replay(self, step: Step) -> None:
        """A forward operation once more; what it keeps is what later reads take."""
        node = self.nodes[self.analysis.operations[step.operation]]
        variant = self.problem.replays[step.replay].variant
        name = f"{node.name}_replay"
        if variant == "from_mask":
            result, mask = sorted((user for user in node.users if is_part(user)), key=_position)
            made = mask_arguments(node, self._fetch(_first(node)), self._fetch(mask))
            copy = self._from_mask(result, made, name)
            self._renew({result.name: copy})
        elif variant == "redraw":
            args, kwargs = self._arguments(node)
            args = (self.states[step.operation], node.target, *args)
            copy = self._call(node, run_with_rng_state, args, kwargs, name)
            self._store(node, copy, step.keeps)
        else:
            copy = self._call(node, node.target, *self._arguments(node), name)
            self._store(node, copy, step.keeps)
        self.replays.append(copy.name)

    def _from_mask(self, result: fx.Node, made: tuple[Any, Any, float], name: str) -> fx.Node:
        """A dropout's result from its mask."""
        if not self.decomposed:
            return self._call(result, FROM_MASK, made, {}, name)
        value, mask, scale = made
        dtype = result.meta["val"].dtype
        kept = self._call(result, CONVERT, (mask, dtype), {}, f"{name}_mask")
        scaled = self._call(result, MULTIPLY, (kept, scale), {}, f"{name}_scaled")
        return self._call(result, MULTIPLY, (value, scaled), {}, name)

    def _store(self, node: fx.Node, copy: fx.Node, keeps: tuple[int, ...] | None = None) -> None:
        """Take a result apart at once, so that what nobody keeps is freed."""
        parts = sorted((user for user in node.users if is_part(user)), key=_position)
        if not parts:
            self._renew({node.name: copy})
            return
        of = self.analysis.storages.of
        self._renew(
            {
                part.name: self._call(
                    part, operator.getitem, (copy, part.args[1]), {}, copy.name + "_part"
                )
                for part in parts
                if keeps is None or set(keeps).intersection(of[part.name])
            }
        )

    def _renew(self, results: dict[str, fx.Node]) -> None:
        """Let later reads take new copies: views of older ones no longer count."""
        of = self.analysis.storages.of
        renewed = {g for name in results for g in of[name]}
        self.results.update(results)
        self.views = {
            name: view for name, view in self.views.items() if not renewed.intersection(of[name])
        }


def is_part(node: fx.Node) -> bool:
    """Does it take one part of a result?"""
    return node.target is operator.getitem


def _position(part: fx.Node) -> int:
    position = part.args[1]
    assert isinstance(position, int)
    return position


def _first(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def host_state() -> torch.Tensor:
    """What stands for a generator's state in the metadata of a graph."""
    return torch.empty(0, dtype=torch.uint8)
