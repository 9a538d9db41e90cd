"""A linear or 0/1 program in plain numbers, solved by HiGHS through OR-Tools MathOpt.

Variables and rows are numbered from 0. The program is collected in lists and handed to MathOpt as
one message (``highs``): building it object by object took longer than solving it. HiGHS rejects
``threads``; ``node_limit`` and the seed make a search repeat exactly.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from ortools.math_opt import model_pb2, parameters_pb2

from fxremat.solvers.highs import Answer, run_highs

Term = tuple[int, float]  # a variable and its factor


class LinearProgram:
    """Minimise a sum of variables under rows; bounds can change between solves."""

    def __init__(self) -> None:
        self._low: list[float] = []
        self._high: list[float] = []
        self._whole: list[bool] = []
        self._factor: dict[int, float] = {}
        self._offset = 0.0
        self._row_low: list[float] = []
        self._row_high: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._coefficients: list[float] = []
        self._model: model_pb2.ModelProto | None = None

    def variable(self, low: float = 0.0, high: float = 1.0, *, whole: bool = False) -> int:
        """A new variable, 0/1 when ``whole``."""
        self._low.append(low)
        self._high.append(high)
        self._whole.append(whole)
        return len(self._low) - 1

    def row(self, low: float, high: float, terms: Iterable[Term]) -> int:
        """Require low <= sum of terms <= high; a variable may occur several times."""
        total: dict[int, float] = {}
        for variable, factor in terms:
            total[variable] = total.get(variable, 0.0) + factor
        number = len(self._row_low)
        for variable in sorted(total):
            if total[variable]:
                self._rows.append(number)
                self._columns.append(variable)
                self._coefficients.append(total[variable])
        self._row_low.append(low)
        self._row_high.append(high)
        return number

    def at_least(self, low: float, terms: Iterable[Term]) -> int:
        """Sum of terms >= low."""
        return self.row(low, math.inf, terms)

    def at_most(self, high: float, terms: Iterable[Term]) -> int:
        """Sum of terms <= high."""
        return self.row(-math.inf, high, terms)

    def cost(self, terms: Iterable[Term], offset: float = 0.0) -> None:
        """Add to the objective."""
        for variable, factor in terms:
            self._factor[variable] = self._factor.get(variable, 0.0) + factor
        self._offset += offset

    def cap(self, row: int, high: float) -> None:
        """Change the upper bound of a row."""
        self._row_high[row] = high
        if self._model is not None:
            self._model.linear_constraints.upper_bounds[row] = high

    def bound(self, variable: int, low: float, high: float) -> None:
        """Change the bounds of a variable."""
        self._low[variable], self._high[variable] = low, high
        if self._model is not None:
            self._model.variables.lower_bounds[variable] = low
            self._model.variables.upper_bounds[variable] = high

    def _built(self, *, whole: bool) -> model_pb2.ModelProto:
        """The program as MathOpt has it; built once, then edited.

        Args:
            whole: With its 0/1 variables, otherwise with all of them continuous.
        """
        if self._model is None:
            proto = model_pb2.ModelProto()
            proto.variables.ids.extend(range(len(self._low)))
            proto.variables.lower_bounds.extend(self._low)
            proto.variables.upper_bounds.extend(self._high)
            costs = sorted(self._factor.items())
            proto.objective.offset = self._offset
            proto.objective.linear_coefficients.ids.extend(v for v, _ in costs)
            proto.objective.linear_coefficients.values.extend(factor for _, factor in costs)
            proto.linear_constraints.ids.extend(range(len(self._row_low)))
            proto.linear_constraints.lower_bounds.extend(self._row_low)
            proto.linear_constraints.upper_bounds.extend(self._row_high)
            proto.linear_constraint_matrix.row_ids.extend(self._rows)
            proto.linear_constraint_matrix.column_ids.extend(self._columns)
            proto.linear_constraint_matrix.coefficients.extend(self._coefficients)
            self._rows, self._columns, self._coefficients = [], [], []
            self._model = proto
        del self._model.variables.integers[:]
        self._model.variables.integers.extend(self._whole if whole else [False] * len(self._whole))
        return self._model

    def relax(self, wanted: Sequence[int], *, time_limit_s: float) -> Answer | None:
        """Solve it with all variables continuous.

        Args:
            wanted: Variables whose values are needed.
            time_limit_s: A safety net. [s]

        Returns:
            The answer; None when there is none.
        """
        return self._solve(parameters_pb2.SolveParametersProto(), wanted, {}, time_limit_s)

    def solve(
        self,
        wanted: Sequence[int],
        *,
        time_limit_s: float,
        node_limit: int,
        relative_gap: float,
        hint: Mapping[int, float],
    ) -> Answer | None:
        """Branch and bound.

        Args:
            wanted: Variables whose values are needed.
            time_limit_s: A safety net; ``node_limit`` is what ends a long search. [s]
            node_limit: Nodes of branch and bound.
            relative_gap: Where to stop.
            hint: Values of variables in a known solution.

        Returns:
            The best answer found; None when there is none.
        """
        parameters = parameters_pb2.SolveParametersProto(
            node_limit=node_limit, relative_gap_tolerance=relative_gap, random_seed=0
        )
        return self._solve(parameters, wanted, hint, time_limit_s, whole=True)

    def _solve(
        self,
        parameters: parameters_pb2.SolveParametersProto,
        wanted: Sequence[int],
        hint: Mapping[int, float],
        time_limit_s: float,
        *,
        whole: bool = False,
    ) -> Answer | None:
        """Run HiGHS."""
        model = self._built(whole=whole)
        return run_highs(model, parameters, wanted, hint, time_limit_s)
