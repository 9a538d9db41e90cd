"""Programs of many kinds keep every bit under every budget; their floors are exact.

A few of each kind belong to the usual run of the suite, the rest is slow.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.morekinds import backwards, changing, families, hooks, memory, packing, parameters
from tests.morekinds.program import Kind, hold

QUICK_ONES = (
    changing.empty_batch, backwards.gradients_of_inputs_only, backwards.accumulated_and_freed,
    hooks.hooks_on_tensors, packing.dataclass_output,
    packing.complex_output, memory.one_value_dwarfs_the_rest, memory.zero_bytes,
    memory.outputs_are_released, parameters.parameters_in_one_flat_buffer,
)  # fmt: skip
FILES: tuple[Any, ...] = (
    changing, backwards, hooks, packing, memory, parameters, families,
)  # fmt: skip


def cases() -> list[Any]:
    """Every kind, the slow ones marked."""
    found = [(file, make) for file in FILES for make in file.CASES]
    return [
        pytest.param(
            make,
            id=f"{file.__name__.rpartition('.')[2]}-{make.__name__}",
            marks=() if make in QUICK_ONES else pytest.mark.slow,
        )
        for file, make in found
    ]


@pytest.mark.parametrize("make", cases())
def test_no_budget_changes_a_bit(make: Callable[[], Kind]) -> None:
    torch._dynamo.reset()
    hold(make)
