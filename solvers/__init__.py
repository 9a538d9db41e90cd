"""All solvers, under the names that ``solver=`` takes."""

from fxremat.plans import Solver
from fxremat.solvers.block import block
from fxremat.solvers.exhaustive import exhaustive
from fxremat.solvers.greedy import greedy
from fxremat.solvers.knapsack import knapsack
from fxremat.solvers.recompute_all import recompute_all
from fxremat.solvers.refine import refine
from fxremat.solvers.revolve import halving, revolve
from fxremat.solvers.rotor import rotor
from fxremat.solvers.save_all import save_all
from fxremat.solvers.sqrt import sqrt

SOLVERS: dict[str, Solver] = {
    "ilp": refine,
    "save_all": save_all,
    "recompute_all": recompute_all,
    "block": block,
    "greedy": greedy,
    "sqrt": sqrt,
    "halving": halving,
    "revolve": revolve,
    "rotor": rotor,
    "knapsack": knapsack,
    "exhaustive": exhaustive,
}

__all__ = ["SOLVERS"]
