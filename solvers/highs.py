"""The one place that calls HiGHS, by OR-Tools' own messages.

``mathopt.solve`` turns the answer into Python objects, the basis with an object for each variable
and row: a fifth of the time of a relaxation that is solved in a second. What it calls with the same
messages is called here directly. That entry is not documented; where a release of OR-Tools moves
it, the import below says so.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ortools.math_opt import (
    callback_pb2,
    model_parameters_pb2,
    model_pb2,
    parameters_pb2,
    result_pb2,
    sparse_containers_pb2,
)
from pybind11_abseil.status import StatusNotOk

from fxremat.errors import SolverError

try:
    from ortools.math_opt.core.python import solver as _core
except ImportError as error:  # pragma: no cover
    raise SolverError(
        f"this release of ortools has no ortools.math_opt.core.python.solver ({error}): install "
        "ortools 9.15, which fxremat is tested with"
    ) from error

_ENDED = result_pb2.TerminationReasonProto
_NOTHING = (
    _ENDED.TERMINATION_REASON_INFEASIBLE,
    _ENDED.TERMINATION_REASON_INFEASIBLE_OR_UNBOUNDED,
    _ENDED.TERMINATION_REASON_NO_SOLUTION_FOUND,
)
_FOUND = (_ENDED.TERMINATION_REASON_OPTIMAL, _ENDED.TERMINATION_REASON_FEASIBLE)
_LEAST_S = 0.01  # a limit of 0 would mean none
_MOST_S = 1e9  # and a message holds no more than ten thousand years


class Answer(NamedTuple):
    """What HiGHS found.

    Attributes:
        values: Values of the variables that were asked for.
        bound: No solution is below it.
        optimal: It was solved to the end.
    """

    values: Mapping[int, float]
    bound: float
    optimal: bool


def run_highs(
    model: model_pb2.ModelProto,
    parameters: parameters_pb2.SolveParametersProto,
    wanted: Sequence[int],
    hint: Mapping[int, float],
    time_limit_s: float,
) -> Answer | None:
    """Solve a program.

    Args:
        model: It.
        parameters: How to search; the time limit is set here.
        wanted: Variables whose values are needed.
        hint: Values of variables in a known solution.
        time_limit_s: A safety net. [s]

    Returns:
        The answer; None when there is none.

    Raises:
        SolverError: HiGHS failed.
    """
    limit_s = min(max(_LEAST_S, time_limit_s), _MOST_S)
    parameters.time_limit.FromNanoseconds(int(limit_s * 1e9))
    try:
        result = _core.solve(
            model,
            parameters_pb2.SOLVER_TYPE_HIGHS,
            parameters_pb2.SolverInitializerProto(),
            parameters,
            _asked(wanted, hint),
            None,
            callback_pb2.CallbackRegistrationProto(),
            None,
            None,
        )
    except StatusNotOk as error:
        raise SolverError(f"HiGHS failed: {error}") from error
    ended = result.termination
    if ended.reason in _NOTHING:
        return None
    if ended.reason not in _FOUND:
        raise SolverError(f"HiGHS ended with {_ENDED.Name(ended.reason)}: {ended.detail}")
    if not result.solutions:
        return None
    values = result.solutions[0].primal_solution.variable_values
    return Answer(
        dict(zip(values.ids, values.values, strict=True)),
        ended.objective_bounds.dual_bound,
        ended.reason == _ENDED.TERMINATION_REASON_OPTIMAL,
    )


def _asked(
    wanted: Sequence[int], hint: Mapping[int, float]
) -> model_parameters_pb2.ModelSolveParametersProto:
    """What to answer, and what is known."""
    vectors = sparse_containers_pb2
    known = []
    if hint:
        pairs = sorted(hint.items())
        ids, values = [variable for variable, _ in pairs], [value for _, value in pairs]
        sparse = vectors.SparseDoubleVectorProto(ids=ids, values=values)
        known = [model_parameters_pb2.SolutionHintProto(variable_values=sparse)]
    nothing = vectors.SparseVectorFilterProto(filter_by_ids=True)
    return model_parameters_pb2.ModelSolveParametersProto(
        variable_values_filter=vectors.SparseVectorFilterProto(
            filter_by_ids=True, filtered_ids=sorted(wanted)
        ),
        dual_values_filter=nothing,
        reduced_costs_filter=nothing,
        solution_hints=known,
    )
