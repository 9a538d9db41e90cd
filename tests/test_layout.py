"""The repository is laid out as it says, and speaks of nothing outside it."""

import re
import tomllib
from pathlib import Path

import pytest

import fxremat

ROOT = Path(__file__).parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "setuptools"
]
FOLDERS = ("fxremat", "passes", "solvers", "tests", "examples", ".ci")
FUNCTIONS = (
    *("optimize", "restore", "report", "verify", "measure_peak"),
    *("capture", "plan", "frontier", "load"),
)
ERRORS = (
    *("FxrematError", "BudgetError", "OptionError", "InfeasibleBudgetError", "CaptureError"),
    *("UnsupportedGraphError", "SolverError", "VerificationError", "ProblemFileError"),
)
TYPES = ("CostTable", "Plan", "RematProblem")

# Paths of one machine, and words for how the work was done; brackets keep it from finding itself.
OUTSIDE = re.compile(
    r"(?<![\w.])/(?:w[o]rk|f[a]rm|r[o]ot|h[o]me|U[s]ers)/|/t[m]p/|\bs[u]bagent|\bt[h]is session\b"
    r"|\bh[e]lper agent|\bC[E]O\b|\bt[h]is workplace\b",
    re.I,
)


def files(*suffixes: str) -> list[Path]:
    """The project's own text files, each once."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(
        path
        for path in found
        if "__pycache__" not in path.parts
        and path.resolve() == path.absolute()
        and (not suffixes or path.suffix in suffixes)
    )


@pytest.mark.parametrize("name", ["passes", "solvers"])
def test_the_two_rooms_install_as_parts_of_fxremat(name: str) -> None:
    link = ROOT / "fxremat" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert link.resolve() == ROOT / name


def test_every_package_folder_is_installed() -> None:
    on_disk = {
        path.parent.relative_to(ROOT)
        for room in ("fxremat", "passes", "solvers")
        for path in (ROOT / room).rglob("__init__.py")
        if path.resolve() == path.absolute()
    }
    assert {Path(folder) for folder in SETUPTOOLS["package-dir"].values()} == on_disk
    assert set(SETUPTOOLS["packages"]) == set(SETUPTOOLS["package-dir"])
    for package, folder in SETUPTOOLS["package-dir"].items():
        assert package.removeprefix("fxremat.").replace(".", "/") == folder
    assert (ROOT / "fxremat" / "py.typed").is_file()


def test_no_module_bears_the_name_of_a_public_function() -> None:
    taken = {path.stem for path in (ROOT / "fxremat").glob("*.py")}
    assert taken.isdisjoint(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_exist(name: str) -> None:
    assert callable(getattr(fxremat, name))
    assert name in fxremat.__all__


@pytest.mark.parametrize("name", ERRORS + TYPES)
def test_public_classes_exist(name: str) -> None:
    assert isinstance(getattr(fxremat, name), type)
    assert name in fxremat.__all__


def test_all_names_what_there_is() -> None:
    assert len(set(fxremat.__all__)) == len(fxremat.__all__)
    assert all(hasattr(fxremat, name) for name in fxremat.__all__)
    assert all(issubclass(getattr(fxremat, name), fxremat.FxrematError) for name in ERRORS)


def test_the_solvers_have_names() -> None:
    assert "greedy" in fxremat.SOLVERS
    assert all(callable(solver) for solver in fxremat.SOLVERS.values())


def test_nothing_speaks_of_what_is_outside() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in files(".py", ".md", ".toml", ".txt", ".json", "")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if OUTSIDE.search(line)
    ]
    assert found == []


def test_what_is_run_can_be_run() -> None:
    run = ROOT / ".ci" / "run"
    assert run.stat().st_mode & 0o111
    assert run.read_text(encoding="utf-8").startswith("#!")
