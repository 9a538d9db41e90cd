"""Joint graphs of small functions with real inputs, for tests of single passes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from fxremat.costtable import Cost
from fxremat.passes.extract import Analysis, analyse, extract
from fxremat.passes.joint import Joint
from fxremat.passes.tracing import compiling, joint_of
from fxremat.problem import RematProblem


def joint_graph(fn: Callable[..., Any], args: Sequence[torch.Tensor]) -> Joint:
    """The joint graph that AOTAutograd makes of a callable."""
    found: list[Joint] = []

    def partition(
        module: fx.GraphModule, _inputs: object, *, num_fwd_outputs: int, **_: object
    ) -> Any:
        found.append(joint_of(module, num_fwd_outputs))
        raise _FoundError

    def run(module: fx.GraphModule, _inputs: object) -> Any:
        return module.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition)
    compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)
    try:
        with compiling():
            compiled(*args)
    except torch._dynamo.exc.BackendCompilerFailed as failed:
        if not isinstance(failed.inner_exception, _FoundError):
            raise
    return found[0]


class _FoundError(Exception):
    """Ends the trace once the joint graph is there."""


def posed(joint: Joint) -> tuple[Analysis, RematProblem]:
    """The problem of a joint graph in which every call costs 1 ns and has no workspace."""
    analysis = analyse(joint)
    return analysis, extract(analysis, lambda call: Cost(1, 0), outputs_held=True, resident_bytes=0)


def real_inputs(joint: Joint) -> list[Any]:
    """Seeded values for every input of a joint graph, tangents included."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for node in joint.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        value = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype)
        found.append(
            value.normal_(generator=generator) if fake.is_floating_point() else value.zero_()
        )
    return found


def flat(result: Any) -> list[torch.Tensor | None]:
    """What a graph returned, in order."""
    return list(torch.utils._pytree.tree_leaves(result, is_leaf=lambda leaf: leaf is None))
