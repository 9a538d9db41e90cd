"""The rewrite: a whole graph with explicit replays that computes what the joint graph computes."""

from typing import Any

import pytest
import torch
from torch import fx, nn

from fxremat.check import same_bits
from fxremat.errors import UnsupportedGraphError
from fxremat.passes.rewrite import rewrite
from fxremat.problem import RematProblem
from fxremat.schedule import expand
from fxremat.simulate import Schedule
from tests.joints import flat, joint_graph, posed, real_inputs


def blocks(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        h = torch.tanh(x @ w)
        x = (
            x
            + nn.functional.layer_norm(nn.functional.dropout(h, 0.3), (x.shape[1],))
            .view(x.shape[0], -1)
            .sin()
        )
    return x.square().sum(1)


def drawn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = torch.exp(x * torch.rand_like(x)) @ w
    return torch.sigmoid(h + torch.bernoulli(h.sigmoid()))


ARGS = (torch.randn(6, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True))


def runs(
    module: fx.GraphModule, inputs: list[Any]
) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """What a graph returns under a seed, and the generator afterwards."""
    torch.manual_seed(3)
    found = flat(fx.Interpreter(module).run(*inputs))
    return found, torch.get_rng_state()


def schedules(problem: RematProblem) -> list[Schedule]:
    """Everything saved, nothing, every second candidate; replays from masks and from states."""
    redraws = [i for i, replay in enumerate(problem.replays) if replay.variant == "redraw"]
    return [
        expand(problem, problem.candidates),
        expand(problem, ()),
        expand(problem, (), redraws),
        expand(problem, problem.candidates[::2]),
        expand(problem, problem.candidates[1::2], redraws),
    ]


@pytest.mark.parametrize("fn", [blocks, drawn])
def test_the_rewritten_joint_graph_computes_the_same_bits(fn: Any) -> None:
    joint = joint_graph(fn, ARGS)
    analysis, problem = posed(joint)
    inputs = real_inputs(joint)
    expected, generator = runs(joint.module, inputs)
    for schedule in schedules(problem):
        found, after = runs(rewrite(analysis, problem, schedule).module, inputs)
        assert len(found) == len(expected)
        assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))
        assert torch.equal(after, generator)


def test_the_joint_graph_is_left_as_it_was() -> None:
    joint = joint_graph(blocks, ARGS)
    analysis, problem = posed(joint)
    before = joint.module.print_readable(print_output=False)
    rewrite(analysis, problem, expand(problem, ()))
    assert joint.module.print_readable(print_output=False) == before


def test_replays_say_what_they_copy_and_where_it_comes_from() -> None:
    joint = joint_graph(blocks, ARGS)
    analysis, problem = posed(joint)
    schedule = expand(problem, ())
    rewritten = rewrite(analysis, problem, schedule)
    assert len(rewritten.replays) == sum(step.replay >= 0 for step in schedule.backward) > 0
    nodes = {node.name: node for node in rewritten.module.graph.nodes}
    for name in rewritten.replays:
        original, _, rest = name.partition("_replay")
        assert rest == "" or rest.lstrip("_").isdigit()
        assert name in rewritten.backward
        assert "test_rewrite.py" in nodes[name].meta["stack_trace"]
        assert original in analysis.nodes


def test_noop_everything_saved_replays_nothing() -> None:
    joint = joint_graph(blocks, ARGS)
    analysis, problem = posed(joint)
    rewritten = rewrite(analysis, problem, expand(problem, problem.candidates))
    assert rewritten.replays == ()
    operations = [n for n in rewritten.module.graph.nodes if n.name in analysis.operations]
    assert [n.name for n in operations] == list(analysis.operations)


def test_a_replay_stands_before_its_first_reader() -> None:
    joint = joint_graph(blocks, ARGS)
    analysis, problem = posed(joint)
    rewritten = rewrite(analysis, problem, expand(problem, ()))
    order = {node: place for place, node in enumerate(rewritten.module.graph.nodes)}
    for node in rewritten.module.graph.nodes:
        assert all(order[user] > order[node] for user in node.users)


def test_a_schedule_that_reads_too_early_is_refused() -> None:
    joint = joint_graph(blocks, ARGS)
    analysis, problem = posed(joint)
    whole = expand(problem, problem.candidates)
    with pytest.raises(UnsupportedGraphError, match="before the schedule has run it"):
        rewrite(analysis, problem, Schedule(whole.forward[1:], whole.backward))
