"""What a step may change in Python: attributes, containers, what a function refers to.

A first call may count itself, fill a cache or make a mask. A second call then is another step, so
whoever compares two calls must put all of that back. Containers are put back in place: others, and
the guards of a compiled step, may hold the same object.
"""

import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

_LIMIT = 100_000  # values looked at; behind such many a step's own state no longer is
_SKIPPED = "_compiled_call_impl"  # a plan is no state of the step
_FOREIGN = ("torch.", "numpy.", "builtins.", "threading.", "_thread.", "logging.", "fxremat.")
_ABSENT = object()


class PythonState:
    """The Python values that lie behind some roots, as they were when this was made.

    Args:
        roots: Modules, functions, arguments.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.roots = list(roots)
        self.undo: list[Callable[[], None]] = []
        self.alive: list[Any] = []  # so that no other object gets the id of one of these
        for _, value in list(_walk(self.roots)):
            undo = _undo(value)
            if undo is not None:
                self.undo.append(undo)
                self.alive.append(value)

    def put_back(self) -> None:
        """As it was."""
        for undo in self.undo:
            undo()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that lie there now, by where; none that the backward of others made."""
        found: dict[str, torch.Tensor] = {}
        for name, value in _walk(self.roots):
            if (
                type(value) is torch.Tensor
                and value.layout is torch.strided
                and not _is_made(value)
            ):
                found.setdefault(f"attribute {name}", value)
        return found


def _is_made(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and not tensor.is_leaf


def _walk(roots: list[Any]) -> Iterator[tuple[str, Any]]:
    """Whatever can be reached, each once, with the way that leads there."""
    seen: set[int] = set()
    stack = [("", root) for root in reversed(roots)]
    while stack and len(seen) < _LIMIT:
        name, value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield name, value
        parts = reversed(_parts(value))
        stack += [(f"{name}.{key}".strip("."), part) for key, part in parts]


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What lies next behind a value."""
    if isinstance(value, dict):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, list | tuple | deque | set | frozenset):
        return [(str(number), part) for number, part in enumerate(value)]
    if isinstance(value, types.MethodType):
        return [("", value.__self__), ("", value.__func__)]
    if isinstance(value, types.FunctionType):
        return _referred(value) if _is_own(value.__module__) else []
    if isinstance(value, types.CellType):
        return [("", _content(value))]
    if isinstance(value, nn.Module):
        return [(key, part) for key, part in vars(value).items() if key != _SKIPPED]
    return list(vars(value).items()) if _is_plain(value) else []


def _referred(function: types.FunctionType) -> list[tuple[str, Any]]:
    """What a function refers to by its closure, its defaults and globals that its code names."""
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    named = [(n, function.__globals__.get(n)) for n in code.co_names]
    own = [(n, value) for n, value in named if not isinstance(value, types.ModuleType | type)]
    defaults = [(f"default {i}", value) for i, value in enumerate(function.__defaults__ or ())]
    return [*cells, *own, *defaults, *vars(function).items()]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None


def _is_own(module: str | None) -> bool:
    return not f"{module}.".startswith(_FOREIGN)


def _is_plain(value: Any) -> bool:
    """Is it an object of somebody's own class, with attributes?"""
    kind = type(value)
    if isinstance(value, type | types.ModuleType | torch.Tensor) or not hasattr(value, "__dict__"):
        return False
    return _is_own(kind.__module__)


def _undo(value: Any) -> Callable[[], None] | None:
    """What puts a mutable value back as it is now; None for others."""
    if isinstance(value, dict):
        return _undo_dict(value)
    if isinstance(value, list | deque | set):
        return _undo_items(value)
    if isinstance(value, types.CellType):
        return _undo_cell(value)
    if isinstance(value, types.FunctionType):
        return _undo_globals(value) if _is_own(value.__module__) else None
    if isinstance(value, nn.Module) or _is_plain(value):
        return _undo_dict(vars(value))
    return None


def _undo_dict(value: dict[Any, Any]) -> Callable[[], None]:
    kept = {key: part for key, part in value.items() if key != _SKIPPED}
    plain = OrderedDict if isinstance(value, OrderedDict) else dict  # subclasses may refuse

    def undo() -> None:
        now = {key: part for key, part in value.items() if key != _SKIPPED}
        if list(now) == list(kept) and all(now[key] is kept[key] for key in kept):
            return
        for key in now:
            plain.__delitem__(value, key)
        for key, part in kept.items():
            plain.__setitem__(value, key, part)

    return undo


def _undo_items(value: "list[Any] | deque[Any] | set[Any]") -> Callable[[], None]:
    kept = list(value)

    def undo() -> None:
        if len(value) == len(kept) and all(a is b for a, b in zip(value, kept, strict=True)):
            return
        value.clear()
        value.update(kept) if isinstance(value, set) else value.extend(kept)

    return undo


def _undo_cell(cell: types.CellType) -> Callable[[], None]:
    kept = _content(cell)

    def undo() -> None:
        if kept is not None and _content(cell) is not kept:
            cell.cell_contents = kept

    return undo


def _undo_globals(function: types.FunctionType) -> Callable[[], None]:
    scope = function.__globals__
    kept = {name: scope.get(name, _ABSENT) for name in function.__code__.co_names}

    def undo() -> None:
        for name, value in kept.items():
            if scope.get(name, _ABSENT) is value:
                continue
            if value is _ABSENT:
                del scope[name]
            else:
                scope[name] = value

    return undo
