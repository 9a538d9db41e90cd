"""The bytes that others hold while a step runs."""

from typing import Any

import torch

from fxremat.budget import parse_bytes
from fxremat.passes.optimizer_state import optimizer_state_bytes


def reserve_bytes(reserve: Any) -> int:
    """What ``reserve=`` stands for.

    Args:
        reserve: Bytes as an ``int`` or text, or an optimizer: the bytes of its state, counted
            before the state exists.

    Returns:
        The bytes. [bytes]
    """
    if isinstance(reserve, torch.optim.Optimizer):
        return optimizer_state_bytes(reserve)
    return parse_bytes(reserve, "reserve")
