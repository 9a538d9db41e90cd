"""What runs a graph: boxed callables for a forward and its backward, and who waits for which."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from fxremat.passes.boxed import Boxed
from fxremat.passes.split import Split
from fxremat.pipeline import Planned
from fxremat.records import GraphRecord


@dataclass(frozen=True)
class Code:
    """What runs one schedule of a graph: boxed callables."""

    forward: Boxed
    backward: Boxed | None = None


@dataclass(frozen=True)
class Pending:
    """A forward that waits for its backward: its code, its plan, and what it was called with."""

    code: Code | None
    record: GraphRecord | None
    inputs: tuple[Callable[[], torch.Tensor | None], ...] = ()


@dataclass(frozen=True)
class Fit:
    """A graph at some sizes: what is known of it there, and what runs it."""

    record: GraphRecord | None
    planned: Planned | None
    graphs: Split | None
    code: Code | None


def ends_of_code(module: fx.GraphModule) -> tuple[int, int]:
    """How many inputs and outputs a graph has."""
    (output,) = module.graph.find_nodes(op="output")
    return len(module.graph.find_nodes(op="placeholder")), len(output.args[0])
