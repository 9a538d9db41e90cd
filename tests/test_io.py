"""Problems survive a file unchanged, and every broken file is named with its broken field."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fxremat.errors import FxrematError
from fxremat.io import ProblemFileError, load, save_problem
from fxremat.problem import SCHEMA_VERSION, Kind, Operation, RematProblem, Storage
from tests.problems import random_problem, transformer

Data = dict[str, Any]


@pytest.mark.parametrize("seed", range(30))
def test_round_trip_is_exact(seed: int, tmp_path: Path) -> None:
    problem = random_problem(seed)
    path = tmp_path / "problem.json"
    save_problem(problem, path)
    again = load(path)
    assert again == problem
    save_problem(again, tmp_path / "again.json")
    assert path.read_bytes() == (tmp_path / "again.json").read_bytes()


def test_round_trip_of_every_field(tmp_path: Path) -> None:
    problem = RematProblem(
        storages=(Storage("x", 3, Kind.PRIMAL), Storage("ä\n", 5, Kind.VALUE, 0, lazy=True)),
        operations=(Operation("f", "op", (0,), (1,), 7, 11, True, "random", "a.py:1", "m.0"),),
        num_forward=1,
        replays=(),
        outputs=(1,),
        gradients=(),
        resident_bytes=13,
        outputs_held=False,
        in_flight=2,
        costs="measured",
        device="cuda:0",
        name='a "name"',
        versions=(("torch", "2.13"), ("fxremat", "0.1")),
    )
    save_problem(problem, tmp_path / "p.json")
    assert load(tmp_path / "p.json") == problem
    assert load(str(tmp_path / "p.json")).storages[0].kind is Kind.PRIMAL


def test_a_file_is_one_json_object_with_a_record_a_line(tmp_path: Path) -> None:
    problem = transformer(1)
    save_problem(problem, tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text(encoding="utf-8")
    assert json.loads(text)["version"] == SCHEMA_VERSION
    records = len(problem.storages) + len(problem.operations) + len(problem.replays)
    assert records < len(text.splitlines()) < records + 30


def change(path: list[str | int], value: object) -> Callable[[Data], None]:
    """Set what stands at ``path``."""

    def apply(data: Data) -> None:
        target: Any = data
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return apply


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (change(["version"], SCHEMA_VERSION + 1), "version"),
        (change(["version"], True), "version"),
        (change(["format"], "something"), "format"),
        (change(["storages"], 3), "storages"),
        (change(["storages", 2], []), "storages[2]"),
        (change(["storages", 0, "size_bytes"], "3"), "storages[0].size_bytes"),
        (change(["storages", 0, "size_bytes"], 3.0), "storages[0].size_bytes"),
        (change(["storages", 0, "size_bytes"], True), "storages[0].size_bytes"),
        (change(["storages", 0, "size_bytes"], -3), "storages[0].size_bytes"),
        (change(["storages", 0, "kind"], "other"), "storages[0].kind"),
        (change(["storages", 0, "kind"], []), "storages[0].kind"),
        (change(["operations", 1, "name"], "f0"), "operations[1].name"),
        (change(["storages", 1, "producer"], 10**6), "storages[1].producer"),
        (change(["storages", 1, "producer"], -1), "storages[1].producer"),
        (change(["storages", 0, "producer"], 0), "storages[0].producer"),
        (change(["storages", 0, "colour"], "red"), "storages[0].colour"),
        (change(["operations", 0, "reads"], [-1]), "operations[0].reads"),
        (change(["operations", 0, "reads"], [10**6]), "operations[0].reads"),
        (change(["operations", 0, "reads"], [1]), "operations"),
        (change(["operations", 0, "reads"], [None]), "operations[0].reads[0]"),
        (change(["operations", 0, "cost_ns"], -1), "operations[0].cost_ns"),
        (change(["replays", 0, "operation"], -1), "replays[0].operation"),
        (change(["replays", 0, "operation"], 10**6), "replays[0].operation"),
        (change(["replays", 0, "creates"], [0]), "operations"),
        (change(["outputs"], [-1]), "outputs"),
        (change(["gradients"], [10**6]), "gradients"),
        (change(["updates"], [10**6]), "updates"),
        (change(["storages", 0, "size_bytes"], 10**400), "storages[0].size_bytes"),
        (change(["operations", 0, "cost_ns"], 2**60), "operations[0].cost_ns"),
        (change(["operations", 0, "cost_ns"], float("nan")), "operations[0].cost_ns"),
        (change(["operations", 7, "creates"], []), "operations[7].creates"),
        (change(["storages", 0, "kind"], "tangent"), "operations[0].reads"),
        (change(["num_forward"], 10**6), "operations"),
        (change(["in_flight"], 0), "operations"),
        (change(["versions"], [["torch"]]), "versions[0]"),
        (lambda data: data.pop("num_forward"), "num_forward"),
        (lambda data: data["storages"][0].pop("size_bytes"), "storages[0].size_bytes"),
    ],
)
def test_a_spoiled_file_is_named_with_its_field(
    spoil: Callable[[Data], None], field: str, tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    save_problem(random_problem(1), path)
    data = json.loads(path.read_text(encoding="utf-8"))
    spoil(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ProblemFileError) as caught:
        load(path)
    assert isinstance(caught.value, FxrematError)
    assert caught.value.field == field
    assert caught.value.path == str(path)
    assert field in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_problem(random_problem(2), path)
    text = path.read_text(encoding="utf-8").rstrip()
    for length in range(0, len(text), 97):
        path.write_text(text[:length], encoding="utf-8")
        with pytest.raises(ProblemFileError, match="cut off"):
            load(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[]", b"3", b"null", b"[" * 200_000, b'"x"'])
def test_what_is_no_problem_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(ProblemFileError):
        load(tmp_path / "p.json")


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(ProblemFileError, match="No such file"):
        load(tmp_path / "none.json")
    with pytest.raises(ProblemFileError, match="cannot write"):
        save_problem(random_problem(1), tmp_path / "none" / "p.json")


def test_places_that_are_no_files_are_refused(tmp_path: Path) -> None:
    problem = random_problem(1)
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("file/p.json", "loop/p.json", "a\0b", "x" * 300, ""):
        with pytest.raises(ProblemFileError, match="cannot write"):
            save_problem(problem, tmp_path / name)
        with pytest.raises(ProblemFileError):
            load(tmp_path / name)
    for name in ("pipe", "loop"):  # to read a pipe would be to wait for ever
        with pytest.raises(ProblemFileError, match="cannot read"):
            load(tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "loop", "pipe"]


def test_a_failed_write_leaves_the_old_file_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "p.json"
    path.write_text("old", encoding="utf-8")
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ProblemFileError, match="No space left"):
        save_problem(random_problem(1), path)
    assert path.read_text(encoding="utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]
