"""Dynamo's limit of recompilations: what fxremat plans must not run unplanned beyond it.

From the ninth compilation on of one code object Dynamo runs it as it is, with a line in the log.
There is no setting for one backend alone, so the question itself is replaced. Private to torch:
``convert_frame.exceeds_recompile_limit``, and the names of its caller's variables.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config as dynamo_config

from fxremat.errors import CaptureError
from fxremat.passes.tracing import RECOMPILE_LIMIT

try:
    from torch._dynamo import convert_frame
    from torch._dynamo.eval_frame import innermost_backend

    _exceeds = convert_frame.exceeds_recompile_limit  # type: ignore[attr-defined]
    _caller = convert_frame._compile.__code__
    _known = {*_caller.co_varnames, *_caller.co_cellvars}
    if missing := {"compiler_fn", "code", "recompile_reason"} - _known:
        raise AttributeError(f"variables {sorted(missing)} of convert_frame._compile")
except (ImportError, AttributeError) as error:  # pragma: no cover - depends on the release
    raise ImportError(
        f"fxremat raises Dynamo's limit of recompilations by parts of it that torch "
        f"{torch.__version__} does not have ({error}); torch 2.11 to 2.13 do"
    ) from error


def raise_limit(is_ours: Callable[[Any], bool]) -> None:
    """Let Dynamo compile for fxremat up to ``RECOMPILE_LIMIT`` times, and raise beyond.

    Other backends keep the limits that are set.

    Args:
        is_ours: Told a backend; is it one of fxremat's?
    """

    def exceeds_recompile_limit(cache_size: Any, compile_id: Any) -> tuple[bool, str]:
        exceeded, limit = _exceeds(cache_size, compile_id)
        if not exceeded:
            return exceeded, limit
        caller = sys._getframe(1).f_locals
        backend = innermost_backend(caller["compiler_fn"])
        if not is_ours(getattr(backend, "compiler_fn", backend)):
            return exceeded, limit
        with dynamo_config.patch(
            recompile_limit=max(dynamo_config.recompile_limit, RECOMPILE_LIMIT),
            accumulated_recompile_limit=max(
                dynamo_config.accumulated_recompile_limit, 8 * RECOMPILE_LIMIT
            ),
        ):
            exceeded, limit = _exceeds(cache_size, compile_id)
        if exceeded:
            raise _too_often(caller["code"], caller["recompile_reason"])
        return False, ""

    convert_frame.exceeds_recompile_limit = (  # type: ignore[attr-defined]
        exceeds_recompile_limit
    )


def _too_often(code: Any, reason: str | None) -> CaptureError:
    """The error; Dynamo's reason names the value that changed, the user's line and a hint."""
    guard = " ".join((reason or "not known").partition(" (HINT")[0].split())
    return CaptureError(
        f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) was compiled {RECOMPILE_LIMIT} "
        f"times for different values; the last guard that failed: {guard}. Beyond that Dynamo "
        "would run it without a plan.\nRemedy: keep that value from changing from call to call "
        "(pad lengths to a few sizes, pass a number that changes as a tensor)."
    )
