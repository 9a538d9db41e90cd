"""A cost table: what each operator call costs, as a file that people can read, edit and carry.

A key is the text of one call: operator, sizes, strides, types, constants, device. Equal calls share
one entry. The table knows where its numbers come from and which of them are guesses.
"""

import glob
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from operator import index
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fxremat.errors import FxrematError, OptionError

SCHEMA_VERSION = 1
LARGEST = 2**53  # of bytes and nanoseconds: solvers reckon in floating point
STALE_S = 3600.0  # a draft this old was left by a process that was killed [s]


class CostTableError(FxrematError, ValueError):
    """A file that is not a cost table, or not one that this version reads.

    Attributes:
        path: The file.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call costs.

    Attributes:
        cost_ns: Time to run it once, the least of all repeats. [ns]
        workspace_bytes: Held inside it, above its inputs and outputs, at the worst moment. [bytes]
        held_bytes: What remains when it returns, outputs that alias larger memory included; 0 where
            that was not measured. [bytes]
        spread: (slowest - fastest) / median of the repeats; 0 when it was not repeated.
        strides: How its results really lay, one entry for each tensor; empty where nobody looked.
            [elements]
    """

    cost_ns: int
    workspace_bytes: int = 0
    held_bytes: int = 0
    spread: float = 0.0
    strides: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if min(self.cost_ns, self.workspace_bytes, self.held_bytes) < 0 or not self.spread >= 0:
            raise ValueError(f"{self!r}: nothing in it may be negative")
        if any(step < 0 for stride in self.strides for step in stride):
            raise ValueError(f"{self!r}: no stride may be negative")


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs by key.

    Attributes:
        costs: Key -> cost, in the order of the calls that were measured.
        kind: "measured", "roofline", "uniform", or a name of your own.
        device: What they were measured on, for people; empty when on nothing.
        torch_version: The torch that ran the calls; empty when none did.
        threads: Threads that torch used on the CPU; 0 when it does not matter.
        guessed: Key -> why its cost is a roofline estimate in a measured table, with no workspace.
    """

    costs: Mapping[str, Cost]
    kind: str
    device: str = ""
    torch_version: str = ""
    threads: int = 0
    guessed: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        strangers = [key for key in self.guessed if key not in self.costs]
        if strangers:
            raise ValueError(f"guessed, but without a cost: {strangers[0]!r}")
        object.__setattr__(self, "costs", MappingProxyType(dict(self.costs)))
        object.__setattr__(self, "guessed", MappingProxyType(dict(self.guessed)))

    def __getitem__(self, key: str) -> Cost:
        """The cost of a call.

        Raises:
            OptionError: The table does not have it; there is no default.
        """
        if key not in self.costs:
            raise OptionError(
                f"the cost table {self.kind!r} with {len(self.costs)} entries has no cost for"
                f" {key!r}. Add an entry with that key, or measure the call.",
                option="costs",
                value=key,
                known=tuple(self.costs),
            )
        return self.costs[key]

    def __contains__(self, key: object) -> bool:
        return key in self.costs

    def __iter__(self) -> Iterator[str]:
        return iter(self.costs)

    def __len__(self) -> int:
        return len(self.costs)

    def __reduce__(self) -> tuple[object, ...]:
        # Read-only views of a dict cannot be copied or pickled; the dicts in them can.
        parts = (self.kind, self.device, self.torch_version, self.threads)
        return CostTable, (dict(self.costs), *parts, dict(self.guessed))

    def merged(self, other: "CostTable") -> "CostTable":
        """This table with the entries of another; where both have a key, the other one wins.

        Args:
            other: The newer table. Its texts replace those of this one where they are not empty;
                two kinds are joined with "+".

        Returns:
            A new table.
        """
        guessed = {key: why for key, why in self.guessed.items() if key not in other.costs}
        return CostTable(
            costs={**self.costs, **other.costs},
            kind=self.kind if self.kind == other.kind else f"{self.kind}+{other.kind}",
            device=other.device or self.device,
            torch_version=other.torch_version or self.torch_version,
            threads=other.threads or self.threads,
            guessed={**guessed, **other.guessed},
        )

    def save(self, path: Path | str) -> None:
        """Write the table as JSON, one line for each call. The file appears whole or not at all."""
        head = {
            "schema": SCHEMA_VERSION,
            "kind": self.kind,
            "device": self.device,
            "torch_version": self.torch_version,
            "threads": self.threads,
        }
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        lines.append(f'  "guessed": {_object(self.guessed)}')
        rows = {
            key: {
                "cost_ns": cost.cost_ns,
                "workspace_bytes": cost.workspace_bytes,
                "held_bytes": cost.held_bytes,
                "spread": round(cost.spread, 4),
                **({"strides": cost.strides} if cost.strides else {}),
            }
            for key, cost in self.costs.items()
        }
        lines.append(f'  "costs": {_object(rows)}')
        _write_whole(Path(path), "{\n" + ",\n".join(lines) + "\n}\n")


def load(path: Path | str) -> CostTable:
    """Read a table that ``CostTable.save`` or a person wrote.

    Args:
        path: The file. Of an entry only ``cost_ns`` is required.

    Returns:
        The table.

    Raises:
        CostTableError: The file is not a cost table; the message says where.
        OSError: It cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CostTableError(f"{path} is not JSON: {error}.", str(path)) from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA_VERSION:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise CostTableError(
            f"{path} is not a cost table of schema {SCHEMA_VERSION}: it has {found!r}.", str(path)
        )
    try:
        return CostTable(
            costs={key: _cost(row) for key, row in content["costs"].items()},
            kind=str(content["kind"]),
            device=str(content.get("device", "")),
            torch_version=str(content.get("torch_version", "")),
            threads=int(content.get("threads", 0)),
            guessed={key: str(why) for key, why in content.get("guessed", {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CostTableError(f"{path}: {type(error).__name__}: {error}.", str(path)) from error


def _cost(row: dict[str, Any]) -> Cost:
    unknown = sorted(set(row) - {field.name for field in fields(Cost)})
    if unknown:
        raise ValueError(f"a cost has no {unknown[0]!r}")
    for name in ("cost_ns", "workspace_bytes", "held_bytes"):
        if type(row.get(name, 0)) is not int:
            raise ValueError(f"{name} is {row[name]!r}, not a whole number")
        if row.get(name, 0) > LARGEST:
            raise ValueError(f"{name} is greater than {LARGEST:,}")
    return Cost(
        cost_ns=int(row["cost_ns"]),
        workspace_bytes=int(row.get("workspace_bytes", 0)),
        held_bytes=int(row.get("held_bytes", 0)),
        spread=float(row.get("spread", 0)),
        strides=tuple(tuple(map(index, one)) for one in row.get("strides", ())),
    )


def _object(rows: Mapping[str, object]) -> str:
    """JSON of a mapping with one line for each key."""
    if not rows:
        return "{}"
    lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in rows.items()]
    return "{\n" + ",\n".join(lines) + "\n  }"


def _write_whole(path: Path, text: str) -> None:
    """Write beside the file, then put it in place: readers never see half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(draft).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(draft).unlink()
        raise


def _sweep(path: Path) -> None:
    """Remove the drafts of processes that were killed while they wrote the file."""
    with suppress(OSError):  # another process may sweep too
        for draft in path.parent.glob(f".{glob.escape(path.name)}.*"):
            if time.time() - draft.stat().st_mtime > STALE_S:
                draft.unlink()
