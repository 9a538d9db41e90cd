"""Files that others break: a cache costs time at worst, and a broken problem is named."""

import errno
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fxremat.costtable import CostTable, CostTableError, load
from fxremat.passes import costcache
from fxremat.passes.costs import OpCall, cost_key, measure_costs

aten = torch.ops.aten
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costcache, "_told", set())


def calls() -> list[OpCall]:
    x = torch.randn(3)
    return [OpCall(operator, (x,)) for operator in (aten.sin.default, aten.cos.default)]


def measure(cache_dir: Path) -> CostTable:
    """Measure twice, as two graphs of one process would."""
    measure_costs(calls(), cache_dir=cache_dir)
    table = measure_costs(calls(), cache_dir=cache_dir)
    assert list(table) == [cost_key(call) for call in calls()]
    assert not table.guessed
    assert all(cost.cost_ns > 0 for cost in table.costs.values())
    return table


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def spoilt_by(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    def spoil(content: dict[str, Any]) -> None:
        content[name] = value

    return spoil


def every_cost(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    def spoil(content: dict[str, Any]) -> None:
        for row in content["costs"].values():
            row[name] = value

    return spoil


SPOILS = {
    "schema of tomorrow": spoilt_by("schema", 2),
    "no schema": lambda content: content.pop("schema"),
    "negative cost": every_cost("cost_ns", -5),
    "no cost": every_cost("cost_ns", None),
    "not a number": every_cost("cost_ns", float("nan")),
    "endless": every_cost("cost_ns", float("inf")),
    "truth for a number": every_cost("workspace_bytes", True),
    "negative workspace": every_cost("workspace_bytes", -1),
    "absurd workspace": every_cost("workspace_bytes", 10**40),
    "spread of no number": every_cost("spread", float("nan")),
    "spread in words": every_cost("spread", "wide"),
    "endless threads": spoilt_by("threads", float("inf")),
    "costs in a list": spoilt_by("costs", [1]),
    "guesses in a list": spoilt_by("guessed", [1]),
    "guesses kept": lambda content: content.update(guessed=dict.fromkeys(content["costs"], "?")),
    "another method": spoilt_by("kind", "roofline"),
    "another torch": spoilt_by("torch_version", "1.0"),
    "another device": spoilt_by("device", "abacus"),
    "other threads": spoilt_by("threads", 977),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_a_spoilt_cache_is_told_once_and_not_used(
    spoil: Callable[[dict[str, Any]], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measure(tmp_path)
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    every_cost("cost_ns", 987_654_321_987)(content)  # would be seen if it were used
    spoil(content)
    path.write_text(json.dumps(content))
    table = measure(tmp_path)
    assert all(cost.cost_ns < 987_654_321 for cost in table.costs.values())
    (message,) = told(caplog)
    assert str(path) in message
    assert "measured anew" in message
    assert dict(load(path).costs) == dict(table.costs)  # and it is mended


CONTENTS = {
    "empty": b"",
    "cut off": b'{\n  "schema": 1,\n  "kind": "measured",\n  "costs": {\n    "aten.sin',
    "foreign": b'{"name": "package", "version": "1.0"}',
    "a list": b"[]",
    "a number": b"3",
    "rubbish": bytes(range(256)) * 9,
    "zeros": bytes(4096),
    "deep": b"[" * 200_000,
    "a long number": b'{"schema": ' + b"9" * 9000 + b"}",
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_a_file_that_is_no_cache_is_told_once_and_mended(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = costcache.cache_path(tmp_path, "cpu")
    path.write_bytes(content)
    table = measure(tmp_path)
    (message,) = told(caplog)
    assert str(path) in message
    assert dict(load(path).costs) == dict(table.costs)
    assert list(tmp_path.iterdir()) == [path]


def _no_file_but_a_folder(folder: Path) -> Path:
    (costcache.cache_path(folder, "cpu") / "within").mkdir(parents=True)
    return folder


def _pipe(folder: Path) -> Path:
    os.mkfifo(costcache.cache_path(folder, "cpu"))
    return folder


def _link_to_itself(folder: Path) -> Path:
    path = costcache.cache_path(folder, "cpu")
    path.symlink_to(path)
    return folder


def _folder_linked_to_itself(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


def _below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file" / "cache"


def _read_only(folder: Path) -> Path:
    folder.chmod(0o555)  # says nothing to root, for whom the test then shows that all is well
    return folder


PLACES: dict[str, Callable[[Path], Path]] = {
    "a folder in its place": _no_file_but_a_folder,
    "a pipe in its place": _pipe,
    "a link to itself": _link_to_itself,
    "a folder linked to itself": _folder_linked_to_itself,
    "below a file": _below_a_file,
    "in a file system that takes nothing": lambda _: Path("/proc/fxremat"),
    "read-only": _read_only,
    "a name too long": lambda folder: folder / ("x" * 300),
    "a name with a NUL": lambda folder: folder / "a\0b",
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_place_that_cannot_be_used_is_told_at_most_once(
    place: Callable[[Path], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = place(tmp_path)
    measure(folder)
    messages = told(caplog)
    assert len(messages) <= 1
    assert all(str(folder) in message for message in messages)
    assert messages or any(folder.glob("costs*"))  # told, or it was written after all


def test_a_folder_that_does_not_exist_is_made_and_nothing_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measure(tmp_path / "a" / "b")
    assert told(caplog) == []
    assert len(list((tmp_path / "a" / "b").iterdir())) == 1


@pytest.mark.parametrize("stage", ["mkstemp", "write", "replace"])
def test_a_full_disk_is_told_once_and_leaves_the_old_file(
    stage: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    measure_costs(calls()[:1], cache_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    if stage == "write":
        monkeypatch.setattr(os, "fdopen", fail)
    else:
        owner: Any = tempfile if stage == "mkstemp" else Path
        monkeypatch.setattr(owner, stage, fail)
    measure(tmp_path)
    monkeypatch.undo()
    (message,) = told(caplog)
    assert "No space left" in message
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# A user id that the machine does not know, as in many containers.
NOBODY = """
import pwd
def nobody(uid): raise KeyError(uid)
pwd.getpwuid = nobody
"""

STEP = """
import torch, fxremat
x = torch.randn(3, requires_grad=True)
fxremat.optimize(lambda x: x.sin().exp().sum(), "1MiB", costs="uniform")(x).backward()
"""


@pytest.mark.parametrize("home", [None, "/proc/nowhere"])
def test_a_home_that_is_unset_or_takes_nothing_does_no_harm(home: str | None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "HOME"}
    env |= {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir()}
    env |= {} if home is None else {"HOME": home}
    ran = subprocess.run(
        [sys.executable, "-c", (NOBODY if home is None else "") + STEP],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    if "in default_cache_dir" in ran.stderr and torch.__version__.startswith("2.11"):
        pytest.skip("this torch itself cannot be imported by a user whom nobody knows")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("measured anew") == (home is not None), ran.stderr


def test_a_table_of_the_users_that_is_broken_raises_in_words(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    for content in CONTENTS.values():
        path.write_bytes(content)
        with pytest.raises(CostTableError) as caught:
            load(path)
        assert str(path) in str(caught.value)
