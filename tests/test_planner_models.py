"""The planner's benchmark: steps become problems without memory, and its random steps hold."""

import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fxremat
from fxremat.problem import Kind

FOLDER = Path(__file__).parents[1] / "examples" / "benchmarks"

pytest.importorskip("transformers")
pytest.importorskip("diffusers")
sys.path.insert(0, str(FOLDER))
import planner  # noqa: E402
import planner_models  # noqa: E402
import planner_problems  # noqa: E402
from planner_random import random_problem  # noqa: E402


def test_an_unrolled_recurrence_grows_with_its_steps() -> None:
    found = []
    for steps in (2, 4):
        torch._dynamo.reset()
        with FakeTensorMode():
            step = planner_models.lstm(steps=steps, width=8, batch=16)
            found.append(planner_problems.captured(step, f"lstm-{steps}"))
    (short, short_facts), (long, long_facts) = found
    assert long.num_forward > short.num_forward + 10
    assert long_facts.nodes > short_facts.nodes
    assert long.name == "lstm-4"
    assert long.costs == "roofline"


def test_a_model_captured_without_memory_equals_the_real_one() -> None:
    torch._dynamo.reset()
    with FakeTensorMode():
        step = planner_models.residual_mlp(blocks=3, width=8, hidden=8, batch=64)
        fake, _ = planner_problems.captured(step)
    torch._dynamo.reset()
    real, _ = planner_problems.captured(planner_models.residual_mlp(3, 8, 8, 64))
    assert fake == real
    sizes = {s.size_bytes for s in real.storages if s.name.startswith(("relu", "add"))}
    assert sizes == {64 * 8 * 4}  # inside a block as between blocks


def test_a_stock_model_gives_one_problem_with_dropouts() -> None:
    torch._dynamo.reset()
    with FakeTensorMode():
        step = planner_models.gpt2(layers=1, width=32, heads=2, batch=2, tokens=16, vocabulary=64)
        problem, facts = planner_problems.captured(step, "tiny")
    assert facts.nodes > len(problem.operations) > problem.num_forward > 20
    assert {replay.variant for replay in problem.replays} == {"same", "from_mask", "redraw"}
    assert max(operation.cost_ns for operation in problem.operations) < 10_000_000


def test_a_random_step_is_saved_once_and_loaded_again(tmp_path: Path) -> None:
    problem, _ = planner_problems.problem_of("random-100", tmp_path)
    assert problem == random_problem(100)
    path = tmp_path / "random-100.json"
    written = path.stat().st_mtime_ns
    assert planner_problems.problem_of("random-100", tmp_path)[0] == problem
    assert path.stat().st_mtime_ns == written
    assert fxremat.load(path) == problem


@pytest.mark.parametrize("forward", [10, 100, 333])
def test_a_random_step_has_the_operations_it_says_and_reads_every_value(forward: int) -> None:
    problem = random_problem(forward, seed=5)
    assert problem.num_forward == forward
    assert problem != random_problem(forward, seed=6)
    read = {g for operation in problem.operations for g in operation.reads}
    read.update(problem.outputs, problem.gradients)
    made = [g for g, storage in enumerate(problem.storages) if storage.kind is Kind.VALUE]
    assert set(made) <= read


def test_a_random_step_can_be_planned_below_its_plain_peak() -> None:
    problem = random_problem(60)
    plan = fxremat.plan(problem, "80%", solver="greedy")
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.recompute_ns > 0


def test_the_table_names_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planner_problems.main(["--folder", str(tmp_path), "--only", "random-100"]) == 0
    (line,) = [text for text in capsys.readouterr().out.splitlines() if "random-100" in text]
    assert line.split()[2] == "100"


@pytest.mark.slow
def test_the_planner_is_compared_with_the_other_solvers_at_their_own_peaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--folder", str(tmp_path), "--only", "random-100", "--parts", "2"]
    status = planner.main([*words, "--others", "greedy", "block"])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0, lines
    assert sum(line.startswith("random-100") for line in lines) >= 3 + 1
    assert "0 of" in lines[-1]
