"""``torch.compile(model, backend="fxremat", options={"budget": "8GiB"})``: the entry point."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torch import fx

from fxremat.compiling import Backend
from fxremat.errors import BudgetError, OptionError
from fxremat.options import check_names, make_options
from fxremat.passes.tangents import ask_torch
from fxremat.passes.tracing import backend_arguments, shortened
from fxremat.session import Session

ask_torch()  # torch.compile loads this module before it traces, and inside a trace is too late

_sessions: dict[int, tuple[object, Session]] = {}


def fxremat(
    graph: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Any:
    """Compile one graph that Dynamo captured.

    Args:
        graph: What Dynamo captured.
        inputs: Its example inputs.
        options: "budget", and the options of ``fxremat.optimize``.

    Returns:
        What Dynamo is to call.

    Raises:
        FxrematError: As ``fxremat.optimize`` does; here the budget may be missing as well.
    """
    with shortened():
        session = _session(options)
        held = session.options.gradients == "held"
        return Backend(session, with_gradients=held)(graph, inputs)


def _session(options: dict[str, Any] | None) -> Session:
    """The session of one torch.compile: those that share an options dict share it."""
    if options is None or "budget" not in options:
        check_names(options or {})
        raise BudgetError(
            'torch.compile(..., backend="fxremat") needs a budget: options={"budget": "8GiB"}.'
        )
    key = id(options)
    if key not in _sessions:  # the dict is kept beside its session, so no other gets its id
        given = {"fullgraph": False, **options}  # a break splits the graph without a word
        made = make_options(given.pop("budget"), given)
        if made.verify:
            raise OptionError(
                "verify=True needs fxremat.optimize, which has the module; or call fxremat.verify.",
                "verify",
                True,
            )
        if made.keys is not None:
            raise OptionError(
                "differentiate needs fxremat.optimize: torch.compile cannot name outputs.",
                "differentiate",
                made.differentiate,
            )
        _sessions[key] = (options, Session(made, name="torch.compile"))
    return _sessions[key][1]


def compiled_session(compiled: Any) -> Session | None:
    """The session behind what ``torch.compile`` returned; None if it is not ours."""
    options = backend_arguments(compiled).get("options")
    found = _sessions.get(id(options))
    return found[1] if found is not None else None


# Importing it makes Dynamo forget what it has compiled; reports need it, and would do so too late.
# It stands here since it imports from this module.
import_module("fxremat.install")
