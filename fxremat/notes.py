"""What is said of a graph beside its numbers: hints in the report, and refusals of calls."""

from fxremat.budget import format_bytes
from fxremat.passes.inner import is_unknown
from fxremat.passes.joint import target_name
from fxremat.passes.shared import Shared
from fxremat.pipeline import Planned, tangents

VIEWS_NOTE = (
    "some outputs are arguments, or views of arguments or of one another: autograd adds their "
    "gradients up outside the graph, and the memory for that is counted at its most. Returning "
    "one of them, or clones, needs less."
)
HOOKED = (
    "this backward of {name} does not reach a parameter or input that has a hook. Eager would not "
    "run the hook; within one graph autograd would, without a gradient. Remedy: name the outputs "
    "that the loss uses with differentiate=, or remove the hook."
)
CHECKPOINTED = (
    "{name} writes to buffers or arguments and is called within torch.utils.checkpoint(..., "
    "use_reentrant=False), which would stop its second run before it has written them. Take the "
    "checkpoint away: the plan recomputes what the budget asks for. use_reentrant=True works too."
)
UNKNOWN_NOTE = (
    "what {names} hold inside themselves is not known and taken as 0: fxremat.verify measures the "
    "step; leave room with reserve=."
)
NOTEWORTHY_SHARE = 0.02  # of the baseline peak; smaller tangents are not worth a hint


def notes_of(planned: Planned, shared: Shared) -> tuple[str, ...]:
    """Hints about a planned graph, a sentence each.

    Args:
        planned: The graph with its plan.
        shared: Which of its outputs share memory.
    """
    notes = []
    for name, size_bytes in tangents(planned.analysis):
        if size_bytes > NOTEWORTHY_SHARE * planned.plan.peak_bytes:
            notes.append(tangent_note(name, size_bytes))
    unknown = [n for n in planned.analysis.joint.graph.nodes if is_unknown(n)]
    if unknown:
        names = ", ".join(dict.fromkeys(target_name(node) for node in unknown))
        notes.append(UNKNOWN_NOTE.format(names=names))
    if shared.beside_bytes or shared.turn_bytes:
        notes.append(VIEWS_NOTE)
    return tuple(notes)


def tangent_note(name: str, size_bytes: int) -> str:
    """The hint about an output whose gradient costs memory even when nobody uses it."""
    return (
        f"output {name} has a tangent: the backward holds a gradient of its size, "
        f"{format_bytes(size_bytes)}, of zeros where the loss does not use it. Name what backward "
        "goes through with differentiate=."
    )
