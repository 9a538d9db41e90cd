"""What DistributedDataParallel holds around a module, and why it goes outside.

Its reducer copies gradients into buckets: as many bytes as the parameters that it reduces, kept
from its making on. Private to torch: ``_active_ddp_module``, which is set while its forward runs.
"""

import torch

from fxremat.passes.storages import round_up

HINT = (
    "DistributedDataParallel cannot be traced whole. Put it outside: "
    "DistributedDataParallel(fxremat.optimize(module, budget)), where the module may return the "
    "loss itself."
)


def is_ddp(target: object) -> bool:
    """Is it a DistributedDataParallel?"""
    if not torch.distributed.is_available():
        return False
    from torch.nn.parallel import DistributedDataParallel

    return isinstance(target, DistributedDataParallel)


def bucket_bytes() -> int:
    """What the DistributedDataParallel holds whose forward runs now; 0 outside of one. [bytes]

    Its buckets, and the copy of the buffers that rank 0 sends before the forward: the thread that
    receives it may hold it for a while.
    """
    if not torch.distributed.is_available():
        return 0
    from torch.nn.parallel import DistributedDataParallel

    active = DistributedDataParallel._active_ddp_module
    if active is None:
        return 0
    found: list[torch.Tensor] = [*active._module_parameters]
    if active.broadcast_buffers:
        found += active.module.buffers()
    return sum(round_up(p.numel() * p.element_size(), p.device) for p in found)
