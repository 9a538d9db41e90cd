"""Programs of many kinds keep every bit under every budget; their floors are exact.

A few of each kind belong to the usual run of the suite, the rest is slow.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import kinds_dyn, kinds_grad, kinds_hooks, kinds_io, kinds_mem, kinds_param, kinds_real
from tests.kinds import Kind, hold

QUICK_ONES = (
    kinds_dyn.layers_freeze_and_thaw,
    kinds_grad.gradients_of_inputs_only, kinds_grad.adversaries, kinds_hooks.hooks_on_tensors,
    kinds_grad.accumulated_and_freed, kinds_io.dataclass_output, kinds_io.parameter_as_output,
    kinds_io.same_tensor_passed_twice, kinds_io.views_of_one_output, kinds_io.complex_output,
    kinds_mem.one_value_dwarfs_the_rest, kinds_mem.zero_bytes, kinds_mem.outputs_are_released,
    kinds_param.parameters_in_one_flat_buffer, kinds_param.no_parameters,
)  # fmt: skip
FILES: tuple[Any, ...] = (
    kinds_dyn, kinds_grad, kinds_hooks, kinds_io, kinds_mem, kinds_param, kinds_real,
)  # fmt: skip


def cases() -> list[Any]:
    """Every kind, the slow ones marked."""
    found = [(file, make) for file in FILES for make in file.CASES]
    return [
        pytest.param(
            make,
            id=f"{file.__name__.rpartition('_')[2]}-{make.__name__}",
            marks=() if make in QUICK_ONES else pytest.mark.slow,
        )
        for file, make in found
    ]


@pytest.mark.parametrize("make", cases())
def test_no_budget_changes_a_bit(make: Callable[[], Kind]) -> None:
    torch._dynamo.reset()
    hold(make)
