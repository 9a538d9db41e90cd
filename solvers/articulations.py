"""Articulation storages: values that every path through the forward passes."""

import math

import networkx as nx

from fxremat.problem import Kind, RematProblem


def articulations(problem: RematProblem) -> tuple[int, ...]:
    """Values without which the graph of the forward falls apart, in order."""
    graph: nx.Graph = nx.Graph()
    for index, operation in enumerate(problem.forward):
        graph.add_edges_from((("operation", index), ("storage", g)) for g in operation.creates)
        graph.add_edges_from(
            (("operation", index), ("storage", g))
            for g in operation.reads
            if problem.storages[g].kind is Kind.VALUE
        )
    points = nx.articulation_points(graph)
    return tuple(sorted(g for what, g in points if what == "storage"))


def spread(problem: RematProblem) -> frozenset[int]:
    """About sqrt(n) operations that make an articulation storage, evenly spread."""
    found = sorted({problem.storages[g].producer for g in articulations(problem)})
    wanted = min(len(found), math.isqrt(problem.num_forward))
    if not wanted:
        return frozenset()
    return frozenset(found[(2 * i + 1) * len(found) // (2 * wanted)] for i in range(wanted))
