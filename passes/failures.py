"""What Dynamo says when it cannot trace a model, in fewer words and with a remedy that fits.

Dynamo's own text carries hints for every situation in which a break can arise, and debug notes for
its developers. What a user needs of it is the reason, the line, and what to do.
"""

import re
from typing import NamedTuple

from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError

from fxremat.passes.ddp import HINT

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)\n\s+(?P<code>.+)')
_ENOUGH = (
    "Hint:",
    "Developer debug context:",
    "For more details",
    "For more information",
    "Set TORCHDYNAMO_VERBOSE",
)
_OTHERS = ("site-packages", "/fxremat/install.py")  # the latter calls the user's


class Frame(NamedTuple):
    """A line of the model that was being traced.

    Attributes:
        where: ``file.py:12``.
        name: The function.
        code: The line.
    """

    where: str
    name: str
    code: str


def frames(text: str) -> list[Frame]:
    """The lines that Dynamo names, the outermost call first."""
    return [
        Frame(f"{found['file']}:{found['line']}", found["name"].strip(), found["code"].strip())
        for found in _FRAME.finditer(text)
    ]


def explain(error: TorchDynamoException) -> str:
    """Why a model could not be traced, at which line, and what to do.

    Args:
        error: What Dynamo raised.

    Returns:
        The text of a ``CaptureError``.
    """
    head, _, stack = str(error).partition("from user code:")
    where = "".join(f"\n  at {f.where}, in {f.name}: {f.code}" for f in _telling(frames(stack)))
    if isinstance(error, TorchRuntimeError):
        reason = _reason(head).rpartition(": got ")[2]
        return (
            f"an operator of the model failed while it was traced: {reason}{where}\n"
            "Remedy: call the model without fxremat; what raises there must be mended there."
        )
    if "torch/nn/parallel/distributed.py" in stack:
        return f"the model could not be traced to one graph: {HINT}{where}"
    return (
        f"the model could not be traced to one graph: {_reason(head)}{where}\n"
        "Remedy: move what breaks the graph (printing, .item(), data-dependent branches) out of "
        "the optimised callable, or pass fullgraph=False to plan the pieces."
    )


def _reason(head: str) -> str:
    """Dynamo's text up to its hints, on one line."""
    kept: list[str] = []
    for line in head.splitlines():
        if line.strip().startswith(_ENOUGH):
            break
        kept.append(line.strip().removeprefix("Explanation: "))
    return " ".join(part for part in kept if part)


def _telling(found: list[Frame]) -> list[Frame]:
    """The innermost line, and the innermost of the user's own where that is another."""
    own = [frame for frame in found if not any(part in frame.where for part in _OTHERS)]
    return list(dict.fromkeys([*found[-1:], *own[-1:]]))
