"""Processes that are killed while they write a file of costs, or that write it at once."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fxremat.costtable import STALE_S, Cost, CostTable, load

ROOT = Path(__file__).parents[1]


def a_table(number: int, size: int = 2000) -> CostTable:
    return CostTable({f"{number}.{i}": Cost(i + 1) for i in range(size)}, kind="measured")


WRITER = """
import sys
from fxremat.costtable import Cost, CostTable
print("ready", flush=True)
number = 0
while True:
    number += 1
    costs = {str(i) * (4 << 20): Cost(number) for i in range(4)}  # long enough to be hit
    CostTable(costs, kind="measured").save(sys.argv[1])
"""


def start(script: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_a_process_killed_while_it_writes_leaves_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    chance = random.Random(3)
    for _ in range(8):
        with start(WRITER, str(path)) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            while not path.exists():
                time.sleep(0.001)
            time.sleep(chance.random() * 0.2)
            writer.kill()
        table = load(path)
        assert len(table) == 4
        assert len({cost.cost_ns for cost in table.costs.values()}) == 1  # of one write


DYING = """
import os, signal, sys
from pathlib import Path
from fxremat.costtable import Cost, CostTable

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

class Half:
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *_): die()
    def write(self, text):
        self.file.write(text[: len(text) // 2])
        self.file.flush()
        die()

fdopen = os.fdopen
if sys.argv[2] == "half":
    os.fdopen = lambda *a, **k: Half(fdopen(*a, **k))
else:
    Path.replace = die
CostTable({"new": Cost(2)}, kind="measured").save(sys.argv[1])
"""


@pytest.mark.parametrize("stage", ["half", "whole"])
def test_a_process_killed_before_the_file_is_in_place_leaves_the_old_one(
    stage: str, tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    CostTable({"old": Cost(1)}, kind="measured").save(path)
    with start(DYING, str(path), stage) as writer:
        assert writer.wait() == -signal.SIGKILL
    assert dict(load(path).costs) == {"old": Cost(1)}
    assert len(list(tmp_path.iterdir())) == 2  # with the draft of the dead
    a_table(1).save(path)
    assert len(load(path)) == 2000


def test_drafts_of_killed_processes_are_removed_when_they_are_old(tmp_path: Path) -> None:
    path = tmp_path / "costs[1].json"  # a name that is a pattern too
    old, young, other = (
        tmp_path / f".{name}" for name in (f"{path.name}.a", f"{path.name}.b", "c")
    )
    for draft in (old, young, other):
        draft.write_text("{")
    for draft in (old, other):
        os.utime(draft, (time.time() - 2 * STALE_S,) * 2)
    a_table(1).save(path)
    assert sorted(tmp_path.iterdir()) == sorted([young, other, path])


ADDER = """
import sys
from pathlib import Path
import torch
from fxremat.costtable import Cost, CostTable
from fxremat.passes.costcache import cache_path, device_name, write_cache
folder, name = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
while not (folder / "go").exists():
    pass
for i in range(40):
    table = CostTable(
        {f"{name}.{i}.{j}": Cost(i + 1) for j in range(50)}, kind="measured",
        device=device_name("cpu"), torch_version=torch.__version__, threads=torch.get_num_threads(),
    )
    write_cache(cache_path(folder / "cache", "cpu"), table)
"""


def test_two_processes_that_write_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    writers = [start(ADDER, str(tmp_path), name) for name in "ab"]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    cache = tmp_path / "cache"
    while any(writer.poll() is None for writer in writers):
        for path in cache.glob("costs*"):
            load(path)  # whole at every moment
    assert [writer.wait() for writer in writers] == [0, 0]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.close()
    (path,) = cache.iterdir()  # and no draft is left
    table = load(path)
    assert len(table) >= 50 * 40  # at least what the last writer knew
    assert all(cost.cost_ns == int(key.split(".")[1]) + 1 for key, cost in table.costs.items())
