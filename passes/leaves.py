"""``x.requires_grad = True`` on a value that the model computed, which Dynamo does not trace.

The speech models of transformers do that to their input, so that reentrant checkpoints have
something to start from. The gradient that eager then computes for ``x`` is never read: ``x`` is no
input of the step. So the line may be left out wherever all that is computed from ``x`` needs
gradients in any case, since then nothing that can be seen differs; ``refuse_visible`` makes sure.
Private to torch: how Dynamo traces ``setattr``.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from fxremat.errors import CaptureError

try:
    from torch._dynamo.variables import builtin

    _NEWER = hasattr(builtin, "SetAttrBuiltinVariable")  # torch 2.13 has a class for each builtin
    _OWNER: Any = builtin.SetAttrBuiltinVariable if _NEWER else builtin.BuiltinVariable
    _NAME = "_call_setattr" if _NEWER else "call_setattr"
    _set_attribute = getattr(_OWNER, _NAME)
except (ImportError, AttributeError) as error:  # pragma: no cover - depends on the release
    raise ImportError(
        f"fxremat leaves out assignments to requires_grad by parts of Dynamo that torch "
        f"{torch.__version__} does not have ({error}); torch 2.11 to 2.13 do"
    ) from error

_LEAF = "fxremat_made_leaf"
_leaving_out: ContextVar[bool] = ContextVar("_leaving_out", default=False)


@contextlib.contextmanager
def leaving_out_leaves() -> Iterator[None]:
    """While fxremat traces: leave ``x.requires_grad = True`` out where ``x`` is computed."""
    token = _leaving_out.set(True)
    try:
        yield
    finally:
        _leaving_out.reset(token)


def _call_setattr(self: Any, tx: Any, target: Any, name: Any, value: Any) -> Any:
    if _leaving_out.get() and target.is_tensor() and _says_true(name, value):
        node = target.as_proxy().node
        given = target.source is not None or node.op == "placeholder"  # of this graph or an outer
        if node.meta["example_value"].requires_grad:
            return value  # it is so already
        if not given and tx.output.current_tracer.parent is None:
            node.meta[_LEAF] = torch.is_grad_enabled()  # without, nothing follows from it
            return value
    return _set_attribute(self, tx, target, name, value)


setattr(_OWNER, _NAME, _call_setattr)


def _says_true(name: Any, value: Any) -> bool:
    if not (name.is_python_constant() and value.is_python_constant()):
        return False
    return name.as_python_constant() == "requires_grad" and value.as_python_constant() is True


def refuse_visible(graph: fx.Graph) -> None:
    """Refuse a graph in which the line that was left out would have shown.

    Raises:
        CaptureError: Something is computed from such a value that would need gradients only
            because of it, or the value itself is returned.
    """
    (output,) = graph.find_nodes(op="output")
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if node is output or not (node.meta.get(_LEAF) or reached & set(node.all_input_nodes)):
            continue
        reached.add(node)
        value = node.meta.get("example_value")
        if node.meta.get(_LEAF) and output not in node.users:
            continue
        if isinstance(value, torch.Tensor) and not value.requires_grad:
            raise CaptureError(
                "the model sets requires_grad of a value that it computes, and "
                f"{node.name} would need gradients only because of that; one graph cannot say so.\n"
                "Remedy: leave that line out (freeze_feature_encoder() does in speech models of "
                "transformers), or give what follows a parameter that is trained."
            )
