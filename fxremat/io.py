"""Problems as files: one JSON object with a schema version, one record a line, no pickle.

The fields are those of the dataclasses in ``fxremat.problem``; a file is checked field by field
against their types, so that a wrong one is named instead of planned.
"""

import errno
import json
import os
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from fxremat.errors import FxrematError
from fxremat.problem import SCHEMA_VERSION, Kind, RematProblem

_FORMAT = "fxremat.problem"
LARGEST = 2**53  # of any number in a file


class ProblemFileError(FxrematError, ValueError):
    """A file that holds no problem that can be read, or that cannot be written.

    Attributes:
        path: The file.
        field: What is wrong in it, such as ``storages[3].size_bytes``; empty when it is all of it.
    """

    def __init__(self, message: str, path: str = "", field: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.field = field


class _WrongFieldError(Exception):
    """A field that is not what it should be; ``load`` adds the path."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


def save_problem(problem: RematProblem, path: str | os.PathLike[str]) -> None:
    """Write a problem; a file that exists is replaced, whole or not at all.

    Args:
        problem: What to write.
        path: Where.

    Raises:
        ProblemFileError: It cannot be written.
    """
    target = Path(path)
    draft = Path(f"{target.parent}/.{os.getpid()}.{threading.get_native_id()}.fxremat")
    try:
        draft.write_text("".join(_lines(problem)), encoding="utf-8")
        draft.replace(target)
    except (OSError, ValueError) as error:  # ValueError: no path at all, such as one with a NUL
        with suppress(OSError, ValueError):
            draft.unlink()
        reason = getattr(error, "strerror", None) or str(error)
        raise ProblemFileError(f"cannot write '{target}': {reason}.", str(target)) from error


def load(path: str | os.PathLike[str]) -> RematProblem:
    """Read a problem that ``RematProblem.save`` wrote.

    Args:
        path: The file.

    Returns:
        The problem, equal to the one that was saved.

    Raises:
        ProblemFileError: There is no such file, it is cut off, of another version, or contradicts
            itself; the message names the field.
    """
    if not isinstance(path, str | os.PathLike):
        raise ProblemFileError(f"a problem is read from a path, not from {path!r}.", str(path))
    try:
        if Path(path).is_fifo():  # to read it would be to wait for ever
            raise OSError(errno.EINVAL, "it is a pipe")
        data: object = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ProblemFileError(f"cannot read '{path}': {error.strerror}.", str(path)) from error
    except (ValueError, RecursionError) as error:
        raise ProblemFileError(
            f"'{path}' is no JSON, or is cut off: {error}. Capture the problem again.", str(path)
        ) from error
    try:
        return _problem(data)
    except _WrongFieldError as error:
        raise ProblemFileError(f"'{path}': {error}.", str(path), error.field) from error


def _lines(problem: RematProblem) -> Iterator[str]:
    """The file, a line for each field and for each record of a list."""
    yield f'{{\n"format": {json.dumps(_FORMAT)},\n"version": {SCHEMA_VERSION}'
    for field in fields(problem):
        value = getattr(problem, field.name)
        if value and isinstance(value, tuple) and is_dataclass(value[0]):
            records = ",\n".join(json.dumps(_record(item)) for item in value)
            yield f',\n"{field.name}": [\n{records}\n]'
        else:
            yield f',\n"{field.name}": {json.dumps(value)}'
    yield "\n}\n"


def _record(item: Any) -> dict[str, object]:
    """The fields of a dataclass that differ from their defaults."""
    values = {field.name: (getattr(item, field.name), field.default) for field in fields(item)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _problem(data: object) -> RematProblem:
    """Check the head, then every field, then that the indices point somewhere."""
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise _WrongFieldError("format", f"this is no problem of fxremat (expected {_FORMAT!r})")
    version = data.get("version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise _WrongFieldError(
            "version",
            f"the file has schema version {version!r}, this fxremat reads {SCHEMA_VERSION}; "
            "capture the problem again or use the fxremat that wrote it",
        )
    body = {name: value for name, value in data.items() if name not in ("format", "version")}
    values = _decode_fields(RematProblem, body, "")
    _check_indices(values)
    _check_names(values)
    try:
        problem = RematProblem(**values)
    except ValueError as error:
        raise _WrongFieldError("operations", str(error)) from error
    _check_makers(problem)
    return problem


def _decode_fields(cls: type, data: dict[str, object], where: str) -> dict[str, Any]:
    """The values of a dataclass's fields, checked."""
    known: dict[str, Field[Any]] = {field.name: field for field in fields(cls)}
    for name in data:
        if name not in known:
            raise _WrongFieldError(f"{where}{name}", "there is no such field")
    values: dict[str, Any] = {}
    for name, field in known.items():
        if name in data:
            values[name] = _decode(field.type, data[name], f"{where}{name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise _WrongFieldError(f"{where}{name}", "it is missing")
    return values


def _decode(kind: Any, value: object, where: str) -> Any:
    """One value of the type that the dataclass names for it."""
    if isinstance(kind, types.GenericAlias) and get_origin(kind) is tuple:
        return _decode_tuple(get_args(kind), value, where)
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise _WrongFieldError(where, f"expected an object, found {_show(value)}")
        try:
            return kind(**_decode_fields(kind, value, f"{where}."))
        except ValueError as error:
            raise _WrongFieldError(where, str(error)) from error
    if kind is Kind:
        if not isinstance(value, str) or value not in list(Kind):
            raise _WrongFieldError(
                where, f"expected one of {[*map(str, Kind)]}, found {_show(value)}"
            )
        return Kind(value)
    if type(value) is not kind:  # not isinstance: True is no number of bytes
        raise _WrongFieldError(where, f"expected {kind.__name__}, found {_show(value)}")
    if isinstance(value, int) and value < 0 and where.endswith(("_bytes", "_ns")):
        raise _WrongFieldError(where, f"expected at least 0, found {value}")
    if isinstance(value, int) and abs(value) > LARGEST:  # solvers reckon in floating point
        raise _WrongFieldError(where, f"expected at most {LARGEST}, found more")
    return value


def _decode_tuple(kinds: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    """A tuple of one kind (``tuple[int, ...]``) or of given kinds (``tuple[str, str]``)."""
    if not isinstance(value, list):
        raise _WrongFieldError(where, f"expected a list, found {_show(value)}")
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise _WrongFieldError(where, f"expected {len(kinds)} values, found {len(value)}")
    return tuple(
        _decode(kind, item, f"{where}[{i}]")
        for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _check_indices(values: dict[str, Any]) -> None:
    """Every index must point somewhere; a negative one would, in Python, but wrongly."""
    num_storages, num_operations = len(values["storages"]), len(values["operations"])
    for i, storage in enumerate(values["storages"]):
        least = 0 if storage.kind is Kind.VALUE else -1
        if not least <= storage.producer < (num_operations if least == 0 else 0):
            raise _WrongFieldError(
                f"storages[{i}].producer", f"there is no operation {storage.producer}"
            )
    for group in ("operations", "replays"):
        for i, item in enumerate(values[group]):
            _check_range(item.reads, num_storages, f"{group}[{i}].reads")
            _check_range(item.creates, num_storages, f"{group}[{i}].creates")
    for i, replay in enumerate(values["replays"]):
        _check_range((replay.operation,), num_operations, f"replays[{i}].operation", "operation")
    for group in ("outputs", "gradients", "updates"):
        _check_range(values.get(group, ()), num_storages, group)


def _check_makers(problem: RematProblem) -> None:
    """What is read must have been made by then, else no schedule could run."""
    late = set()
    for g, storage in enumerate(problem.storages):
        maker = storage.producer
        if storage.kind is Kind.VALUE and g not in problem.operations[maker].creates:
            raise _WrongFieldError(
                f"operations[{maker}].creates",
                f"storage {g} names this operation as its producer, and is not among them",
            )
        if storage.kind is Kind.TANGENT or maker >= problem.num_forward:
            late.add(g)
    reads = {f"operations[{i}].reads": o.reads for i, o in enumerate(problem.forward)}
    for where, found in {**reads, "outputs": problem.outputs, "updates": problem.updates}.items():
        for g in found:
            if g in late:
                raise _WrongFieldError(where, f"storage {g} is not there before the backward")


def _check_range(indices: Sequence[int], count: int, where: str, what: str = "storage") -> None:
    for index in indices:
        if not 0 <= index < count:
            raise _WrongFieldError(where, f"there is no {what} {index} (they are 0 to {count - 1})")


def _check_names(values: dict[str, Any]) -> None:
    """The rewrite finds operations by their names; results of one operation may share theirs."""
    seen: set[str] = set()
    for i, operation in enumerate(values["operations"]):
        if operation.name in seen:
            raise _WrongFieldError(f"operations[{i}].name", f"{operation.name!r} is there twice")
        seen.add(operation.name)


def _show(value: object) -> str:
    """A value for a message, short."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
