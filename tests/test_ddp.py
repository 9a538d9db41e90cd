"""DistributedDataParallel around an optimised module: two processes, gloo, the CPU."""

import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import fxremat
from fxremat.check import same_bits
from tests.steps import QUICK

RANKS, TIMEOUT_S = 2, 90

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="no gloo"
)


class Net(nn.Module):
    """Returns the loss itself; a buffer that is synchronised, a dropout that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(8, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Dropout(0.3),
            nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x).square().mean()


def data(rank: int) -> torch.Tensor:
    torch.manual_seed(10 + rank)
    return torch.randn(500, 8)


def train(call: Callable[..., Any], net: nn.Module, x: torch.Tensor) -> list[Any]:
    """Losses, gradients and buffers of some steps; one of them is of two micro-batches."""
    seen: list[Any] = []
    for number in range(3):
        torch.manual_seed(number)
        net.zero_grad()
        if number == 1 and isinstance(call, DistributedDataParallel):
            with call.no_sync():
                call(x).backward()
        loss = call(x)
        loss.backward()
        seen += [loss.detach(), *(p.grad for p in net.parameters()), *net.buffers()]
        seen = [tensor.detach().clone() for tensor in seen]
    return seen


def spawn(work: Callable[[int], dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Run a function in every rank and return what each wrote; kill all that hangs."""
    context: Any = start_processes(
        _rank, (work, str(folder)), nprocs=RANKS, join=False, start_method="spawn"
    )
    until_s = time.monotonic() + TIMEOUT_S
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < until_s, "the ranks hang"
    finally:
        for process in context.processes:
            process.kill()
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(RANKS)]


def _rank(rank: int, work: Callable[[int], dict[str, Any]], folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS,
        timeout=datetime.timedelta(seconds=TIMEOUT_S // 2),
    )  # fmt: skip
    found = work(rank)
    (Path(folder) / f"rank{rank}").write_text(json.dumps(found))
    distributed.destroy_process_group()


def same(one: list[Any], other: list[Any]) -> bool:
    return all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def compare(rank: int, view: bool) -> dict[str, Any]:
    """A step with a plan against one without, and what the device really held."""
    x, plain, net = data(rank), Net(), Net()
    expected = train(DistributedDataParallel(plain, gradient_as_bucket_view=view), plain, x)
    fxremat.optimize(net, "95%", **QUICK)
    call = DistributedDataParallel(net, gradient_as_bucket_view=view)
    got = train(call, net, x)
    net.zero_grad()
    call(x).backward()
    report = fxremat.report(net)
    net.zero_grad()
    held_bytes = sum(t.nbytes for t in (*net.parameters(), *net.buffers(), x))
    sent_bytes = sum(b.nbytes for b in net.buffers())
    buckets_bytes = sum(p.nbytes for p in net.parameters())
    peak = fxremat.measure_peak(lambda: call(x).backward())
    return {
        "same": same(expected, got),
        "decisions": repr(report.decisions),
        "predicted": report.predicted_peak_bytes,
        "budget": report.budget_bytes,
        "resident": report.resident_bytes,
        "held": held_bytes + buckets_bytes + sent_bytes,
        "measured": peak.peak_bytes + held_bytes + buckets_bytes,
    }


def both_ways(rank: int) -> dict[str, Any]:
    """With gradients of their own, and with gradients that are views of the buckets."""
    return {"copies": compare(rank, view=False), "views": compare(rank, view=True)}


def test_the_bits_are_those_of_ddp_alone_and_its_buckets_are_counted(tmp_path: Path) -> None:
    ranks = spawn(both_ways, tmp_path)
    for way in ("copies", "views"):
        for found in (rank[way] for rank in ranks):
            assert found["same"]
            assert found["decisions"] == ranks[0][way]["decisions"]
            assert found["predicted"] == ranks[0][way]["predicted"]
            assert found["resident"] == found["held"]
            assert found["measured"] <= found["predicted"] <= found["budget"]


def disagree(rank: int) -> dict[str, Any]:
    """Ranks with other costs, hence other plans; then a budget that only one can meet."""
    x, plain, net = data(rank), Net(), Net()
    expected = train(DistributedDataParallel(plain), plain, x)
    costs = {**QUICK, "costs": ("uniform", "roofline")[rank]}
    got = train(DistributedDataParallel(fxremat.optimize(net, "95%", **costs)), net, x)
    lone = Net()
    fxremat.optimize(lone, ("1GiB", 1000)[rank], **QUICK)
    call = DistributedDataParallel(lone, broadcast_buffers=False)
    refused = ""
    try:
        torch.manual_seed(0)
        call(x)
    except fxremat.InfeasibleBudgetError as error:
        refused = type(error).__name__
    torch.manual_seed(0)
    call(x).backward()  # the rank that was refused goes on without a plan
    total = [float(p.grad.double().sum()) for p in lone.parameters() if p.grad is not None]
    return {"same": same(expected, got), "refused": refused, "total": total}


def test_ranks_with_other_plans_or_none_do_not_wait_for_one_another(tmp_path: Path) -> None:
    first, second = spawn(disagree, tmp_path)
    assert first["same"]
    assert second["same"]
    assert (first["refused"], second["refused"]) == ("", "InfeasibleBudgetError")
    assert first["total"] == second["total"]


def refuse(rank: int) -> dict[str, Any]:
    """What cannot be: a plan around DDP."""
    x, call = data(rank), DistributedDataParallel(Net())
    texts = []
    for attempt in (
        lambda: fxremat.optimize(call, "95%", **QUICK),
        lambda: fxremat.optimize(lambda x: call(x), "95%", **QUICK)(x),
    ):
        try:
            attempt()
        except fxremat.FxrematError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return {"texts": texts}


def test_a_plan_around_ddp_is_refused_with_the_order_that_works(tmp_path: Path) -> None:
    for found in spawn(refuse, tmp_path):
        direct, called = found["texts"]
        assert direct.startswith("OptionError")
        assert called.startswith("CaptureError")
        assert all("DistributedDataParallel(fxremat.optimize(" in t for t in (direct, called))
