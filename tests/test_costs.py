"""Costs: harmless to measure, from wherever it is asked for, and nothing guessed in silence."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from fxremat.costtable import CostTable
from fxremat.passes.allocations import ProfilerBusyError
from fxremat.passes.costs import (
    OpCall,
    cost_key,
    measure_costs,
    roofline_costs,
)

aten = torch.ops.aten

CONV = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def _r(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes)


def test_longer_work_costs_more() -> None:
    small = OpCall(aten.mm.default, (_r(8, 8), _r(8, 8)))
    large = OpCall(aten.mm.default, (_r(512, 512), _r(512, 512)))
    table = measure_costs([large, small])
    assert table[cost_key(large)].cost_ns > 3 * table[cost_key(small)].cost_ns


def test_generators_and_the_callers_tensors_stay_as_they_are() -> None:
    x = _r(5, 7)
    before, state = x.clone(), torch.get_rng_state()
    calls = [
        OpCall(aten.bernoulli.p, (x, 0.5)),
        OpCall(aten.add_.Tensor, (x, 1.0)),
        OpCall(aten.rand_like.default, (x,)),
        OpCall(aten.copy_.default, (x, _r(5, 7))),
    ]
    state = torch.get_rng_state()
    table = measure_costs(calls, limit_s=1.0)
    assert not table.guessed
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, before)
    assert torch.is_grad_enabled()


def test_probabilities_are_drawn_when_normal_floats_are_refused() -> None:
    call = OpCall(aten.bernoulli.default, (torch.rand(7),))
    assert not measure_costs([call]).guessed


# Where it may be called from


def _all_sure(calls: list[OpCall]) -> None:
    table = measure_costs(calls, limit_s=1.0)
    assert not table.guessed
    assert all(table[key].cost_ns > 0 for key in table)


def test_under_a_fake_mode_with_fake_arguments() -> None:
    with FakeTensorMode():
        fake = torch.empty(2, 3, 17, 19), torch.empty(5, 3, 3, 3)
        call = OpCall(aten.convolution.default, (*fake, None, *CONV))
        _all_sure([call])
        assert measure_costs([call])[cost_key(call)].workspace_bytes > 0
        assert type(torch.empty(1)).__name__ == "FakeTensor"  # the mode is back


def test_inside_other_tracers_and_contexts() -> None:
    call = OpCall(aten.mm.default, (_r(7, 5), _r(5, 3)))
    ran = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        _all_sure([call])
        ran.append(1)
        return x.sin() + 1

    graph = make_fx(traced, tracing_mode="symbolic")(_r(3))
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == [aten.sin.default, aten.add.Tensor]  # nothing of ours was traced
    torch.func.vmap(torch.func.grad(lambda x: traced(x).sum()))(_r(2, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        traced(_r(3))
    with torch.device("meta"):
        traced(_r(3))
    with torch.inference_mode():
        traced(_r(3))
    thread = threading.Thread(target=traced, args=(_r(3),))
    thread.start()
    thread.join()
    assert len(ran) == 6


def _graph_calls(graph: torch.fx.GraphModule) -> list[OpCall]:
    def value(node: torch.fx.Node) -> Any:
        return node.meta["val"]

    return [
        OpCall(n.target, torch.fx.map_arg(n.args, value), torch.fx.map_arg(n.kwargs, value))
        for n in graph.graph.nodes
        if isinstance(n.target, torch._ops.OpOverload)
    ]


@pytest.mark.parametrize("dynamic", [False, True])
def test_inside_a_partition_function(dynamic: bool) -> None:
    tables: list[CostTable] = []

    def partition(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> object:
        tables.append(measure_costs(_graph_calls(graph), limit_s=3.0))
        return default_partition(graph, inputs, **options)

    def boxed(graph: torch.fx.GraphModule, inputs: object) -> object:
        graph.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
        graph.recompile()
        run = graph.forward

        def call(arguments: list[object]) -> object:
            return run(arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    backend = aot_autograd(fw_compiler=boxed, bw_compiler=boxed, partition_fn=partition)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 3), torch.nn.Flatten(), torch.nn.Linear(5 * 36, 7), torch.nn.Dropout()
    )
    x = _r(11, 3, 8, 8)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x), torch.zeros(len(x)).long())

    torch.manual_seed(1)
    expected = torch.autograd.grad(loss(x), list(model.parameters()))
    torch.manual_seed(1)
    compiled = torch.compile(loss, backend=backend, fullgraph=True, dynamic=dynamic)
    found = torch.autograd.grad(compiled(x), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(tables) == 1
    assert not tables[0].guessed
    backward = [tables[0][k] for k in tables[0] if k.startswith("aten.convolution_backward")]
    assert len(backward) == 1
    assert backward[0].workspace_bytes > 0


# Guesses


def test_custom_operators_are_not_run_and_say_so() -> None:
    ran = []

    @torch.library.custom_op("fxremat_test::noisy", mutates_args=())
    def noisy(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x.clone()

    noisy.register_fake(lambda x: torch.empty_like(x))
    call = OpCall(torch.ops.fxremat_test.noisy.default, (_r(3),))
    table = measure_costs([call])
    assert ran == []
    assert "may do more than compute" in table.guessed[cost_key(call)]
    assert table[cost_key(call)] == roofline_costs([call])[cost_key(call)]


def test_what_does_not_run_says_why() -> None:
    bad = OpCall(aten.mm.default, (_r(3, 5), _r(3, 5)))
    good = OpCall(aten.sin.default, (_r(3),))
    higher = OpCall(torch.ops.higher_order.cond, (torch.tensor(True), abs, abs, [_r(3)]))
    table = measure_costs([bad, higher, good])
    assert set(table.guessed) == {cost_key(bad), cost_key(higher)}
    assert "RuntimeError" in table.guessed[cost_key(bad)]
    assert "higher-order" in table.guessed[cost_key(higher)]
    assert table[cost_key(bad)].workspace_bytes == 60 + 60  # its inputs, for want of a result


def test_sizes_known_only_at_run_time_say_so() -> None:
    def traced(x: torch.Tensor) -> torch.Tensor:
        return x.nonzero().double().sin()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph = make_fx(traced, tracing_mode="symbolic")(_r(3))
    sine = next(c for c in _graph_calls(graph) if c.target is aten.sin.default)
    table = measure_costs([sine])
    assert "known only when the step runs" in table.guessed[cost_key(sine)]


def test_without_time_everything_is_a_guess() -> None:
    call = OpCall(aten.sin.default, (_r(3),))
    table = measure_costs([call], limit_s=0.0)
    assert table.guessed == {cost_key(call): "the time for measuring was over"}
    assert table[cost_key(call)].cost_ns > 0


def test_what_does_not_fit_is_a_guess_with_both_numbers() -> None:
    small = OpCall(aten.sin.default, (_r(10),))
    large = OpCall(aten.sin.default, (_r(1000),))
    table = measure_costs([small, large], room_bytes=7_999)
    assert list(table.guessed) == [cost_key(large)]
    assert "8,000 bytes" in table.guessed[cost_key(large)]
    assert "7,999" in table.guessed[cost_key(large)]
    assert not measure_costs([large], room_bytes=8_000).guessed


def test_a_running_profile_is_refused_unless_all_is_known(tmp_path: Path) -> None:
    call = OpCall(aten.sin.default, (_r(3),))
    measure_costs([call], cache_dir=tmp_path)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        assert len(measure_costs([call], cache_dir=tmp_path)) == 1
        with pytest.raises(ProfilerBusyError):
            measure_costs([call])


def test_progress_ends_at_the_end() -> None:
    steps: list[tuple[int, int]] = []
    calls = [OpCall(aten.sin.default, (_r(n),)) for n in (3, 5)]
    calls.append(OpCall(aten.mm.default, (_r(3, 5), _r(3, 5))))
    measure_costs(calls, progress=lambda done, total: steps.append((done, total)))
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1][0] == steps[-1][1]
    assert len({total for _, total in steps}) == 1
