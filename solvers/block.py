"""What per-block checkpointing does: keep the inputs of each block, replay its inside.

Blocks are the repeated children of a ModuleList or Sequential: operations whose module path has a
number in it (``transformer.h.3.attn`` belongs to ``transformer.h.3``). What runs outside blocks is
saved as usual. A model without such paths is cut at about sqrt(n) of its articulation storages, the
values that every path through the forward passes (https://arxiv.org/abs/1604.06174).
"""

import math

import networkx as nx

from fxremat.plans import Solution
from fxremat.problem import Kind, RematProblem
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
    cuts = _cuts(problem)
    keys, number = [], 0
    for index in range(problem.num_forward):
        keys.append(f"cut {number}")
        if index in cuts:
            number += 1
    return keys


def _cuts(problem: RematProblem) -> frozenset[int]:
    """About sqrt(n) operations that make an articulation storage, evenly spread."""
    graph: nx.Graph = nx.Graph()
    for index, operation in enumerate(problem.forward):
        graph.add_edges_from((("operation", index), ("storage", g)) for g in operation.creates)
        graph.add_edges_from(
            (("operation", index), ("storage", g))
            for g in operation.reads
            if problem.storages[g].kind is Kind.VALUE
        )
    found = sorted(
        {
            problem.storages[g].producer
            for what, g in nx.articulation_points(graph)
            if what == "storage"
        }
    )
    wanted = min(len(found), math.isqrt(problem.num_forward))
    if not wanted:
        return frozenset()
    return frozenset(found[(2 * i + 1) * len(found) // (2 * wanted)] for i in range(wanted))


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
