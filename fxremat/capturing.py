"""``capture``: a problem without a step; fake tensors serve and no device is needed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from fxremat.compiling import require_device
from fxremat.errors import CaptureError
from fxremat.install import Installed
from fxremat.options import make_options
from fxremat.passes.recurrent import as_it_runs
from fxremat.pipeline import pose
from fxremat.planning import UNLIMITED
from fxremat.problem import RematProblem
from fxremat.progress import TRACING, Progress
from fxremat.trace import Trace


class Captured(BaseException):
    """Carries the problem out of the trace before anything runs; no handler on the way stops it."""

    def __init__(self, problem: RematProblem) -> None:
        super().__init__("captured")
        self.problem = problem


class _Capture(Trace):
    """A trace that ends with the problem."""

    def partition(
        self,
        module: fx.GraphModule,
        _inputs: object,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        options = self.session.options
        joint = self.joint(module, num_fwd_outputs)
        with as_it_runs(mkldnn=self.mkldnn):
            posed = pose(
                joint,
                options,
                resident_bytes=self.resident_bytes,
                device=self.device,
                progress=Progress(options.progress),
                name=self.session.name,
            )
        raise Captured(posed.problem)


def capture(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    given: dict[str, Any],
) -> RematProblem:
    """Trace a callable once, run nothing; see ``fxremat.capture``."""
    options = make_options(UNLIMITED, given)
    module = fn if isinstance(fn, nn.Module) else None
    target = fn._call_impl if isinstance(fn, nn.Module) else fn
    installed = Installed(target, module, options, trace=_Capture)
    given_tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    require_device([*installed.tensors(), *given_tensors])
    try:
        with Progress(options.progress).stage(TRACING):
            installed(*args, **(kwargs or {}))
    except Captured as captured:
        return captured.problem
    raise CaptureError(
        f"{installed.session.name} has nothing to differentiate: no output depends on a "
        "tensor that requires "
        "gradients, or gradients are off. Capture it in training mode with torch.enable_grad()."
    )
