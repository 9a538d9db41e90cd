"""``verify`` against plans that are broken on purpose: each fault is found as what it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxremat
from fxremat.check import Check, same_bits
from fxremat.errors import (
    BuffersDifferError,
    GradientsDifferError,
    InputsDifferError,
    OutputsDifferError,
    OverBudgetError,
    PeakDiffersError,
    RandomStateDiffersError,
    StepFailsError,
    VerificationError,
)
from fxremat.install import Installed
from fxremat.passes.split import Split
from fxremat.unrewritten import ReferenceTrace
from tests import faultless, faults
from tests.faults import Fault, in_gradient, in_output, leak, planted, retarget
from tests.programs import buffers, detached, noisy, written_input
from tests.steps import QUICK, Make, made, owner_of

aten = torch.ops.aten
ALL: dict[str, Any] = {"solver": "recompute_all"}
FLOOR: dict[str, Any] = {"budget": "floor"}

FAULTS = {
    "a mask drawn anew": Fault(
        noisy, faults.redraw_without_state, GradientsDifferError, "elements differ", FLOOR
    ),
    "a replay of another operator": Fault(
        faultless.net, retarget("tanh_replay", aten.sin.default), GradientsDifferError,
        "elements differ", ALL,
    ),
    "a replay that is zeros": Fault(
        faultless.net, retarget("tanh_replay", aten.zeros_like.default), GradientsDifferError,
        "elements differ, the first at", ALL,
    ),
    "a replay that reads another value": Fault(
        faultless.net, faults.read_another, GradientsDifferError, "elements differ", ALL
    ),
    "statistics updated twice": Fault(
        faultless.net, faults.update_twice, BuffersDifferError, "buffer norm.running_mean: 16 of 16"
    ),
    "a buffer read after it was written": Fault(
        buffers, faults.read_after_write, StepFailsError, "modified by an inplace operation",
        {"solver": "save_all"},
    ),
    "an argument written to in the backward": Fault(
        faultless.net, faults.write_to_saved, InputsDifferError, "input 0: 1,600 of 1,600"
    ),
    "an argument written to once too often": Fault(
        written_input, faults.write_an_input_twice, InputsDifferError, "input 1: 6 of 6"
    ),
    "a draw too many": Fault(
        faultless.net, faults.draw_once_more, RandomStateDiffersError, "generator cpu"
    ),
    "a gradient dropped": Fault(
        faultless.net, faults.drop_gradient, GradientsDifferError, "it is missing"
    ),
    "a gradient too many": Fault(
        detached, faults.invent_gradient, GradientsDifferError, "unrewritten step has none"
    ),
    "a gradient off by one bit": Fault(
        faultless.net, in_gradient(faults.ulp), GradientsDifferError, "1 of [0-9]+ elements differ"
    ),
    "an output off by one bit": Fault(
        faultless.two, in_output(1, faults.ulp), OutputsDifferError,
        r"output 1: 1 of 30 elements differ, the first at \[0, 0\]",
    ),
    "an output laid out otherwise": Fault(
        faultless.two, in_output(1, faults.columns_first), OutputsDifferError,
        r"output 1: its strides is \(1, 5\) instead of \(6, 1\)",
    ),
    "one tensor for two outputs": Fault(
        faultless.two, faults.one_for_both, OutputsDifferError, "tensor 0, tensor 0"
    ),
    "two outputs in one memory": Fault(
        faultless.two, faults.one_memory_for_both, OutputsDifferError,
        "its memory shared is with output 1 instead of with nothing",
    ),
    "a value kept for ever": Fault(
        faultless.net, leak("tanh", backward=False), OverBudgetError, "more than the budget",
        {**FLOOR, **ALL},
    ),
    "a value kept for ever within the budget": Fault(
        faultless.net, leak("tanh", backward=False), PeakDiffersError, "the step held", ALL
    ),
    "a value kept for ever after the peak": Fault(
        faultless.net, leak("native_batch_norm_backward_part", backward=True), PeakDiffersError,
        "left behind", ALL,
    ),
    "an operator that fails": Fault(
        faultless.net, in_gradient(faults.fail), StepFailsError, "a kernel that does not exist"
    ),
    "an operator that errs the second time": Fault(
        faultless.two, faults.err_later, OutputsDifferError, "run again: output 1"
    ),
    "an operator that errs in the second step": Fault(
        faultless.two, faults.err_later, OutputsDifferError, "step 1: output 1",
        {"steps": 2},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    faults.LEAKED.clear()


class Kept:
    """A callable's state, to be compared with what it is later."""

    def __init__(self, fn: Any, args: tuple[Any, ...]) -> None:
        self.module, self.args = owner_of(fn), args
        if self.module is not None:  # gradients that the verification must not touch
            for parameter in self.module.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
        self.objects, self.values = self.now(), [t.clone() for t in self.now()]
        self.generator = torch.get_rng_state()

    def now(self) -> list[torch.Tensor]:
        module = self.module
        own = [] if module is None else [*module.parameters(), *module.buffers()]
        tensors = [*own, *(a for a in self.args if isinstance(a, torch.Tensor))]
        detached = [t.detach() for t in tensors]
        return [*detached, *(t.grad for t in tensors if t.grad is not None)]

    def assert_untouched(self) -> None:
        now = self.now()
        assert len(now) == len(self.objects)
        for one, other, value in zip(now, self.objects, self.values, strict=True):
            assert one.data_ptr() == other.data_ptr()
            assert same_bits(one, value)
        assert torch.equal(torch.get_rng_state(), self.generator)
        assert self.module is None or "_compiled_call_impl" not in self.module.__dict__


def floor_bytes(make: Make, **options: Any) -> int:
    fn, args = made(make)
    problem = fxremat.capture(fn, args, **QUICK)
    solver = options.get("solver", "auto")
    if solver == "auto":
        return fxremat.frontier(problem, 2)[-1].peak_bytes
    return fxremat.plan(problem, "1GiB", solver=solver).peak_bytes


def checked(make: Make, options: dict[str, Any]) -> tuple[Check, Kept]:
    wanted = {"budget": "64MiB", "repeats": 1, **QUICK, **options}
    if wanted["budget"] == "floor":
        wanted["budget"] = floor_bytes(make, **options)
    fn, args = made(make)
    kept = Kept(fn, args)
    return fxremat.verify(fn, args, **wanted), kept


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found_as_what_it_is_and_nothing_is_left_of_it(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, fault.plant)
    if fault.error is StepFailsError:  # there is nothing to compare: the verification raises it
        with pytest.raises(StepFailsError, match=fault.words):
            checked(fault.make, fault.options)
        return
    check, kept = checked(fault.make, fault.options)
    kept.assert_untouched()
    assert not check.ok
    with pytest.raises(VerificationError, match=fault.words) as caught:
        check.raise_if_broken()
    assert type(caught.value) is fault.error


SOUND = {
    "noisy": (noisy, FLOOR), "net": (faultless.net, {**FLOOR, **ALL}), "buffers": (buffers, FLOOR),
    "written_input": (written_input, FLOOR), "detached": (detached, FLOOR),
    "two": (faultless.two, {"steps": 2}), "nans": (faultless.nans, FLOOR),
    "evaluated": (faultless.evaluated, FLOOR), "convolution": (faultless.convolution, FLOOR),
}  # fmt: skip


@pytest.mark.parametrize(("make", "options"), SOUND.values(), ids=SOUND)
def test_the_same_models_without_a_fault_pass(make: Make, options: dict[str, Any]) -> None:
    check, kept = checked(make, options)
    check.raise_if_broken()
    assert check.ok
    assert check.measured_peak_bytes == check.predicted_peak_bytes
    kept.assert_untouched()


@pytest.mark.parametrize(
    "name", ["a replay that is zeros", "a draw too many", "an operator that fails",
             "a value kept for ever within the budget", "an operator that errs the second time"]
)  # fmt: skip
def test_the_option_refuses_the_same_faults_before_the_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    planted(monkeypatch, fault.plant)
    options = {"budget": "64MiB", **QUICK, **fault.options}
    fn, args = made(fault.make)
    kept = Kept(fn, args)
    fxremat.optimize(fn, options.pop("budget"), verify=True, **options)
    with pytest.raises(fault.error, match=fault.words):
        fn(*args)
    kept.assert_untouched()


def wrapped(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Have planned steps return something else."""
    called = Installed.__call__

    def planned(self: Installed, *args: Any, **kwargs: Any) -> Any:
        output = called(self, *args, **kwargs)
        return output if self.trace is ReferenceTrace else change(output)

    monkeypatch.setattr(Installed, "__call__", planned)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: (o[0], o[1].detach()), "output 1: its requires_grad is False instead of True"),
        (lambda o: (o[0], o[1].double()), "output 1: its dtype is torch.float64 instead of"),
        (lambda o: [*o], "the output: its structure is list"),
        (lambda o: (*o, None), "the output: its structure is tuple"),
        (lambda o: (o[0], o[1][:4]), r"output 1: its shape is \(4, 6\) instead of \(5, 6\)"),
        (lambda o: (o[0],), "output 1: it is missing"),
    ],
)
def test_an_output_of_another_kind_is_found(
    change: Callable[[Any], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped(monkeypatch, change)
    check, _ = checked(faultless.two, {})
    assert not check.outputs_equal
    with pytest.raises(OutputsDifferError) as caught:
        check.raise_if_broken()
    assert any(words.replace("\\", "") in line for line in caught.value.details)


def test_a_workspace_that_is_not_charged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxremat.pipeline.with_workspaces", lambda chosen, measured: chosen)
    for options, error in ((FLOOR, OverBudgetError), ({}, PeakDiffersError)):
        check, _ = checked(faultless.convolution, options)
        assert not check.as_predicted
        with pytest.raises(error):
            check.raise_if_broken()


def test_a_fault_of_replays_shows_at_the_budgets_that_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plant(graphs: Split) -> None:
        for node in graphs.backward.graph.nodes:
            if "tanh_replay" in node.name:
                node.target = aten.sin.default

    planted(monkeypatch, plant)
    ample, _ = checked(faultless.net, {})
    assert ample.ok
    tight, _ = checked(faultless.net, ALL)
    assert not tight.gradients_equal


def test_a_fault_in_evaluation_shows_when_that_is_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plant(graphs: Split) -> None:
        if not any("dropout" in node.name for node in graphs.forward.graph.nodes):
            in_gradient(faults.ulp)(graphs)

    planted(monkeypatch, plant)
    assert checked(faultless.net, {})[0].ok
    assert not checked(faultless.evaluated, {})[0].gradients_equal
