"""The reference: AOTAutograd's default partition, run by the same executor.

It is torch's own partitioner, so that a fault of ours cannot hide in it, with one repair: fx counts
random operators as impure, so the partition leaves dead ones in the backward, where they would draw
from the generator once more.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._functorch.partitioners import default_partition

from fxremat.passes.effects import is_random


def reference_partition(
    module: fx.GraphModule,
    inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Divide a joint graph as AOTAutograd does by default.

    Args:
        module: The joint graph.
        inputs: Its example inputs.
        num_fwd_outputs: How many outputs belong to the forward.
        static_lifetime_input_indices: As AOTAutograd passes it.

    Returns:
        Forward and backward.
    """
    indices = list(static_lifetime_input_indices or ())
    forward, backward = default_partition(
        module, inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=indices
    )
    for node in reversed(backward.graph.nodes):
        if node.op == "call_function" and not node.users and is_random(node):
            backward.graph.erase_node(node)
    backward.recompile()
    return forward, backward
