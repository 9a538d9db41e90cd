"""A cost table as a value and as a file."""

import copy
import json
from pathlib import Path

import pytest

from fxremat.costtable import Cost, CostTable, CostTableError, load
from fxremat.errors import OptionError


def test_an_absent_key_is_an_error_that_names_it() -> None:
    table = CostTable({"a": Cost(1)}, kind="mine")
    with pytest.raises(OptionError, match="no cost for 'b'") as caught:
        table["b"]
    assert caught.value.known == ("a",)
    assert ("a" in table, "b" in table) == (True, False)


def test_a_table_is_saved_as_lines_that_people_can_edit(tmp_path: Path) -> None:
    table = CostTable(
        {"aten.sin.default(float32[3]{1}:cpu)": Cost(17, 5, 7, 0.25), "b": Cost(0)},
        kind="mine", device="abacus", torch_version="2.11", threads=3, guessed={"b": "why not"},
    )  # fmt: skip
    table.save(tmp_path / "new" / "table.json")
    assert load(tmp_path / "new" / "table.json") == table
    lines = (tmp_path / "new" / "table.json").read_text().splitlines()
    assert sum("cost_ns" in line for line in lines) == 2
    assert copy.deepcopy(table) == table


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"cost_ns": 1.5}', "not a whole number"),
        ('{"cost_ns": -1}', "negative"),
        ('{"cost_ns": 1, "workspace_bytes": -1}', "negative"),
        ('{"cost_ns": 1, "costs": 1}', "no 'costs'"),
        ("{}", "cost_ns"),
        ("3", "table.json"),
    ],
)
def test_a_wrong_entry_is_refused(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(f'{{"schema": 1, "kind": "mine", "costs": {{"a": {row}}}}}')
    with pytest.raises(CostTableError, match=message) as caught:
        load(path)
    assert caught.value.path == str(path)


def test_merging_prefers_the_other_table() -> None:
    old = CostTable({"a": Cost(1), "b": Cost(2)}, kind="measured", guessed={"a": "?", "b": "?"})
    new = CostTable({"b": Cost(3), "c": Cost(4)}, kind="mine", threads=5)
    both = old.merged(new)
    assert both.costs == {"a": Cost(1), "b": Cost(3), "c": Cost(4)}
    assert (both.kind, both.threads, both.guessed) == ("measured+mine", 5, {"a": "?"})
    assert old.merged(old) == old


@pytest.mark.parametrize("strides", [[[-1, 1]], [["a"]], [[1.5]], [3]])
def test_strides_that_cannot_be_are_refused(tmp_path: Path, strides: object) -> None:
    path = tmp_path / "costs.json"
    CostTable(costs={"a": Cost(1, strides=((4, 1),))}, kind="mine").save(path)
    assert load(path)["a"].strides == ((4, 1),)
    path.write_text(path.read_text().replace("[[4, 1]]", json.dumps(strides)))
    with pytest.raises(CostTableError):
        load(path)
