"""``optimize`` and ``restore``: how a plan gets between a module and its callers."""

import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn

from fxremat.backend import compiled_session
from fxremat.backend import fxremat as backend_by_name
from fxremat.compiling import Backend, bytes_on, gradients_of
from fxremat.errors import (
    CaptureError,
    FxrematError,
    InfeasibleBudgetError,
    OptionError,
    UnsupportedGraphError,
)
from fxremat.options import Options
from fxremat.passes.bypass import finding_plans, frames_traced, kept_off, refusal, see_plans
from fxremat.passes.ddp import HINT, bucket_bytes, is_ddp
from fxremat.passes.failures import explain, explain_backend
from fxremat.passes.recompiles import raise_limit
from fxremat.passes.seeding import tensors_in
from fxremat.passes.select import mark
from fxremat.passes.tangents import ask_torch
from fxremat.passes.tracing import (
    BackendCompilerFailed,
    TorchDynamoException,
    own_code,
    tracing,
)
from fxremat.reporting import RematReport
from fxremat.session import Session
from fxremat.shapes import Shapes, kind_and_shapes, naming, of_one_piece
from fxremat.together import storages_in
from fxremat.trace import Trace
from fxremat.unplanned import (
    computed,
    nested,
    outside,
    refuse_forward_mode,
    trainable,
    uncounted,
    unplanned,
)

F = TypeVar("F", bound=Callable[..., Any])

Verifier = Callable[
    [Callable[..., Any], nn.Module | None, tuple[Any, ...], dict[str, Any], Options], None
]
"""Checks one call of a callable, and of the module that owns it, before it runs."""

log = logging.getLogger("fxremat")

_SESSION = "__fxremat_session__"
_MANY = 1000  # inputs that are remembered before those that are gone are forgotten
_disabled: Callable[[Any], Any] = torch._dynamo.disable(
    reason="fxremat.optimize planned it and runs it: no fullgraph=True around it"
)

see_plans(lambda call: hasattr(call, _SESSION))
raise_limit(lambda compiler: compiler is backend_by_name or hasattr(compiler, _SESSION))


class Installed:
    """What stands between a callable and its callers.

    It compiles on its first call, with one copy of the traced function for steps that begin without
    gradients and one for each amount of them that no plan so far has room for.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        owner: nn.Module | None,
        options: Options,
        trace: type[Trace] = Trace,
        verifier: Verifier | None = None,
    ) -> None:
        self.target = target
        self.trace = trace
        self.owner = None if owner is None else weakref.ref(owner)
        self.session = Session(options, name=_name(owner if owner is not None else target))
        mine = weakref.ref(self)
        self.session.find_gradients = lambda: me.gradient_bytes(()) if (me := mine()) else 0
        self.compiled: dict[tuple[int, ...], Callable[..., Any]] = {}
        # leaves that graphs read, and whether they needed gradients when first traced, by id
        self.graph_inputs: dict[int, tuple[weakref.ref[torch.Tensor], bool]] = {}
        self.shapes = Shapes()
        self.completed = False
        self.verifier = verifier  # of the first call
        self.inside: list[str] = []  # other optimised modules that Dynamo met in this one

    def tensors(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers, used by the graph or not."""
        module = self.owner() if self.owner is not None else None
        if module is not None:
            yield from module.parameters()
            yield from module.buffers()

    def remember(self, inputs: Sequence[Any]) -> None:
        """Inputs of graphs and calls that may have gradients, as a function's parameters do."""
        if len(self.graph_inputs) > _MANY:
            alive = ((k, pair) for k, pair in self.graph_inputs.items() if pair[0]() is not None)
            self.graph_inputs = dict(alive)
        for value in inputs:
            if not isinstance(value, torch.Tensor) or not value.is_leaf:
                continue
            if id(value) not in self.graph_inputs or self.graph_inputs[id(value)][0]() is None:
                self.graph_inputs[id(value)] = weakref.ref(value), value.requires_grad

    def inputs(self) -> list[tuple[torch.Tensor, bool]]:
        """Those of them that are still alive."""
        found = [(ref(), needed) for ref, needed in self.graph_inputs.values()]
        return [(value, needed) for value, needed in found if value is not None]

    def gradient_bytes(self, given: Any) -> int:
        """Bytes of the gradients that exist now, those of a call's arguments too. [bytes]"""
        inputs = [value for value, _ in self.inputs()]
        found = gradients_of([*self.tensors(), *inputs, *tensors_in(given)])
        return bytes_on(found[0].device, found) if found else 0

    def kind(self, existing_bytes: int) -> int:
        """The kind of step to run: the bytes of gradients that its plans have room for. [bytes]"""
        if self.session.options.gradients != "auto" or not existing_bytes:
            return 0
        records = self.session.graphs
        if records and all(record.has_room(existing_bytes) for record in records):
            return 0
        kinds = [kind for kind, *_ in self.compiled if kind >= existing_bytes]
        return min(kinds, default=existing_bytes)

    def compile(self, kind: int, symbolic: bool) -> Callable[..., Any]:
        """The compiled callable for one kind of step."""
        outside_bytes = bucket_bytes()
        # torch 2.11 does not guard on which parameters need gradients
        trained = (t.requires_grad for t in self.tensors())
        changed = (id(t) for t, needed in self.inputs() if t.requires_grad != needed)
        key = (kind, symbolic, outside_bytes, *trained, *changed)
        if key not in self.compiled:
            ask_torch()
            options = self.session.options
            held = options.gradients == "held"
            backend = Backend(self.session, self.tensors, held, self.trace, outside_bytes)

            def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
                if self.inside:
                    raise nested(self.session.name, self.inside)
                self.remember(inputs)
                return backend(graph, inputs)

            setattr(compile_graph, _SESSION, self.session)
            traced = _traced(self.target, options)
            self.compiled[key] = torch.compile(
                traced, backend=compile_graph, fullgraph=options.fullgraph, dynamic=symbolic
            )
        return self.compiled[key]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One forward."""
        if self.verifier is not None:
            owner = self.owner() if self.owner is not None else None
            self.verifier(self.target, owner, args, kwargs, self.session.options)
            self.verifier = None  # once it has passed
        if torch.compiler.is_exporting():  # asks for the mathematics, not for a step
            return self.target(*args, **kwargs)
        refuse_forward_mode(self.session.name, (*self.tensors(), *tensors_in((args, kwargs))))
        self.remember([t for t in tensors_in((args, kwargs)) if t.requires_grad])
        existing_bytes = self.gradient_bytes((args, kwargs))
        self.session.begin(existing_bytes)
        if self.never_runs():
            given = (*self.tensors(), *tensors_in((args, kwargs)))
            if torch.is_grad_enabled() and trainable(given):
                raise unplanned(self.session.name)
            return self.target(*args, **kwargs)
        try:
            output = self.step(self.kind(existing_bytes), args, kwargs)
        except InfeasibleBudgetError as error:
            if self.session.graphs:
                error = naming(error, tensors_in((args, kwargs)))
            if self.session.shares and not self.session.known:
                error = of_one_piece(error)
            raise error from None
        if self.session.idle and torch.is_grad_enabled() and computed(output, (args, kwargs)):
            raise unplanned(self.session.name)
        told = self.session.options.fullgraph or self.session.options.reserve != 0
        if not told and (found := outside(output, (args, kwargs))):
            raise uncounted(self.session.name, found)
        return output

    def step(self, wanted: int, args: Any, kwargs: Any) -> Any:
        """Run the graph of its own that a shape has, or the one that serves many."""
        options = self.session.options
        if options.dynamic is not None or options.executor != "eager":
            symbolic = bool(options.dynamic)
            return self.run(self.compile(wanted, symbolic), args, kwargs, symbolic=symbolic)
        owner = self.owner() if self.owner is not None else None
        trains = owner.training if owner is not None else None
        kind, shapes = kind_and_shapes((args, kwargs), trains, torch.is_grad_enabled())
        if self.shapes.are_many(kind, shapes):
            try:
                compiled = self.compile(wanted, symbolic=True)
                return self.run(compiled, args, kwargs, symbolic=True)
            except (CaptureError, UnsupportedGraphError) as error:  # before anything has run
                self.shapes.refused.add(kind)
                log.info(
                    "%s has no symbolic graph, so each shape gets a graph of its own: %s",
                    self.session.name,
                    error,
                )
        return self.run(self.compile(wanted, symbolic=False), args, kwargs)

    def never_runs(self) -> bool:
        """Is it certain that no planned graph can run now?"""
        cause = kept_off()
        return "force_eager" in cause or bool(cause and not self.session.graphs)

    def run(
        self, compiled: Callable[..., Any], args: Any, kwargs: Any, *, symbolic: bool = False
    ) -> Any:
        """Run what was compiled, and say in our words why it could not be traced."""
        self.inside.clear()
        try:
            with tracing(), finding_plans(self.inside), frames_traced():
                output = compiled(*args, **kwargs)
        except BackendCompilerFailed as failed:
            if isinstance(failed.inner_exception, FxrematError):
                raise failed.inner_exception.with_traceback(None) from None
            text = explain_backend(self.session.name, failed.inner_exception, symbolic=symbolic)
            raise CaptureError(text) from failed
        except TorchDynamoException as error:
            raise CaptureError(explain(error)) from error
        except RuntimeError as error:
            if cause := refusal(error):
                raise unplanned(self.session.name, cause) from error
            raise
        if self.session.options.keys is not None:
            output, _ = output
        if self.session.shares:
            self.session.call.leave(seen.key for seen in storages_in(output))
        return output


def _traced(target: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """The function that Dynamo traces, with a code object of its own."""
    keys = options.keys
    if keys is None:

        def traced(*args: Any, **kwargs: Any) -> Any:
            return target(*args, **kwargs)

    else:

        def traced(*args: Any, **kwargs: Any) -> Any:
            output = target(*args, **kwargs)
            return output, mark(output, keys)

    assert isinstance(traced, types.FunctionType)
    return own_code(traced)


def _name(target: object) -> str:
    return getattr(target, "__qualname__", None) or type(target).__qualname__


_failures: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()


def optimize(target: F, options: Options, verifier: Verifier | None = None) -> F:
    """Put a plan between a callable and its callers; see ``fxremat.optimize``."""
    if is_ddp(target):
        raise OptionError(HINT, "target", target)
    if isinstance(target, nn.Module):
        _install(target, options, verifier)
        return target
    if not callable(target):
        raise OptionError(
            f"fxremat.optimize takes a module or a callable, not {type(target).__name__}.",
            "target",
            target,
        )
    original = getattr(target, "__wrapped__", target) if hasattr(target, _SESSION) else target
    installed = Installed(original, None, options, verifier=verifier)

    @_disabled
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return installed(*args, **kwargs)

    wrapper.__wrapped__ = original
    setattr(wrapper, _SESSION, installed.session)
    planned: F = wrapper
    return planned


def _install(module: nn.Module, options: Options, verifier: Verifier | None) -> None:
    restore(module)
    if module._compiled_call_impl is not None:
        raise OptionError(
            "this module was compiled with module.compile(); optimise it instead of that.",
            "target",
            module,
        )
    installed = Installed(module._call_impl, module, options, verifier=verifier)
    _failures.pop(module, None)
    planted = weakref.ref(module)

    @_disabled
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            output = installed(*args, **kwargs)
        except BaseException as error:
            found = planted()
            if not installed.completed and found is not None:
                restore(found)
                _failures[found] = f"{type(error).__name__}: {error}"
            raise
        installed.completed = True
        return output

    setattr(call, _SESSION, installed.session)
    module._compiled_call_impl = (
        call  # Module.__call__ goes here; keys, class and copies stay plain
    )


def restore(target: Any) -> Any:
    """Take the plan away: the module or function as it was.

    Args:
        target: What ``optimize`` was given or returned; what bears no plan comes back untouched.

    Returns:
        The module itself, or the function that was optimised.
    """
    if isinstance(target, nn.Module):
        if hasattr(target._compiled_call_impl, _SESSION):
            target._compiled_call_impl = None
            del target._compiled_call_impl  # the class attribute is None
        return target
    return getattr(target, "__wrapped__", target) if hasattr(target, _SESSION) else target


def report(target: Any) -> RematReport:
    """The report of the last call of an optimised module or function.

    Args:
        target: What ``optimize`` returned, or what ``torch.compile(..., backend="fxremat")`` did.

    Returns:
        The report.

    Raises:
        FxrematError: It bears no plan, or has not run yet.
    """
    session = session_of(target)
    if session is None:
        failure = _failures.get(target) if isinstance(target, nn.Module) else None
        if failure is not None:
            text = "this module is not optimised: its first call raised, so the plan was taken"
            raise FxrematError(f"{text} away ({failure}).")
        taken = getattr(target, "_compiled_call_impl", None) is not None
        if hasattr(target, "get_compiler_config"):
            raise FxrematError(
                "this came from torch.compile and bears no plan, or has not run yet: with "
                'backend="fxremat", call it once for training, then ask for the report.'
            )
        raise FxrematError(
            "this module or function bears no plan"
            + (": it was compiled with module.compile(), which replaces one." if taken else ".")
            + " fxremat.optimize(model, budget) gives it one; copies and loaded modules are plain "
            "and want a call of their own."
        )
    return session.report()


def session_of(target: Any) -> Session | None:
    """The session behind a module, a function or what torch.compile returned."""
    if isinstance(target, nn.Module):
        found = getattr(target._compiled_call_impl, _SESSION, None)
        if isinstance(found, Session):
            return found
    found = getattr(target, _SESSION, None)
    return found if isinstance(found, Session) else compiled_session(target)
