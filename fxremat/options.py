"""The options of ``optimize``, checked once at the edge."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from fxremat.budget import Budget, parse_budget, parse_bytes
from fxremat.costtable import CostTable
from fxremat.errors import OptionError
from fxremat.solvers import SOLVERS

Key = str | int

CHOICES: dict[str, tuple[Any, ...]] = {
    "executor": ("eager", "inductor"),
    "outputs": ("held", "released"),
    "gradients": ("auto", "held", "freed"),
    "dynamic": (None, True, False),
    "progress": (None, True, False),
    "verify": (True, False),
    "fullgraph": (True, False),
}


@dataclass(frozen=True)
class Options:
    """What ``optimize`` was asked for; see its docstring for the meaning of each field."""

    budget: Budget
    executor: str = "eager"
    solver: str = "auto"
    costs: str | CostTable = "measured"
    reserve: Any = 0
    outputs: str = "held"
    gradients: str = "auto"
    in_flight: int = 1
    differentiate: Key | tuple[Key, ...] = "all"
    verify: bool = False
    time_limit_s: float = 60.0
    fullgraph: bool = True
    dynamic: bool | None = None
    replayable: tuple[str, ...] = ()
    cache_dir: Path | str | bool | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        """Refuse what does not exist, with the names that do."""
        for name, known in {**CHOICES, "solver": ("auto", *SOLVERS)}.items():
            _check(name, getattr(self, name), known)
        if not isinstance(self.costs, CostTable):
            _check("costs", self.costs, ("measured", "roofline", "uniform"))
        if (
            isinstance(self.in_flight, bool)
            or not isinstance(self.in_flight, int)
            or self.in_flight < 1
        ):
            raise OptionError(
                f"in_flight={self.in_flight!r}: the number of forwards alive at once is an "
                "int from 1 up.",
                "in_flight",
                self.in_flight,
            )
        _check_keys(self.differentiate)
        _check_replayable(self.replayable)
        if self.dynamic and self.executor != "eager":
            raise OptionError(
                f"dynamic=True needs executor='eager': under {self.executor!r} each shape gets a "
                "graph of its own. Leave dynamic out.",
                "dynamic",
                self.dynamic,
            )
        if not hasattr(self.reserve, "param_groups"):  # an optimizer is asked for its state later
            parse_bytes(self.reserve, "reserve")
        if self.cache_dir is not None and not isinstance(self.cache_dir, str | PathLike | bool):
            raise OptionError(
                f"cache_dir={self.cache_dir!r}: name a folder, or say False for none.",
                "cache_dir",
                self.cache_dir,
            )
        if not isinstance(self.time_limit_s, int | float) or not self.time_limit_s > 0:
            raise OptionError(
                f"time_limit_s={self.time_limit_s!r}: give seconds above 0.",
                "time_limit_s",
                self.time_limit_s,
            )

    @property
    def keys(self) -> tuple[Key, ...] | None:
        """The entries of the output to differentiate; None for all of them."""
        if self.differentiate == "all":
            return None
        return (
            self.differentiate if isinstance(self.differentiate, tuple) else (self.differentiate,)
        )


def read_budget(budget: object) -> Budget:
    """Read a budget, once, at the edge."""
    return parse_budget(budget)


def _check(name: str, value: object, known: tuple[Any, ...]) -> None:
    if not any(value is k or (type(value) is type(k) and value == k) for k in known):
        names = ", ".join(repr(k) for k in known)
        raise OptionError(
            f"{name}={value!r} does not exist; those that do: {names}.", name, value, known
        )


def _check_keys(differentiate: object) -> None:
    keys = differentiate if isinstance(differentiate, tuple) else (differentiate,)
    if not keys or any(isinstance(key, bool) or not isinstance(key, str | int) for key in keys):
        raise OptionError(
            f"differentiate={differentiate!r}: name an entry of the output by its key, "
            "attribute or "
            "position, or several in a tuple; 'all' stands for every one.",
            "differentiate",
            differentiate,
        )


def _check_replayable(names: object) -> None:
    if not isinstance(names, tuple) or not all(isinstance(n, str) and "::" in n for n in names):
        raise OptionError(
            f"replayable={names!r}: name custom operators in a tuple, ('mylib::swish',).",
            "replayable",
            names,
        )


def check_arguments(args: object, kwargs: object) -> None:
    """Positional arguments come as a tuple or list, keyword arguments as a mapping.

    Raises:
        OptionError: They do not.
    """
    if not isinstance(args, tuple | list):
        raise OptionError(
            f"args is a {type(args).__name__}: give the positional arguments in a tuple, (x,) for "
            "one of them.",
            "args",
            args,
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise OptionError(
            f"kwargs is a {type(kwargs).__name__}: give keyword arguments in a dict.",
            "kwargs",
            kwargs,
        )


def make_options(budget: object, given: dict[str, Any]) -> Options:
    """Options from a budget and keyword arguments.

    Raises:
        BudgetError: The budget cannot be read.
        OptionError: An option or its value does not exist.
    """
    check_names(given)
    return Options(budget=parse_budget(budget), **given)


def check_names(given: Mapping[str, Any]) -> None:
    """Options, apart from the budget, by their names.

    Raises:
        OptionError: There is no such option.
    """
    known = tuple(field.name for field in fields(Options) if field.name != "budget")
    for name in given:
        if name not in known:
            raise OptionError(
                f"there is no option {name!r}; those that exist: {', '.join(known)}.",
                name,
                given[name],
                known,
            )
