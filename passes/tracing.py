"""What fxremat asks of Dynamo and AOTAutograd while they trace: every private setting."""

import contextlib
import logging
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback, TorchDynamoException
from torch._functorch._aot_autograd.descriptors import (
    ForwardTokenAOTOutput,
    InputMutationAOTOutput,
)
from torch._guards import CompileContext, TracingContext

from fxremat.errors import FxrematError
from fxremat.passes.collecting import installing_hooks
from fxremat.passes.dropouts import dropout_as_it_runs
from fxremat.passes.joint import Joint
from fxremat.passes.leaves import leaving_out_leaves

__all__ = [
    "BackendCompilerFailed", "TorchDynamoException", "backend_arguments", "compiling",
    "current_frame", "joint_of", "keep_buffers", "keeps_graph", "own_code",
    "shortened", "tracing",
]  # fmt: skip

RECOMPILE_LIMIT = (
    256  # each shape is a graph of its own; Dynamo's 8 serves models with guards that flap
)

for _owner, _name in (
    (dynamo_config, "ignore_logging_functions"),
    (dynamo_config, "recompile_limit"),
    (dynamo_config, "accumulated_recompile_limit"),
    (dynamo_config, "skip_nnmodule_hook_guards"),
    (dynamo_config, "allow_rnn"),
    (dynamo_config, "optimize_ddp"),
    (dynamo_config, "use_numpy_random_stream"),
    (functorch_config, "enable_autograd_cache"),
    (functorch_config, "donated_buffer"),
    (functorch_config, "view_replay_for_aliased_outputs"),
    (inductor_config, "fallback_random"),
):
    if not hasattr(_owner, _name):
        raise ImportError(
            f"fxremat needs the setting {_owner.__name__}.{_name}, which torch {torch.__version__} "
            "does not have; torch 2.11 to 2.13 do"
        )


class _Unlisted(set[Callable[..., Any]]):
    """A set that does not tell its members.

    torch 2.11 sorts every set among Dynamo's settings to log them, and functions have no order. It
    asks ``in`` for methods of loggers; only plain functions are looked for by iterating.
    """

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(())


OLD_SETTINGS = torch.__version__.startswith("2.11")


def _logging_functions() -> set[Callable[..., Any]]:
    """Calls that write a log line and compute nothing; Dynamo may leave them out of the graph.

    transformers adds ``warning_once`` and ``info_once`` to ``logging.Logger`` when it is imported.
    """
    names = (
        "debug",
        "info",
        "warning",
        "error",
        "exception",
        "critical",
        "log",
        "warning_once",
        "info_once",
    )
    found = {getattr(logging.Logger, name) for name in names if hasattr(logging.Logger, name)}
    found |= {warnings.warn, *dynamo_config.ignore_logging_functions}
    return _Unlisted(found) if OLD_SETTINGS else found


class _OfAllThreads:
    """Something that all threads share: the first to come changes it, the last puts it back.

    Were each to put back what it found, the last of several would put back the change of another.

    Args:
        changed: Makes the context in which it is changed.
    """

    def __init__(self, changed: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self.changed = changed
        self.lock = threading.Lock()
        self.inside = 0
        self.context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.context = self.changed()
                self.context.__enter__()
            self.inside += 1

    def __exit__(self, *_error: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                self.context.__exit__(None, None, None)


def _settings() -> contextlib.AbstractContextManager[Any]:
    changed: contextlib.AbstractContextManager[Any] = dynamo_config.patch(
        ignore_logging_functions=_logging_functions(),
        recompile_limit=RECOMPILE_LIMIT,
        accumulated_recompile_limit=8 * RECOMPILE_LIMIT,
        skip_nnmodule_hook_guards=False,  # a hook added later must be seen
        allow_rnn=True,  # LSTM and GRU are traced like anything else
        optimize_ddp=False,  # DDP would cut the graph into buckets, each with a plan of its own
        use_numpy_random_stream=True,  # else NumPy's draws would come from torch's generator
    )
    return changed


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Dynamo looks at .grad of every tensor it meets, intermediate ones too.
        warnings.filterwarnings(
            "ignore", message="The .grad attribute of a Tensor that is not a leaf"
        )
        # It makes an instance of a user's autograd.Function, to trace with its context.
        instantiated = ".*should not be instantiated. Methods on autograd"
        warnings.filterwarnings("ignore", message=instantiated)
        yield


_shared_settings, _shared_filters = _OfAllThreads(_settings), _OfAllThreads(_quiet)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Settings under which Dynamo traces for fxremat: one graph, whatever is logged on the way.

    torch 2.11 has one set of settings for all threads, later ones have one for each.
    """
    settings = _shared_settings if OLD_SETTINGS else _settings()
    with _shared_filters, installing_hooks(), leaving_out_leaves(), dropout_as_it_runs(), settings:
        yield


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Settings under which AOTAutograd compiles for fxremat.

    A hit in its cache would skip the partitioner, and with it the plan; donated buffers would make
    ``retain_graph`` raise. Random draws that nobody reads stay in the graph only with Inductor's
    ``fallback_random``; without them the generator would end in another state.
    """
    with (
        dropout_as_it_runs(),
        # Replayed on an output that is a view itself, recorded views come out wrong: for
        # ``v = x.t(); return v, v.detach()`` torch returns the second one transposed once more.
        functorch_config.patch(
            enable_autograd_cache=False, donated_buffer=False, view_replay_for_aliased_outputs=False
        ),
        inductor_config.patch(fallback_random=True),
    ):
        yield


def keep_buffers() -> None:
    """Let the backward that is compiled now run again on what its forward saved.

    Without donated buffers AOTAutograd notes none, and takes that for some: a backward with
    ``retain_graph=True`` then raises where an earlier one went without.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def joint_of(module: torch.fx.GraphModule, num_forward_outputs: int) -> Joint:
    """The joint graph that a partitioner was given, with the inputs that the step writes to.

    AOTAutograd makes the graph functional: what is written to an input is returned first, and
    copied into the input when the forward has run. It describes inputs and outputs in
    ``meta["desc"]``.
    """
    (output,) = module.graph.find_nodes(op="output")
    descriptions = list(output.meta.get("desc", ()))[:num_forward_outputs]
    written = [d.mutated_input for d in descriptions if isinstance(d, InputMutationAOTOutput)]
    mutated = frozenset(
        node.name
        for node in module.graph.find_nodes(op="placeholder")
        if node.meta.get("desc") in written
    )
    inner = (InputMutationAOTOutput, ForwardTokenAOTOutput)
    updates = frozenset(i for i, d in enumerate(descriptions) if isinstance(d, inner))
    return Joint(module, num_forward_outputs, mutated, updates)


def keeps_graph() -> bool:
    """Does the backward that runs now keep its graph (``retain_graph=True``)?"""
    return bool(_get_current_graph_task_keep_graph())


def current_frame() -> int:
    """Dynamo's number of the code that it compiles now; -1 outside of a compilation."""
    found = CompileContext.current_compile_id()
    return -1 if found is None or found.frame_id is None else found.frame_id


def own_code(function: types.FunctionType) -> types.FunctionType:
    """A copy of a function with a code object of its own.

    Dynamo counts recompilations by code object; one shared by all optimised modules would reach its
    limit with the ninth of them.
    """
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@contextlib.contextmanager
def shortened() -> Iterator[None]:
    """Let fxremat's own errors reach the caller of a compiled function as they are.

    Dynamo wraps whatever a backend raises, except for ``ShortenTraceback``.
    """
    try:
        yield
    except FxrematError as error:
        kind = type(error)
        passing = type(kind.__name__, (kind, ShortenTraceback), {"__module__": kind.__module__})
        passed: Any = BaseException.__new__(passing)
        passed.args, passed.__dict__ = error.args, dict(error.__dict__)
        passed.first_useful_frame = None
        raise passed from None


def backend_arguments(compiled: Any) -> dict[str, Any]:
    """The keyword arguments that ``torch.compile`` keeps for its backend; empty if none."""
    context = getattr(compiled, "dynamo_ctx", None)
    for cell in getattr(compiled, "__closure__", None) or ():
        context = context or (
            cell.cell_contents if hasattr(cell.cell_contents, "callback") else None
        )
    backend = innermost_backend(context.callback) if context is not None else None
    found = getattr(backend, "kwargs", None)
    return found if isinstance(found, dict) else {}
