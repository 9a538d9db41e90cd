"""The examples run, on models small enough for a test."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = ("--width", "32", "--batch", "2", "--tokens", "32", "--vocabulary", "64")

pytest.importorskip("transformers")


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example as a user does, with this repository's fxremat."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
    )


@pytest.mark.slow
def test_the_demo_keeps_every_budget_bit_for_bit(tmp_path: Path) -> None:
    done = run(
        "gpt2.py",
        *SMALL,
        *("--layers", "1", "--repeats", "1", "--time-limit", "2", "--cache-dir", str(tmp_path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ours = [line for line in done.stdout.splitlines() if line.startswith("fxremat, ")]
    assert len(ours) >= 3
    assert all(line.rstrip().endswith("equal") for line in ours)
    assert ours[-1].startswith("fxremat, floor")
    assert "fxremat.optimize(model" in done.stdout


@pytest.mark.slow
def test_the_benchmark_writes_its_tables(tmp_path: Path) -> None:
    results = tmp_path / "results.md"
    results.write_text("# Results\n", encoding="utf-8")
    done = run(
        "benchmarks/peers.py",
        *SMALL,
        *("--layers", "2", "--models", "gpt2", "--knobs", "0.5", "--repeats", "1"),
        *("--time-limit", "2", "--markdown", str(results)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = results.read_text(encoding="utf-8")
    assert text.startswith("# Results\n")
    assert "### GPT-2" in text
    rows = [line for line in text.splitlines() if line.startswith("| fxremat")]
    assert [row.split("|")[2].strip() for row in rows] == ["0.5", "0.3", ""]
    assert all("differ " not in row for row in rows)
    assert "OVER BUDGET" not in text


@pytest.mark.slow
def test_the_densenet_holds_what_was_predicted(tmp_path: Path) -> None:
    small = ("--layers", "2", "3", "--growth", "8", "--batch", "8")
    done = run("densenet.py", *small, "--cache-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(steps) == 2
    for line in steps:
        predicted, measured = re.findall(r"\d[\d,]{3,}", line)
        assert predicted == measured
