"""Recurrent operators, which torch's trace does not always get right.

An LSTM on the CPU is traced to oneDNN's operator, whose forward keeps no workspace under
AOTAutograd, so that its backward cannot run; without oneDNN the trace consists of plain operators.
And the trace of several layers leaves the dropout between them out (``_rnn_helper`` in
torch/_decomp/decompositions.py, torch 2.11 to 2.13).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fxremat.errors import UnsupportedGraphError
from fxremat.passes.joint import source_of

_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def mkldnn_enabled() -> bool:
    """Does oneDNN run what it can?"""
    return bool(torch.backends.mkldnn.enabled)


def recurrent(graph: fx.Graph) -> list[fx.Node]:
    """The recurrent operators of a Dynamo graph."""
    calls = graph.find_nodes(op="call_function", target=torch.lstm)
    for name in _NAMES[1:]:
        calls += graph.find_nodes(op="call_function", target=getattr(torch, name))
    return list(calls)


def refuse_lost_dropout(graph: fx.Graph) -> None:
    """Refuse to train with dropout that the trace would leave out.

    Raises:
        UnsupportedGraphError: There is some.
    """
    for node in recurrent(graph):
        packed = isinstance(node.args[3], list | tuple)  # (data, batch_sizes, hx, weights, ...)
        settings = node.args[5 if packed else 4 : 8 if packed else 7]
        layers, dropout, training = (_number(setting) for setting in settings)
        if training and dropout > 0 and layers > 1:
            name = node.target.__name__  # type: ignore[union-attr]  # why: it was found by its target
            raise UnsupportedGraphError(
                f"torch's trace of {name} at {source_of(node) or 'an unknown line'} leaves out the "
                f"dropout of {dropout} between its {int(layers)} layers.\nRemedy: use one "
                "module for each layer with nn.Dropout between them, or dropout=0.",
                node.name,
                name,
                source_of(node),
            )


def _number(setting: Any) -> float:
    """A setting of a module; of a symbolic one, its value in the trace."""
    value = setting.meta["example_value"] if isinstance(setting, fx.Node) else setting
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        value = value.node.hint
    return float(value)


@contextlib.contextmanager
def plain_recurrence(graph: fx.Graph) -> Iterator[None]:
    """While a graph with an LSTM is traced: without oneDNN."""
    if any(node.target is torch.lstm for node in recurrent(graph)):
        with torch.backends.mkldnn.flags(enabled=False):
            yield
    else:
        yield


@contextlib.contextmanager
def as_it_runs(*, mkldnn: bool) -> Iterator[None]:
    """While costs are measured in such a trace: with oneDNN as the step will find it."""
    if mkldnn_enabled() == mkldnn:
        yield
    else:
        with torch.backends.mkldnn.flags(enabled=mkldnn):
            yield
