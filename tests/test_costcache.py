"""Costs kept on disk between processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fxremat
from fxremat.costtable import load
from fxremat.passes.costs import OpCall, cost_key, measure_costs

aten = torch.ops.aten


def _r(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes)


def test_only_missing_calls_are_measured(tmp_path: Path) -> None:
    sine, cosine = (OpCall(op, (_r(3),)) for op in (aten.sin.default, aten.cos.default))
    measure_costs([sine], cache_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    content["costs"][cost_key(sine)]["cost_ns"] = 123_456_789  # an edit survives
    path.write_text(json.dumps(content))
    table = measure_costs([cosine, sine], cache_dir=tmp_path)
    assert table[cost_key(sine)].cost_ns == 123_456_789
    assert 0 < table[cost_key(cosine)].cost_ns < 123_456_789
    assert list(table) == [cost_key(cosine), cost_key(sine)]
    assert set(load(path)) == set(table)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99}', '{"schema": 1, "costs": 3}'])
def test_a_broken_cache_is_measured_again(tmp_path: Path, text: str) -> None:
    call = OpCall(aten.sin.default, (_r(3),))
    measure_costs([call], cache_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert not measure_costs([call], cache_dir=tmp_path).guessed
    assert cost_key(call) in load(path)


def test_guesses_are_not_kept(tmp_path: Path) -> None:
    bad = OpCall(aten.mm.default, (_r(3, 5), _r(3, 5)))
    good = OpCall(aten.sin.default, (_r(3),))
    measure_costs([bad], cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    measure_costs([bad, good], cache_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    assert set(load(path)) == {cost_key(good)}


def test_another_number_of_threads_is_another_file(tmp_path: Path) -> None:
    call = OpCall(aten.sin.default, (_r(3),))
    measure_costs([call], cache_dir=tmp_path)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        table = measure_costs([call], cache_dir=tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert table.threads == threads + 1
    assert len(list(tmp_path.iterdir())) == 2


def test_a_tilde_in_the_cache_folder_is_the_home_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    fxremat.capture(torch.nn.Linear(3, 2), (_r(1, 3),), cache_dir="~/costs")
    assert len(list((tmp_path / "costs").iterdir())) == 1
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("where", ["file", "file/below", "~nobody.is.called.so/x", "/proc/0/x"])
def test_a_cache_folder_that_cannot_be_used_is_told_at_most_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("not a folder")
    for _ in range(2):
        fxremat.capture(torch.nn.Linear(3, 2), (_r(1, 3),), costs="uniform", cache_dir=where)
    told = [r for r in caplog.records if r.name == "fxremat" and r.levelname != "INFO"]
    assert len(told) <= 1


@pytest.mark.parametrize("where", [3, 1.5, b"costs"])
def test_a_cache_folder_of_another_type_is_refused(where: Any) -> None:
    with pytest.raises(fxremat.OptionError, match="cache_dir"):
        fxremat.capture(torch.nn.Linear(3, 2), (_r(1, 3),), cache_dir=where)
