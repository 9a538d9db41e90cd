"""Run real operators in the middle of a trace.

While a compiler traces, torch's calls are intercepted: fake tensors, proxies, functionalisation,
functorch levels, autocast, default devices. ``real_mode`` takes all of that away for a while, on
this thread only, and puts it back. The private parts of torch that it needs stand in this file
alone.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

try:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes
except ImportError as error:  # pragma: no cover - a torch that moved them
    raise ImportError(
        f"fxremat needs torch 2.11 or newer, in which these exist; this is {torch.__version__}:"
        f" {error}"
    ) from error


@contextmanager
def real_mode() -> Iterator[None]:
    """Make torch run what it is told: no modes, no autocast, no gradients, no functorch levels."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(torch._C.DisableTorchFunction())
        for device_type in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(torch.no_grad())
        yield
