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


class Known(NamedTuple):
    """A cause that can be told from the text of an error.

    Attributes:
        sign: Stands in the error or in the lines that it names.
        words: What it is.
        remedy: What applies to it.
    """

    sign: str
    words: str
    remedy: str


_OUTSIDE = "do that outside of the optimised callable"
_DRAW = "draw with torch, or draw before the call and pass the numbers"
_STATE = "leave it out, or do it before the call"
_CAUSAL = Known(
    "nn/modules/transformer.py",
    "nn.Transformer looks at the values of a mask to see whether it is causal",
    "say whether it is: tgt_is_causal=True for a causal tgt_mask, src_is_causal= for a src_mask, "
    "is_causal= of an encoder; False for any other mask",
)
_KNOWN = tuple(
    Known(*each)
    for each in (
        (
            "exponential_average_factor",
            "BatchNorm with momentum=None divides by the number of its calls, which only the step "
            "knows",
            "give that BatchNorm a momentum, or call eval() on it",
        ),
        (
            "Module-level backwards hooks",
            "a full backward hook of a module runs inside the backward, which a plan rewrites",
            "remove the hook; hooks of parameters (register_post_accumulate_grad_hook) work",
        ),
        (
            "wrap sparse Tensor",
            "it reads a sparse tensor, and plans know dense ones only",
            "pass tensor.to_dense(), or do the sparse product outside of the optimised callable",
        ),
        (
            "strided NestedTensor",
            "it reads a nested tensor, and plans know plain ones only",
            "pad it: torch.nested.to_padded_tensor(tensor, 0.0)",
        ),
        (
            "functorch tracing attempt",
            "a transform of torch.func (functorch: grad, vmap, jvp) runs around it",
            "take the plan away for that with fxremat.restore(model)",
        ),
        (
            "generator=",
            "it is given a generator, which cannot be put back",
            "leave out generator=, so that it draws from the default generator, or draw before "
            "and pass the numbers",
        ),
        (
            "manual_seed",
            "it seeds the generators",
            "seed before the call",
        ),
        *((sign, "it draws with Python's random", _DRAW) for sign in (".Random.", "`Random.")),
        *(
            (sign, "it reads or sets the state of torch's generators", _STATE)
            for sign in ("`get_rng_state`", "`set_rng_state`", "fork_rng", "initial_seed")
        ),
        (
            "`checkpoint_sequential`",
            "torch.utils.checkpoint.checkpoint_sequential cannot be traced",
            "leave it out, since the plan decides what is kept, or checkpoint each part with "
            "torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)",
        ),
        (
            "aten._ctc_loss",
            "how much a CTC loss holds depends on values that only the step knows, however the "
            "lengths are passed",
            "compute that loss outside of the optimised callable, and name its bytes with reserve=",
        ),
        (
            "Data-dependent branching",
            "a condition depends on values that only the step knows",
            "use torch.where or torch.cond, or pass fullgraph=False to plan the pieces",
        ),
        (
            "data-dependent expression",
            "a size or a condition depends on values that only the step knows",
            "use torch.where or a mask, or pass fullgraph=False to plan the pieces",
        ),
        ("torch.autograd.grad", "it asks for gradients inside", _OUTSIDE),
        ("Tensor.backward()", "it runs a backward inside", _OUTSIDE),
        (
            "save_on_cpu",
            "it says itself what autograd is to keep",
            "take that context away: the plan decides what is kept",
        ),
        (
            "modified by an inplace operation",
            "it writes over a value that the backward needs, as it would without fxremat",
            "write to a copy, or use the operator that is not in place",
        ),
    )
)


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
    causal = _CAUSAL.sign in stack and "data-dependent expression" in head
    known = _CAUSAL if causal else _known(f"{head}{where}")
    if known is not None:
        words, remedy = known.words, known.remedy
        return f"the model could not be traced to one graph: {words}{where}\nRemedy: {remedy}."
    return (
        f"the model could not be traced to one graph: {_reason(head)}{where}\n"
        "Remedy: move what breaks the graph (printing, .item(), data-dependent branches) out of "
        "the optimised callable, or pass fullgraph=False to plan the pieces."
    )


def explain_backend(name: str, error: Exception, *, symbolic: bool = False) -> str:
    """Why forward and backward of a captured graph could not be traced, and what to do.

    Args:
        name: What was optimised.
        error: What AOTAutograd raised.
        symbolic: The graph was to serve many sizes.

    Returns:
        The text of a ``CaptureError``.
    """
    if symbolic:
        first = _shortened(next(iter(str(error).splitlines()), ""))
        return (
            f"{name} has no symbolic graph: {type(error).__name__}: {first}\n"
            "Remedy: say dynamic=False: each shape gets a graph of its own."
        )
    known = _known(str(error))
    lines = [line for line in str(error).splitlines() if line.strip()][:LINES]
    reason = f"{type(error).__name__}: " + " ".join(lines)
    remedy = (
        "if torch.compile(model, backend='aot_eager') fails alike, the cause is in torch; else "
        "please report this model"
    )
    if known is not None:
        reason, remedy = f"{known.words} ({_shortened(reason)})", known.remedy
    return f"torch could not trace forward and backward of {name}: {reason}\nRemedy: {remedy}."


LINES = 8  # of a text of torch's; what follows speaks to torch's developers
LENGTH = 200


def _shortened(text: str) -> str:
    return text if len(text) <= LENGTH else f"{text[:LENGTH]}..."


def _known(text: str) -> Known | None:
    if "nn/modules/batchnorm.py" in text and "data-dependent expression" in text:
        return _KNOWN[0]
    return next((known for known in _KNOWN if known.sign in text), None)


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
