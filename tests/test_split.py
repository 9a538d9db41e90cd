"""The split: ``primals -> (outputs, saved)`` and ``(saved, tangents) -> gradients``."""

from typing import Any

import pytest
import torch

from fxremat.check import same_bits
from fxremat.passes.boxed import boxed
from fxremat.passes.joint import is_tangent
from fxremat.passes.reference import reference_partition
from fxremat.passes.rewrite import rewrite
from fxremat.passes.split import Split, saved_tensors, split
from fxremat.schedule import expand
from fxremat.simulate import simulate
from tests.joints import flat, joint_graph, posed, real_inputs
from tests.test_rewrite import ARGS, blocks, drawn, schedules


def step(
    forward: Any, backward: Any, outputs: int, primals: list[Any], tangents: list[Any]
) -> list[Any]:
    """Run both graphs as AOTAutograd does; outputs, gradients and the generator's state."""
    torch.manual_seed(3)
    results = list(boxed(forward)(list(primals)))
    gradients = boxed(backward)([*results[outputs:], *tangents])
    return [*results[:outputs], *flat(gradients), torch.get_rng_state()]


@pytest.mark.parametrize("fn", [blocks, drawn])
def test_both_graphs_give_the_bits_of_torchs_own_partition(fn: Any) -> None:
    joint = joint_graph(fn, ARGS)
    analysis, problem = posed(joint)
    inputs = real_inputs(joint)
    count = joint.num_forward_outputs
    marks = [is_tangent(node) for node in joint.graph.find_nodes(op="placeholder")]
    primals = [value for value, mark in zip(inputs, marks, strict=True) if not mark]
    tangents = [value for value, mark in zip(inputs, marks, strict=True) if mark]
    forward, backward = reference_partition(joint.module, None, num_fwd_outputs=count)
    expected = step(forward, backward, count, primals, tangents)
    for schedule in schedules(problem):
        divided = split(rewrite(analysis, problem, schedule))
        found = step(divided.forward, divided.backward, count, primals, tangents)
        assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


def divided_of(saved_share: int) -> tuple[Split, list[int]]:
    """A split that saves every n-th candidate, and the bytes that the simulator calls saved."""
    joint = joint_graph(blocks, ARGS)
    analysis, problem = posed(joint)
    schedule = expand(problem, problem.candidates[::saved_share] if saved_share else ())
    saved = [problem.storages[g] for g in simulate(problem, schedule).saved]
    sizes_bytes = [0 if storage.lazy else storage.size_bytes for storage in saved]
    return split(rewrite(analysis, problem, schedule)), sorted(sizes_bytes)


@pytest.mark.parametrize("share", [0, 1, 2])
def test_what_is_saved_is_what_the_simulator_says(share: int) -> None:
    divided, expected_bytes = divided_of(share)
    crossing = zip(divided.saved, saved_tensors(divided), strict=True)
    made = [tensor for name, tensor in crossing if not name.startswith("primals")]
    assert sorted(tensor.untyped_storage().nbytes() for tensor in made) == expected_bytes


def test_the_backward_takes_saved_values_first_and_tangents_after() -> None:
    divided, _ = divided_of(1)
    names = [node.name for node in divided.backward.graph.find_nodes(op="placeholder")]
    assert tuple(names[: len(divided.saved)]) == divided.saved
    assert all("tangents" in name for name in names[len(divided.saved) :])
    (output,) = divided.forward.graph.find_nodes(op="output")
    assert tuple(node.name for node in output.args[0][1:]) == divided.saved


def test_unchecked_values_come_last() -> None:
    joint = joint_graph(blocks, ARGS)
    analysis, problem = posed(joint)
    rewritten = rewrite(analysis, problem, expand(problem, problem.candidates))
    saved = split(rewritten).saved
    marked = next(node for node in rewritten.module.graph.nodes if node.name == saved[0])
    marked.meta["saved_tensor_with_no_vc_check"] = True
    assert split(rewritten).saved == (*saved[1:], saved[0])
