"""The command line on saved problems and on small models."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path

import pytest

from fxremat.cli import PLAN_HEADERS, main
from fxremat.io import load, save_problem
from tests.problems import random_problem, transformer

MODEL = """
import torch

def make():
    torch.manual_seed(1)
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(31, 31), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    return lambda x: model(x).sum(), (torch.randn(64, 31),)

def make_with_notes():
    fn, args = make()
    return fn, args, {}, {"expect": []}

def make_wrong():
    return 3

VALUE = 3
"""


@pytest.fixture(autouse=True)
def _own_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a command imports is forgotten afterwards: every test writes its own small_model."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield
    sys.modules.pop("small_model", None)


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "problem.json"
    save_problem(transformer(1), path)
    return path


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "small_model.py"
    path.write_text(MODEL, encoding="utf-8")
    return path


def test_plan_prints_what_the_plan_says(problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(problem), "--budget", "90%", "--json", "--time-limit", "10"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["peak_bytes"] <= numbers["budget_bytes"]
    assert 0 <= numbers["lower_bound_ns"] <= numbers["recompute_ns"]
    assert set(numbers["saved"]) <= {storage.name for storage in load(problem).storages}
    assert main(["plan", str(problem), "--budget", "90%", "--time-limit", "10"]) == 0
    text = capsys.readouterr().out
    assert f"{numbers['peak_bytes']:,} bytes" in text
    assert f"{numbers['recompute_ns']:,} calls" in text
    assert "transformer.h.*" in text


def test_the_solver_can_be_named(problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(problem), "--budget", "100%", "--json"]
    assert main([*arguments, "--solver", "greedy"]) == 0
    assert json.loads(capsys.readouterr().out)["solver"] == "greedy"
    assert main([*arguments, "--solver", "gredy"]) == 2
    assert "greedy" in capsys.readouterr().err


def test_frontier_goes_from_baseline_to_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_problem(random_problem(3), tmp_path / "p.json")
    picture = tmp_path / "frontier.png"
    words = ["frontier", str(tmp_path / "p.json"), "--points", "3", "--plot", str(picture)]
    pytest.importorskip("matplotlib")
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == " ".join(PLAN_HEADERS).split()
    assert len(lines) == 2 + 3 + 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*words[:-1], str(tmp_path / "none" / "frontier.png")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_frontier_without_matplotlib_says_what_to_install(
    problem: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["frontier", str(problem), "--plot", "x.png"]) == 2
    assert "pip install 'fxremat[plot]'" in capsys.readouterr().err


def test_compare_has_a_row_for_every_solver(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import fxremat

    save_problem(random_problem(6), tmp_path / "p.json")
    baseline, floor = fxremat.frontier(random_problem(6), points=2)
    assert floor.peak_bytes < baseline.peak_bytes
    words = ["compare", str(tmp_path / "p.json"), "--budget", str(floor.peak_bytes)]
    assert main(words) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[2:]}
    assert list(rows) == list(fxremat.SOLVERS)
    assert "none within the budget" in rows["save_all"]
    assert f"{floor.peak_bytes:,} bytes" in rows["ilp"]


def test_explain_has_a_row_for_every_decision(
    problem: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(problem), "--budget", "90%", "--time-limit", "10"]) == 0
    text = capsys.readouterr().out
    assert "gelu_0" in text
    assert "transformer.h.0.mlp" in text
    assert " recompute " in text
    assert " save " in text


def test_timeline_shows_the_peak(problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(problem), "--budget", "100%"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(load(problem).operations) + 2  # all run once; boundary and end
    assert sum("#" * 40 in line for line in lines) >= 1
    assert {line.split()[0] for line in lines[2:]} == {"forward", "boundary", "backward", "end"}


@pytest.mark.parametrize("budget", ["0.5", "1 MiB", "much", "8G"])
def test_errors_are_one_message_and_exit_code_2(
    budget: str, problem: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(problem), "--budget", budget]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fxremat: ")
    assert "Traceback" not in captured.err


def test_a_file_that_is_no_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "none.json"), "--budget", "1GiB"]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["fly"], ["plan"], ["verify", "x.py:make"]])
def test_wrong_words_exit_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: fxremat" in capsys.readouterr().err


def test_capture_writes_what_plan_reads(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "captured.json"
    words = ["capture", f"{script}:make", "-o", str(saved), "--costs", "uniform"]
    assert main([*words, "--reserve", "1 MiB"]) == 0
    assert f"{len(load(saved).operations)} operations" in capsys.readouterr().out
    assert load(saved).costs == "uniform"
    assert load(saved).resident_bytes > 2**20
    assert main(["plan", str(saved), "--budget", "100%"]) == 0


def test_verify_prints_the_check(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{script}:make_with_notes", "--budget", "150%"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["ok", "yes"]
    equal = {name for name, text in lines if text == "bitwise equal"}
    assert equal == {"outputs", "gradients", "buffers", "inputs", "generators"}


def test_verify_ends_with_1_when_something_differs(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import fxremat

    right = fxremat.verify(*run_path(str(script))["make"](), budget="150%")
    wrong = dataclasses.replace(
        right,
        differing={**right.differing, "gradients": ("weight",)},
        beyond_bound=("weight",),
        max_abs_diff={"weight": 0.5},
    )
    monkeypatch.setattr(fxremat, "verify", lambda *_, **__: wrong)
    assert main(["verify", f"{script}:make", "--budget", "150%"]) == 1
    text = capsys.readouterr().out
    assert "1 differ: weight" in text
    assert "weight differs by up to 0.5" in text


def test_verify_imports_a_module_of_the_current_folder(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(script.parent)
    assert main(["verify", "small_model:make", "--budget", "150%"]) == 0
    assert "bitwise equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("small_model.py", "must be"),
        ("small_model.py:", "must be"),
        ("none.py:make", "there is no file"),
        ("no_such_module_anywhere:make", "cannot import"),
        ("small_model.py:mak", "it has make, make_with_notes, make_wrong"),
        ("small_model.py:VALUE", "has no function"),
        ("small_model.py:make_wrong", "must return"),
    ],
)
def test_targets_that_cannot_be_used(
    target: str,
    message: str,
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(script.parent)
    assert main(["verify", target, "--budget", "100%"]) == 2
    assert message in capsys.readouterr().err


def test_runs_as_a_module() -> None:
    words = [sys.executable, "-m", "fxremat", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    for command in ("capture", "plan", "frontier", "compare", "explain", "timeline", "verify"):
        assert command in done.stdout
