"""Where a graph's arguments and results are in its problem, by AOTAutograd's descriptions."""

from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

from fxremat.passes.extract import Analysis
from fxremat.pieces import Ends


def ends_of(analysis: Analysis) -> Ends:
    """Find the ends of a joint graph.

    Args:
        analysis: Of the joint graph; a problem extracted from it numbers storages alike.

    Returns:
        For each argument and output of the traced function its storages.
    """
    joint, of = analysis.joint, analysis.storages.of
    inputs: dict[int, int] = {}
    tangents: dict[int, int] = {}
    for node in joint.graph.find_nodes(op="placeholder"):
        described = node.meta.get("desc")
        if isinstance(described, PlainAOTInput):
            inputs[described.idx] = _only(of[node.name])
        if isinstance(described, TangentAOTInput) and isinstance(described.output, PlainAOTOutput):
            tangents[described.output.idx] = _only(of[node.name])
    gradients: dict[int, int] = {}
    outputs: dict[int, int] = {}
    for result, described in zip(joint.outputs, joint.output_descriptions, strict=True):
        g = _only(of[result.name]) if isinstance(result, fx.Node) else -1
        if isinstance(described, PlainAOTOutput):
            outputs[described.idx] = g
        if isinstance(described, GradAOTOutput) and isinstance(described.grad_of, PlainAOTInput):
            gradients[described.grad_of.idx] = g
    num_inputs = max((*inputs, *gradients), default=-1) + 1
    num_outputs = max((*outputs, *tangents), default=-1) + 1
    return Ends(
        inputs=tuple(inputs.get(i, -1) for i in range(num_inputs)),
        gradients=tuple(gradients.get(i, -1) for i in range(num_inputs)),
        outputs=tuple(outputs.get(i, -1) for i in range(num_outputs)),
        tangents=tuple(tangents.get(i, -1) for i in range(num_outputs)),
    )


def _only(storages: tuple[int, ...]) -> int:
    return storages[0] if len(storages) == 1 else -1
