"""Random training programs show the same bits at three budgets, and the peaks that are predicted.

``make fuzz`` runs many more; ``tests/fuzz.py`` makes what fails smaller.
"""

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fxremat.passes.seeding import tensors_in
from tests.fuzzing.growing import grow, program_of
from tests.fuzzing.holding import Outcome, hold
from tests.fuzzing.program import Program
from tests.fuzzing.running import Make, References, Run, Seen
from tests.fuzzing.shrinking import shrink
from tests.steps import QUICK

PROGRAMS = 100
SHARE = 0.6  # of the programs that torch runs twice alike, at least

outcomes: Counter[Outcome] = Counter()


@st.composite
def programs(draw: st.DrawFn) -> Program | None:
    """A program, grown by what hypothesis draws."""
    return grow(lambda limit: draw(st.integers(0, limit - 1)))


@settings(
    max_examples=PROGRAMS,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # a failing program is made smaller statement by statement
    suppress_health_check=list(HealthCheck),
)
@given(programs())
def test_a_random_program_keeps_its_bits_and_its_budget(program: Program | None) -> None:
    if program is None:
        outcomes[Outcome.SKIPPED] += 1
        return
    gc.freeze()  # or every measurement looks through all of torch
    verdict = hold(program, QUICK)
    outcomes[verdict.outcome] += 1
    if verdict.outcome is Outcome.FAULT:
        alike = lambda smaller: hold(smaller, QUICK).kind == verdict.kind  # noqa: E731
        small = shrink(program, alike, tries=20)
        pytest.fail(f"{verdict.kind}: {verdict.words}\n{small.source}")


def test_most_random_programs_are_run_and_few_are_refused() -> None:
    ran = outcomes[Outcome.HELD] + outcomes[Outcome.FAULT]
    if not outcomes:
        pytest.skip("the programs were not run")
    assert ran >= SHARE * outcomes.total()
    assert outcomes[Outcome.REFUSED] <= 0.1 * outcomes.total()


def small_program(*statements: str, outputs: tuple[str, ...] = ("v1",)) -> Program:
    return Program(
        {"weight0": "self.weight0 = nn.Parameter(torch.randn(6))"},
        {"x0": "torch.randn(8, 6).requires_grad_()"},
        statements,
        outputs,
        "tuple",
        dict.fromkeys(("x0", "v1", "v2", "v3"), "alike"),
    )


def test_a_seed_gives_the_same_program_again() -> None:
    sources = [program_of(seed) for seed in (3, 3, 4)]
    assert sources[0] == sources[1] != sources[2]


def test_a_printed_program_runs() -> None:
    program = small_program("v1 = F.dropout(x0 * self.weight0, 0.5)", "v2 = Rounded.apply(v1, 4.0)")
    namespace: dict[str, Callable[[], tuple[Callable[..., object], tuple[object, ...]]]] = {}
    exec(program.source, namespace)
    net, args = namespace["make"]()
    (result,) = tensors_in(net(*args))
    assert result.shape == (8, 6)


def test_wrong_bits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    program = small_program("v1 = torch.tanh(x0 * self.weight0)")
    assert hold(program, QUICK).outcome is Outcome.HELD
    plain = Run.watched

    def watched(run: Run, output: object) -> Seen:
        found = plain(run, output)
        gradient = found["gradient of weight0"]
        if run.call is not run.net or run.net._compiled_call_impl is None or gradient is None:
            return found
        return found | {"gradient of weight0": gradient + 1}

    monkeypatch.setattr(Run, "watched", watched)
    verdict = hold(program, QUICK)
    assert (verdict.outcome, verdict.kind) == (Outcome.FAULT, "bits of gradient")


def test_values_far_from_those_of_eager_are_a_fault_though_torch_traces_them_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = small_program("v1 = torch.tanh(x0 * self.weight0)")
    wrong = small_program("v1 = torch.tanh(x0 * self.weight0) * 1.2").maker()
    near = small_program("v1 = torch.tanh(x0 * self.weight0) * 1.001").maker()
    plain = References.__init__
    verdicts = []
    for make in (wrong, near):

        def instead(self: References, given: Make, make: Make = make) -> None:
            plain(self, make)
            self.make = given

        monkeypatch.setattr(References, "__init__", instead)
        verdicts.append(hold(program, QUICK))
    assert (verdicts[0].outcome, verdicts[0].kind) == (
        Outcome.FAULT,
        "far from eager, as traced: output",
    )
    assert (verdicts[1].outcome, verdicts[1].traced) == (Outcome.HELD, True)


def test_a_peak_over_the_budget_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Run.peak_bytes
    monkeypatch.setattr(Run, "peak_bytes", lambda run: plain(run) + 4096)
    verdict = hold(small_program("v1 = torch.tanh(x0 * self.weight0)"), QUICK)
    assert verdict.outcome is Outcome.FAULT
    assert verdict.kind.startswith("over the budget")


def test_a_peak_below_the_prediction_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    program = small_program("v1 = torch.tanh(x0 * self.weight0)")
    assert not hold(program, QUICK).below
    plain = Run.peak_bytes
    monkeypatch.setattr(Run, "peak_bytes", lambda run: plain(run) - 4)
    verdict = hold(program, QUICK)
    assert (verdict.outcome, verdict.below) == (Outcome.HELD, True)


def test_what_torch_does_not_run_is_skipped() -> None:
    broken = small_program("v1 = torch.tanh(x0)", "v1.mul_(2)")
    assert hold(broken, QUICK).outcome is Outcome.SKIPPED
    assert hold(small_program("v1 = x0.missing()"), QUICK).outcome is Outcome.SKIPPED


def test_a_failing_program_is_made_smaller() -> None:
    program = small_program(
        "v1 = torch.tanh(x0)", "v2 = v1 * 2", "v3 = torch.sin(v2)", outputs=("v3", "v2")
    )
    program = replace(program, packing="dict")

    def fails(smaller: Program) -> bool:
        return "torch.sin" in smaller.source and "v3" in smaller.outputs

    small = shrink(program, fails)
    assert small.statements == ("v3 = torch.sin(x0)",)
    assert small.outputs == ("v3",)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
