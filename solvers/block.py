"""What per-block checkpointing does: keep the inputs of each block, replay its inside.

Blocks are the repeated children of a ModuleList or Sequential: operations whose module path has a
number in it (``transformer.h.3.attn`` belongs to ``transformer.h.3``). What runs outside blocks is
saved as usual. A model without such paths is cut at about sqrt(n) of its articulation storages, the
values that every path through the forward passes (https://arxiv.org/abs/1604.06174).
"""

from fxremat.plans import Solution
from fxremat.problem import RematProblem
from fxremat.solvers.articulations import spread
from fxremat.solvers.needs import find_needs
from fxremat.solvers.single import single


def block_key(module: str) -> str:
    """Path up to its first number, or nothing."""
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ""


def block_choice(problem: RematProblem) -> tuple[int, ...]:
    """Storages that per-block checkpointing keeps.

    Args:
        problem: The step.

    Returns:
        Inputs of blocks and what is made outside of them, in order.
    """
    block = _blocks(problem)
    entering: set[int] = set()
    for index, operation in enumerate(problem.forward):
        for g in operation.reads:
            producer = problem.storages[g].producer
            if producer >= 0 and block[producer] != block[index]:
                entering.add(g)
    return tuple(
        g
        for g in find_needs(problem).candidates
        if not problem.storages[g].lazy
        and (g in entering or not block[problem.storages[g].producer])
    )


def _blocks(problem: RematProblem) -> list[str]:
    """Block of each forward operation; empty outside of blocks."""
    keys = [block_key(operation.module) for operation in problem.forward]
    if len(set(keys) - {""}) > 1:
        return keys
    cuts = spread(problem)
    keys, number = [], 0
    for index in range(problem.num_forward):
        keys.append(f"cut {number}")
        if index in cuts:
            number += 1
    return keys


def block(problem: RematProblem, budget_bytes: int, *, time_limit_s: float) -> Solution:
    """Checkpoint every block.

    Args:
        problem: The step.
        budget_bytes: The budget, resident bytes included. [bytes]
        time_limit_s: Not needed. [s]

    Returns:
        That plan, if it is within the budget.
    """
    del time_limit_s
    return single(problem, budget_bytes, block_choice(problem), "inputs of blocks saved")
