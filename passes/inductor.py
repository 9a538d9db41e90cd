"""Inductor as the executor, through its ``custom_partitioner_fn``.

Inductor decomposes and fuses; the plan is made on its decomposed joint graph. Random operators stay
those of eager (``fallback_random``), so that masks and the generator's state are those of the
unrewritten graph.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from fxremat.passes.tracing import keep_buffers

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


class Partitioner(CustomPartitionerFn):
    """Hands Inductor's joint graph to the pipeline."""

    def __init__(self, partition: Partition, identity: str) -> None:
        self.partition = partition
        self.identity = identity

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Divide a joint graph."""
        return self.partition(gm, joint_inputs, num_fwd_outputs=kwargs["num_fwd_outputs"])

    def uuid(self) -> str:
        """What the result depends on besides the graph; None would not stop a cache hit."""
        return f"fxremat:{self.identity}"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """In a key of Inductor's caches, which pickle it, it is its ``uuid``."""
        return str, (self.uuid(),)


@functools.wraps(compile_fx_inner)
def _inner(*args: Any, **kwargs: Any) -> Any:
    keep_buffers()
    return compile_fx_inner(*args, **kwargs)


def compile_with_inductor(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Partition,
    identity: str,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor, partitioned by fxremat.

    Args:
        graph: What Dynamo captured.
        inputs: Its example inputs.
        partition: The partition function.
        identity: Budget and options, for Inductor's cache.

    Returns:
        What runs the graph.
    """
    patches: dict[str, Any] = {
        "custom_partitioner_fn": Partitioner(partition, identity),
        "fallback_random": True,
        "comprehensive_padding": False,  # both may allocate what the plan does not know
        "layout_optimization": False,
    }
    # Passed, not set around the call: the backward compiles later, on CUDA in another thread.
    compiled = compile_fx(graph, list(inputs), inner_compile=_inner, config_patches=patches)
    call: Callable[..., Any] = compiled  # type: ignore[assignment]  # why: other results are of AOT packages
    return call
