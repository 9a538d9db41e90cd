"""Costs that need no device."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fxremat.costtable import Cost
from fxremat.passes.costs import OpCall, cost_key, roofline_costs, uniform_costs
from fxremat.passes.roofline import Machine

aten = torch.ops.aten


def _r(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes)


def test_the_roofline_is_the_longer_of_work_and_bytes() -> None:
    machine = Machine(flops_per_s=1e9, bytes_per_s=1e9, call_ns=7)
    mm = OpCall(aten.mm.default, (_r(11, 13), _r(13, 17)))
    sine = OpCall(aten.sin.default, (_r(101),))
    table = roofline_costs([mm, sine], machine=machine)
    assert table[cost_key(mm)].cost_ns == 7 + 2 * 11 * 13 * 17
    assert table[cost_key(sine)].cost_ns == 7 + 2 * 4 * 101
    assert table.kind == "roofline"
    assert not table.guessed


def test_the_roofline_prices_fake_cuda_tensors_without_a_device() -> None:
    with FakeTensorMode():
        x = torch.empty(512, 512, device="cuda")
        call = OpCall(aten.mm.default, (x, x.t()))
        table = roofline_costs([call])
    assert table[cost_key(call)].cost_ns > 0
    assert ":cuda" in cost_key(call)


def test_the_roofline_uses_the_traced_result_of_what_cannot_run() -> None:
    machine = Machine(flops_per_s=1e9, bytes_per_s=1e9, call_ns=0)
    higher = torch.ops.higher_order.cond
    call = OpCall(higher, (torch.tensor(True), abs, abs, [_r(3)]), result=(_r(250),))
    table = roofline_costs([call], machine=machine)
    assert table[cost_key(call)].cost_ns == 4 * 250 + 4 * 3 + 1
    assert list(table.guessed) == [cost_key(call)]


def test_uniform_costs_count_calls() -> None:
    table = uniform_costs([OpCall(aten.sin.default, (_r(n),)) for n in (3, 5, 3)])
    assert [table[key] for key in table] == [Cost(1), Cost(1)]
    assert table.kind == "uniform"
