"""The numbers of a report are the plan's; its text says what a person needs to know."""

import dataclasses
import sys
import time
from io import StringIO

import pytest

from fxremat.budget import format_bytes
from fxremat.decisions import decisions
from fxremat.plans import Plan, Solution, make_plan
from fxremat.problem import RematProblem
from fxremat.progress import SOLVING, Progress
from fxremat.reporting import GraphReport, RematReport, graph_report, remat_report
from fxremat.schedule import expand
from fxremat.tables import decision_rows, fold_indices, format_cost
from tests.problems import Tape, random_problem, transformer


def chain() -> RematProblem:
    """A step: x -> a -> b -> c -> loss, of which the backward reads a, b and c."""
    tape = Tape()
    x = tape.given("x", 2)
    (a,) = tape.run("a", [x], [3_000_017], 11, module="layers.0")
    (b,) = tape.run("b", [a], [5_000_011], 13, module="layers.1")
    (c,) = tape.run("c", [b], [7_000_003], 17, module="layers.1", replayable=False)
    (loss,) = tape.run("loss", [c], [19], 23)
    tape.turn()
    (grad,) = tape.run("back_c", [c, loss], [29], 31)
    (grad,) = tape.run("back_b", [b, grad], [37], 41)
    (grad,) = tape.run("back_a", [a, grad], [43], 47)
    problem = tape.problem([loss], [grad], resident_bytes=2, name="chain")
    return dataclasses.replace(problem, costs="measured")


def planned(problem: RematProblem, keep: tuple[str, ...], *, bound_ns: int = 0) -> Plan:
    saved = [g for g, storage in enumerate(problem.storages) if storage.name in keep]
    bound_class = "one replay of each operation" if bound_ns else ""
    solution = Solution(expand(problem, saved), bound_ns, bound_class)
    return make_plan(problem, 8 * 2**30, solution, solver="hand", solve_s=0.25)


def reported(plan: Plan, **options: object) -> GraphReport:
    floor = options.pop("floor", lambda: 5)
    return graph_report(plan, baseline_peak_bytes=99, find_floor_bytes=floor, **options)  # type: ignore[arg-type]


def test_decisions_say_what_happens_to_each_value() -> None:
    rows = {row.value: row for row in decisions(planned(chain(), ("b", "loss")))}
    assert {name: row.decision for name, row in rows.items()} == {
        "a": "recompute",
        "b": "save",
        "c": "save",
        "loss": "save",
    }
    assert rows["a"].bytes == rows["a"].freed_bytes == 3_000_017
    assert (rows["a"].cost_ns, rows["b"].cost_ns) == (11, 13)
    assert rows["a"].module == "layers.0"
    assert rows["b"].reason == "fits the budget"
    assert rows["c"].reason == "there is no way to make it again"
    assert rows["loss"].reason == "the caller holds it anyway"


def test_a_value_that_is_made_again_on_the_way_frees_nothing() -> None:
    tape = Tape()
    x = tape.given("x", 2)
    (a,) = tape.run("a", [x], [3], 11)
    (b,) = tape.run("b", [a], [5], 13)
    (out,) = tape.run("out", [b], [7], 17)
    tape.turn()
    (grad,) = tape.run("back", [b], [11], 19)
    problem = tape.problem([out], [grad])
    kept = {row.value: row for row in decisions(planned(problem, ("b",)))}
    assert "a" not in kept
    dropped = {row.value: row for row in decisions(planned(problem, ()))}
    assert (dropped["b"].freed_bytes, dropped["a"].freed_bytes) == (5, 0)
    assert dropped["a"].reason == "made again on the way to other values"


@pytest.mark.parametrize("seed", range(40))
def test_decisions_agree_with_the_simulation(seed: int) -> None:
    problem = random_problem(seed)
    saved = problem.candidates[seed % 2 :: 2]
    plan = make_plan(problem, 2**30, Solution(expand(problem, saved)))
    rows = decisions(plan)
    again = {row.value for row in rows if row.decision == "recompute"}
    assert [row.value for row in rows if row.decision == "save"] == list(plan.saved)
    paid = [step for step in plan.schedule.backward if step.replay >= 0]
    replayed = {g for step in paid for g in step.keeps}.intersection(problem.candidates)
    assert again == {problem.storages[g].name for g in replayed} - set(plan.saved)
    if not any(set(step.keeps) & set(plan.simulation.saved) for step in paid):
        total_ns = sum(problem.replays[step.replay].cost_ns for step in paid)
        assert sum(row.cost_ns for row in rows if row.decision == "recompute") == total_ns


def test_a_report_has_the_numbers_of_the_plan() -> None:
    plan = planned(chain(), ("b", "loss"), bound_ns=5)
    report = remat_report([reported(plan, trace_s=1.5, profile_s=2.5, notes=("a hint.",))])
    assert report.budget_bytes == 8 * 2**30
    assert report.resident_bytes == 2
    assert report.baseline_peak_bytes == 99
    assert report.predicted_peak_bytes == plan.peak_bytes
    assert report.entry_bytes == plan.simulation.entry_bytes
    assert report.saved_bytes == plan.saved_bytes
    assert (report.step_ns, report.recompute_ns, report.lower_bound_ns) == (183, 11, 5)
    assert report.bound_class == "one replay of each operation"
    assert report.gap == pytest.approx(6 / 183)
    assert (report.solver, report.solve_s) == ("hand", 0.25)
    assert (report.trace_s, report.profile_s) == (1.5, 2.5)
    assert report.decisions == decisions(plan)
    assert report.notes == ("a hint.",)
    assert len(report.graphs) == 1


def test_the_floor_is_found_when_asked_for_and_then_kept() -> None:
    calls: list[int] = []

    def floor() -> int:
        calls.append(1)
        return 1234567

    report = remat_report([reported(planned(chain(), ()), floor=floor)])
    assert "report.floor_bytes finds it" in str(report)
    assert calls == []
    assert report.floor_bytes == report.floor_bytes == 1234567
    assert report.graphs[0].floor_bytes == 1234567
    assert calls == [1]
    assert "1,234,567 bytes" in str(report)
    assert "report.floor_bytes finds it" not in str(report)


def test_the_text_says_what_a_person_needs() -> None:
    plan = planned(chain(), ("b", "loss"), bound_ns=5)
    text = str(remat_report([reported(plan, notes=("output 'logits' has a tangent.",))]))
    for part in (
        "chain on cpu",
        "8.00 GiB",
        format_bytes(plan.peak_bytes, exact=True),
        "layers.*",
        "2.9 MiB",
        "11 ns, 6.0% of the step",
        "5 ns (one replay of each operation)",
        "3.3% of the step",
        "Note: output 'logits' has a tangent.",
    ):
        assert part in text


def test_calls_are_never_shown_as_time() -> None:
    plan = planned(dataclasses.replace(chain(), costs="uniform"), ())
    text = str(reported(plan))
    assert "47 calls" in text
    assert " ns" not in text


def test_a_plan_without_recomputation_says_so() -> None:
    problem = chain()
    text = str(reported(planned(problem, tuple(s.name for s in problem.storages))))
    assert "Nothing is recomputed." in text
    assert "none proven" in text


def test_noop_nothing_to_differentiate() -> None:
    text = str(remat_report([reported(planned(chain(), ()), differentiated=False)]))
    assert "Nothing to differentiate" in text
    assert "solver" not in text


def test_several_graphs_add_up() -> None:
    one = reported(planned(chain(), ()), floor=lambda: 5, notes=("same.",))
    other = reported(planned(transformer(1), ()), floor=lambda: 7, notes=("same.",))
    report = remat_report([one, other])
    assert isinstance(report, RematReport)
    assert report.graphs == (one, other)
    assert report.predicted_peak_bytes == max(one.predicted_peak_bytes, other.predicted_peak_bytes)
    assert report.recompute_ns == one.recompute_ns + other.recompute_ns
    assert report.floor_bytes == 7
    assert report.notes == ("same.",)
    assert report.decisions == one.decisions + other.decisions
    assert "transformer 1 layers" in str(report)
    assert remat_report([one], [one, other]).graphs == (one, other)
    assert remat_report([one], [one, other]).predicted_peak_bytes == one.predicted_peak_bytes


def test_long_tables_end_in_a_sum() -> None:
    rows = decision_rows(decisions(planned(transformer(12), ())), "measured")
    assert len(rows) == 20
    assert rows[-1][0] == "others"
    total = sum(row.decision == "recompute" for row in decisions(planned(transformer(12), ())))
    assert sum(row[2] for row in rows) == total


@pytest.mark.parametrize(
    ("module", "folded"),
    [
        ("transformer.h.11.mlp", "transformer.h.*.mlp"),
        ("0.conv1", "*.conv1"),
        ("layers.3", "layers.*"),
        ("down_blocks.0.resnets.12.norm2", "down_blocks.*.resnets.*.norm2"),
        ("", ""),
    ],
)
def test_folds_indices(module: str, folded: str) -> None:
    assert fold_indices(module) == folded


@pytest.mark.parametrize(
    ("cost_ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_234, "1.23 us"),
        (56_700_000, "56.7 ms"),
        (123_456_789, "123 ms"),
        (1_500_000_000, "1.5 s"),
        (5_000_000_000_000, "5,000 s"),
    ],
)
def test_writes_times(cost_ns: int, text: str) -> None:
    assert format_cost(cost_ns) == text


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def lasting(progress: Progress, total: int | None = None) -> None:
    """A stage of 3 parts that is there a little longer than a delay of 0.05 s."""
    with progress.stage(SOLVING, total) as stage:
        for _ in range(3):
            time.sleep(0.05)
            stage.advance()


def test_progress_shows_long_work_on_a_terminal() -> None:
    stream = Terminal()
    lasting(Progress(stream=stream, delay_s=0.05))
    assert "solving" in stream.getvalue()
    assert stream.getvalue().endswith("\r")  # the line is taken away


def test_progress_does_not_show_short_work() -> None:
    stream = Terminal()
    lasting(Progress(stream=stream, delay_s=30.0))
    assert stream.getvalue() == ""


def test_progress_is_silent_without_a_terminal_or_when_told() -> None:
    pipe, terminal = StringIO(), Terminal()
    lasting(Progress(stream=pipe, delay_s=0.0))
    lasting(Progress(False, stream=terminal, delay_s=0.0))
    assert pipe.getvalue() == terminal.getvalue() == ""


@pytest.mark.parametrize("with_tqdm", [True, False])
def test_progress_counts_with_and_without_tqdm(
    with_tqdm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    stream = StringIO()
    lasting(Progress(True, stream=stream), total=3)
    assert "solving" in stream.getvalue()
    assert "3/3" in stream.getvalue()
