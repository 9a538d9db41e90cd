"""Numbers that a linear solver can work with, rounded to the safe side."""

from dataclasses import dataclass

from fxremat.problem import RematProblem


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers that a solver can work with.

    Attributes:
        unit_bytes: One unit of bytes. [bytes]
        grain_bytes: Sizes are rounded up, the budget down, to a multiple of it. [bytes]
        unit_ns: One unit of time. [ns]
    """

    unit_bytes: int
    grain_bytes: int
    unit_ns: float

    def up(self, size_bytes: int) -> float:
        """Bytes in units, rounded up."""
        return -(-size_bytes // self.grain_bytes) * self.grain_bytes / self.unit_bytes

    def down(self, size_bytes: int) -> float:
        """Bytes in units, rounded down."""
        return size_bytes // self.grain_bytes * self.grain_bytes / self.unit_bytes


def scale_of(problem: RematProblem, budget_bytes: int) -> Scale:
    """Units in which a budget is about a thousand and all replays together cost a thousand."""
    unit_bytes = 1 << max(0, budget_bytes.bit_length() - 10)
    total_ns = sum(replay.cost_ns for replay in problem.replays)
    return Scale(unit_bytes, max(1, unit_bytes // 4096), max(1, total_ns) / 1000)
