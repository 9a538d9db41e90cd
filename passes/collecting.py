"""Hooks that transformers puts on a model in the first call that asks for hidden states.

``output_hidden_states``, ``output_attentions`` and router logits are collected by hooks that the
forward itself installs, in a lock, which Dynamo does not enter. So the installer runs as it is when
Dynamo meets it, and the trace begins again: it then finds the hooks, as any later call of eager
does. They do nothing in calls that ask for nothing. Private to torch: ``UserFunctionVariable`` and
the restart of an analysis.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

try:
    from torch._dynamo.exc import UnspecializeRestartAnalysis
    from torch._dynamo.variables.functions import UserFunctionVariable

    _trace_call = UserFunctionVariable.call_function
except (ImportError, AttributeError) as error:  # pragma: no cover - depends on the release
    raise ImportError(
        f"fxremat installs hooks of transformers by parts of Dynamo that torch {torch.__version__} "
        f"does not have ({error}); torch 2.11 to 2.13 do"
    ) from error

_HOME = "transformers.utils.output_capturing"
_INSTALLER = "maybe_install_capturing_hooks"
_INSTALLED = "_output_capturing_hooks_installed"  # what the installer leaves on the model

_installer: ContextVar[Callable[[Any], None] | None] = ContextVar("_installer", default=None)


@contextlib.contextmanager
def installing_hooks() -> Iterator[None]:
    """While fxremat traces: let the installer of transformers run instead of tracing it."""
    token = _installer.set(getattr(sys.modules.get(_HOME), _INSTALLER, None))
    try:
        yield
    finally:
        _installer.reset(token)


def _call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    installer = _installer.get()
    if installer is not None and self.fn is installer and len(args) == 1:
        model = getattr(args[0], "value", None)
        if model is not None and not getattr(model, _INSTALLED, False):
            installer(model)
            if getattr(model, _INSTALLED, False):  # else it would begin again for ever
                raise UnspecializeRestartAnalysis(restart_reason=f"{_INSTALLER} ran")
    return _trace_call(self, tx, args, kwargs)


UserFunctionVariable.call_function = _call_function  # type: ignore[method-assign]
