"""Where Dynamo would go around an optimised module, and what torch says when it does not trace.

Dynamo traces the forward of a module that a traced function calls and never looks at what stands
before it (``_compiled_call_impl``). So the method of Dynamo that traces such calls is replaced by
one that looks. Private to torch: ``UnspecializedNNModuleVariable`` and the stance.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch._dynamo.config as dynamo_config

try:
    from torch._dynamo import convert_frame, eval_frame
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    _KNOWN = (
        torch._dynamo.reset_code_caches,
        convert_frame.input_codes,
        eval_frame._stance,
        GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT,
        VariableTracker.build,
    )
except (ImportError, AttributeError) as error:  # pragma: no cover - depends on the release
    raise ImportError(
        f"fxremat shows Dynamo optimised modules by parts of it that torch {torch.__version__} "
        f"does not have ({error}); torch 2.11 to 2.13 do"
    ) from error

_dynamo: Any = torch._C._dynamo.eval_frame
_set_override: Any = getattr(_dynamo, "set_eval_frame_override", None)  # torch 2.11 alone has it
_Override: Any = getattr(_dynamo, "_EvalFrameOverride", None)

_PLANTED = "_compiled_call_impl"  # nn.Module calls this in place of itself

_REFUSALS = {
    "Detected recompile when torch.compile stance": 'set_stance("fail_on_recompile")',
    "torch.compile with fullgraph=True found no compiled frames": "a setting that keeps Dynamo off",
    "Detected that you are using FX to": "a trace by torch.jit.trace or torch.fx",
}
"""How the errors begin that torch raises instead of tracing -> what to blame."""

_found: ContextVar[list[str] | None] = ContextVar("_found", default=None)


@contextlib.contextmanager
def finding_plans(found: list[str]) -> Iterator[None]:
    """While fxremat traces: note optimised modules instead of breaking the graph at them."""
    token = _found.set(found)
    try:
        yield
    finally:
        _found.reset(token)


def see_plans(bears_plan: Callable[[Any], bool]) -> None:
    """Let Dynamo see optimised modules in what it traces.

    It breaks the graph where one is called, so that the plan runs; under ``fullgraph=True`` that is
    torch's error. ``torch.export`` asks for the mathematics alone and goes through.

    Args:
        bears_plan: Told what stands before a module; does a plan run behind it?
    """
    trace_call = UnspecializedNNModuleVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        planted = self.value.__dict__.get(_PLANTED)
        if planted is None and self.source is not None:  # a plan put there later must be seen
            guard = functools.partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=_PLANTED)
            install_guard(self.source.make_guard(guard))
        if planted is None or not bears_plan(planted) or torch.compiler.is_exporting():
            return trace_call(self, tx, args, kwargs)
        found = _found.get()
        if found is not None:
            found.append(type(self.value).__qualname__)
            return trace_call(self, tx, args, kwargs)
        source = None if self.source is None else AttrSource(self.source, _PLANTED)
        call = VariableTracker.build(tx, planted, source)
        return call.call_function(tx, args, kwargs)  # disabled, so the graph breaks here

    UnspecializedNNModuleVariable.call_function = call_function  # type: ignore[method-assign]
    if convert_frame.input_codes.seen:  # what is compiled already does not look: compile it anew
        torch._dynamo.reset_code_caches()


class _Switch:
    """A switch of torch 2.11, one for all threads, under which Dynamo skips whatever is called.

    Torch sets it for ``fullgraph=True``, and forgets to set it back where it raises or goes through
    early (``torch.jit.trace``, nested traces).
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.before: Any = None

    def off(self) -> None:
        """Switch it off; the first to come remembers how it was."""
        with self.lock:
            before = _set_override(_Override.NONE)
            self.before = self.before if self.inside else before
            self.inside += 1

    def back(self) -> None:
        """The last to go puts it back."""
        with self.lock:
            self.inside -= 1
            if not self.inside:
                _set_override(self.before)


_switch = _Switch()


@contextlib.contextmanager
def frames_traced() -> Iterator[None]:
    """Trace the frames of this call, whatever an earlier ``fullgraph=True`` has left behind."""
    if _set_override is None:
        yield
        return
    _switch.off()
    try:
        yield
    finally:
        _switch.back()


def kept_off() -> str:
    """What keeps Dynamo from tracing anything in this process now; empty if nothing does."""
    stance = eval_frame._stance.stance
    if stance in ("force_eager", "eager_on_recompile"):
        return f'torch.compiler.set_stance("{stance}")'
    if dynamo_config.disable:
        return "torch._dynamo.config.disable (TORCHDYNAMO_DISABLE=1 sets it)"
    return ""


def refusal(error: RuntimeError) -> str:
    """What to blame where torch raised instead of tracing; empty for any other error."""
    return next((cause for text, cause in _REFUSALS.items() if str(error).startswith(text)), "")
