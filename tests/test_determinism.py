"""The same problem and budget give the same plan in every process, whatever was asked before."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fxremat
from fxremat.planning import floor_plan
from fxremat.problem import RematProblem
from fxremat.solvers.auto import floor
from fxremat.solvers.floor import _FLOORS, core_of, least
from fxremat.solvers.search import Clock
from tests.problems import transformer

LIMIT_S = 60.0
PLANS = """
import hashlib, sys
import fxremat
problem = fxremat.load(sys.argv[1])
for budget in sys.argv[2:]:
    schedule = fxremat.plan(problem, int(budget)).schedule
    print(budget, hashlib.sha256(repr(schedule).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def layers() -> RematProblem:
    return transformer(5, tokens=256, width=64, context=64, vocabulary=512, resident_bytes=1 << 20)


def budgets_of(problem: RematProblem) -> list[int]:
    """From the floor to near the baseline. [bytes]"""
    low = floor_plan(problem).peak_bytes
    high = fxremat.plan(problem, 2**62).peak_bytes
    return [low + tenths * (high - low) // 10 for tenths in (0, 4)]


def test_plans_do_not_depend_on_the_seed_of_hashes(layers: RematProblem, tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    layers.save(path)
    budgets = [str(budget) for budget in budgets_of(layers)]
    said = [
        subprocess.run(
            [sys.executable, "-c", PLANS, str(path), *budgets],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "7")
    ]
    assert said[0] == said[1]
    assert len(set(said[0].splitlines())) == len(budgets)


def test_plans_do_not_depend_on_whether_the_floor_is_known(layers: RematProblem) -> None:
    budgets = budgets_of(layers)
    again = replace(layers, name="as in another process")
    before = [fxremat.plan(again, budget).schedule for budget in reversed(budgets)]
    _FLOORS.clear()
    fresh = replace(layers, name="as in a third one")
    floor(fresh)
    assert before[::-1] == [fxremat.plan(fresh, budget).schedule for budget in budgets]


def test_a_search_that_was_cut_short_leaves_no_trace(layers: RematProblem) -> None:
    other = replace(layers, name="whose first search has no time", resident_bytes=0)
    core, search = core_of(other)
    _FLOORS.clear()
    high = least(core, search, Clock(0.0)).peak_bytes
    low = least(core, search, Clock(LIMIT_S)).peak_bytes
    _FLOORS.clear()
    fresh = replace(other, name="which has time")
    assert low == least(*core_of(fresh), Clock(LIMIT_S)).peak_bytes
    assert low < high
