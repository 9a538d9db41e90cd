"""What the holes of a statement may be filled with; ``templates`` lists them."""

import re
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

HOLE = re.compile(r"<(\w+)>")
NUMBERS = ("0.5", "1.5", "-0.3", "0.9", "2.0")
PROBABILITIES = ("0.1", "0.3", "0.5")


class NoValue(Exception):  # noqa: N818  # it says that nothing fits; nobody sees it
    """Nothing fits a hole, or a value is none that should be kept."""


class Source(Protocol):
    """What a grower offers."""

    def one_of(self, things: Sequence[str]) -> str:
        """One of some things."""

    def pick(self, limit: int, /) -> int:
        """A number below another."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every value so far."""

    def late_one(self, fits: Callable[[str, torch.Tensor], bool]) -> str:
        """A value that fits."""

    def member(self, kind: str, expression: str) -> str:
        """A member."""

    def new(self) -> str:
        """A fresh name."""


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


class Holes:
    """The holes of one statement; but for ``<new>``, a name stands for one thing throughout."""

    def __init__(self, source: Source, template: str) -> None:
        self.source = source
        self.main = next((n for n in ("f", "c", "q") if f"<{n}>" in template), "f")
        self.known: dict[str, str] = {}

    def __getitem__(self, hole: str) -> str:
        if hole == "new":
            return self.source.new()
        if hole not in self.known:
            self.known[hole] = self.find(hole)
        return self.known[hole]

    def find(self, hole: str) -> str:
        """What fills a hole for the first time."""
        for finder in (self.value, self.number, self.member):
            found = finder(hole)
            if found is not None:
                return found
        raise KeyError(hole)

    def tensor(self, hole: str) -> torch.Tensor:
        """The value of a hole."""
        return self.source.tensors()[self[hole]]

    def value(self, hole: str) -> str | None:
        """Names of values."""
        late_one = self.source.late_one
        if hole == "g":
            like = self.tensor("f")
            return late_one(lambda n, t: t.shape == like.shape and t.dtype == like.dtype)
        fitting: dict[str, Callable[[str, torch.Tensor], bool]] = {
            "f": lambda n, t: _is_float(t),
            "h": lambda n, t: _is_float(t),
            "t": lambda n, t: _is_float(t) and n[0] == "v",
            "q": lambda n, t: _is_float(t) and t.dim() == 4,
            "c": lambda n, t: _is_float(t) and t.dim() == 3,
            "i": lambda n, t: t.dtype in (torch.int64, torch.int32),
            "b": lambda n, t: t.dtype is torch.bool,
            "u": lambda n, t: n == "x1",
            "ids": lambda n, t: n == "x2",
        }
        return late_one(fitting[hole]) if hole in fitting else None

    def number(self, hole: str) -> str | None:
        """Numbers, and sizes of values."""
        source = self.source
        if hole in ("k", "p"):
            return source.one_of(NUMBERS if hole == "k" else PROBABILITIES)
        if hole == "m":
            return source.one_of(("2", "5", "7"))
        if hole in ("qC", "cC"):
            return str(self.tensor(hole[0]).shape[1])
        if hole not in ("d", "e", "n", "last"):
            return None
        shape = self.tensor(self.main).shape
        if not shape:
            raise NoValue
        if hole == "n":
            return str(shape[int(self["d"])])
        return str(shape[-1]) if hole == "last" else str(source.pick(len(shape)))

    def member(self, hole: str) -> str | None:
        """Parameters and buffers."""
        source, last = self.source, "" if hole in ("N", "E") else self["last"]
        if hole == "B":
            return source.member("buffer", f"torch.linspace(0.4, 1.3, {last})")
        if hole == "N":
            return source.member("buffer", "torch.zeros((), dtype=torch.int64)")
        shapes = {"w": f"{last}", "W": f"3, {last}", "V": f"{last}, {last}", "E": "7, 5"}
        frozen = ", requires_grad=False" if source.pick(6) == 0 else ""
        return source.member("weight", f"nn.Parameter(torch.randn({shapes[hole]}) * 0.4{frozen})")
