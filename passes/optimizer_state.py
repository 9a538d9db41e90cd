"""Bytes of an optimizer's state, before the optimizer has made it."""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fxremat.errors import OptionError
from fxremat.passes.realmode import real_mode
from fxremat.passes.storages import round_up


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What an optimizer holds from its first step on.

    Args:
        optimizer: Any optimizer; a state that exists is counted, one that does not is found by a
            step of a copy on fake tensors.

    Returns:
        Bytes on the devices of the parameters. [bytes]

    Raises:
        OptionError: The copy could not take a step.
    """
    if optimizer.state:
        return _tensor_bytes(optimizer.state)
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    try:
        with real_mode(), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
            twin.param_groups = [
                {**group, "params": [_fake(mode, p) for p in group["params"]]}
                for group in optimizer.param_groups
            ]
            twin.step()
    except Exception as error:  # why: user code of any kind runs here
        raise OptionError(
            f"the state of {type(optimizer).__name__} could not be found without running it "
            f"({error}). "
            "Give its bytes: reserve='2GiB'.",
            "reserve",
            optimizer,
        ) from error
    return _tensor_bytes(twin.state)


def _fake(mode: FakeTensorMode, parameter: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_strided(
        parameter.size(), parameter.stride(), dtype=parameter.dtype, device=parameter.device
    ).requires_grad_(parameter.requires_grad)
    if parameter.requires_grad:
        fake.grad = torch.empty_like(fake)
    return fake


def _tensor_bytes(state: Any) -> int:
    sizes: dict[int, int] = {}
    for leaf in pytree.tree_leaves(dict(state)):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            storage = leaf.untyped_storage()
            sizes[storage._cdata] = round_up(storage.nbytes(), leaf.device)
    return sum(sizes.values())
