"""What must happen once, or be the same a second time: draws, writes, views, effects."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxremat
from fxremat.check import same_bits
from tests.programs import CASES, masked, noisy, recurrence, user_regions
from tests.steps import QUICK, as_traced, captured, hold_at_every_budget, made

AS_TRACED = (recurrence,)  # AOTAutograd sums its gradients in another order than eager


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_plans_change_no_bit(make: Any) -> None:
    hold_at_every_budget(make)


@pytest.mark.parametrize("make", AS_TRACED, ids=lambda make: make.__name__)
def test_plans_change_no_bit_of_what_was_traced(make: Any) -> None:
    hold_at_every_budget(make, reference=as_traced)


@pytest.mark.parametrize("make", [masked, noisy, user_regions], ids=lambda make: make.__name__)
def test_random_draws_can_be_repeated_or_kept(make: Any) -> None:
    problem = captured(make)
    variants = {replay.variant for replay in problem.replays}
    drawing = [op for op in problem.forward if op.must_run and op.creates]
    assert drawing
    assert "redraw" in variants


def test_a_draw_from_its_mask_comes_before_a_second_draw() -> None:
    problem = captured(masked)
    floor = fxremat.frontier(problem, 2)[-1]
    used = {
        problem.replays[step.replay].variant for step in floor.schedule.backward if step.replay >= 0
    }
    assert used & {"from_mask", "redraw"}


def test_autocast_equals_the_unrewritten_graph_bit_for_bit() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.layer(self.norm(self.layer(torch.tanh(self.layer(x))) + x)).float()

    def make() -> tuple[Any, tuple[Any, ...]]:
        return Shared(), (torch.randn(30, 8, requires_grad=True),)

    fn, args = made(make)
    for plan in fxremat.frontier(captured(make), 3):
        check = fxremat.verify(fn, args, budget=plan.peak_bytes, repeats=1, **QUICK)
        check.raise_if_broken()
        assert check.measured_peak_bytes == check.predicted_peak_bytes


def test_a_policy_of_the_user_is_obeyed() -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        chosen = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def make() -> tuple[Any, tuple[Any, ...]]:
        def block(x: torch.Tensor, weight: torch.Tensor) -> Any:
            return torch.sin(torch.cos(x @ weight) @ weight)

        def step(x: torch.Tensor, weight: torch.Tensor) -> Any:
            return checkpoint(block, x, weight, use_reentrant=False, context_fn=contexts)

        return step, (torch.randn(16, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True))

    hold_at_every_budget(make, fractions=(0.5, 0))
    tagged = [op for op in captured(make).forward if op.target == "aten.mm.default"]
    assert tagged
    assert all("MUST_SAVE" in op.why_saved for op in tagged)


@pytest.mark.parametrize("replayable", [(), ("fxremat_tests::scaled",)])
def test_a_custom_operator_runs_once_unless_it_is_named(replayable: tuple[str, ...]) -> None:
    calls: list[int] = []

    @torch.library.custom_op("fxremat_tests::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.numel())
        return x * 3

    scaled.register_fake(torch.empty_like)
    scaled.register_autograd(lambda ctx, gradient: gradient * 3)

    def wide(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for part in x.unbind():
            total = total + torch.sin(scaled(part.expand(40, 5))).sum()
        return total

    def make() -> tuple[Any, tuple[Any, ...]]:
        return wide, (torch.randn(3, 5, requires_grad=True),)

    problem = captured(make, replayable=replayable)
    found = [op for op in problem.forward if "scaled" in op.target]
    assert all(bool(replayable) != ("custom operator" in op.why_saved) for op in found)
    options = {**QUICK, "replayable": replayable}
    gradients = []
    for planned in (False, True):
        fn, (x,) = made(make)
        budget_bytes = fxremat.frontier(problem, 2)[-1].peak_bytes
        step = fxremat.optimize(fn, budget_bytes, **options) if planned else fn
        step(x).backward()
        x.grad = None
        calls.clear()
        step(x).backward()
        gradients.append(x.grad)
    assert same_bits(*gradients)
    assert (len(calls) > 3) == bool(replayable)


def test_what_may_run_again_is_named_in_full() -> None:
    for wrong in ("scaled", ["fxremat_tests::scaled"], ("scaled",)):
        with pytest.raises(fxremat.OptionError, match="mylib::swish"):
            fxremat.optimize(torch.sin, "1MiB", replayable=wrong)  # type: ignore[arg-type]
