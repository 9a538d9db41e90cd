"""Errors that fxremat raises.

Each keeps the numbers it speaks of as attributes, so that a caller can react without reading text:
what failed, where, both numbers, one remedy.
"""


class FxrematError(Exception):
    """Base of every error that fxremat raises on purpose."""


class BudgetError(FxrematError, ValueError):
    """A budget that cannot be read as a number of bytes.

    Attributes:
        budget: What was given.
    """

    def __init__(self, message: str, budget: object = None) -> None:
        super().__init__(message)
        self.budget = budget


class OptionError(FxrematError, ValueError):
    """An option, a solver or a key that does not exist; lists those that do.

    Attributes:
        option: Name of the option.
        value: What was given.
        known: The names that exist.
    """

    def __init__(
        self, message: str, option: str = "", value: object = None, known: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.option = option
        self.value = value
        self.known = known


class InfeasibleBudgetError(FxrematError):
    """No plan that fxremat can make stays within the budget.

    Attributes:
        budget_bytes: The budget, resident bytes included. [bytes]
        floor_bytes: The least budget that works. [bytes]
    """

    def __init__(self, message: str, budget_bytes: int, floor_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes


class CaptureError(FxrematError):
    """The model could not be traced to one graph: a graph break or a failed trace."""


class UnsupportedGraphError(FxrematError):
    """The graph holds something that cannot be planned.

    Attributes:
        node: Name of the fx node.
        operator: Its operator.
        source: The user's line, if known.
    """

    def __init__(self, message: str, node: str = "", operator: str = "", source: str = "") -> None:
        super().__init__(message)
        self.node = node
        self.operator = operator
        self.source = source


class SolverError(FxrematError):
    """A solver returned something that its own contract rules out."""


class VerificationError(FxrematError):
    """The rewritten step differs from the unrewritten one; one subclass per rule.

    Attributes:
        rule: Short name of the rule that was broken.
        details: What differed, a line for each value.
    """

    rule = "verification"

    def __init__(self, message: str, details: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.details = details


class OutputsDifferError(VerificationError):
    """An output differs: its bits, type, strides, need of a gradient, what shares its memory.

    So does the structure that the outputs come in.
    """

    rule = "outputs"


class GradientsDifferError(VerificationError):
    """A gradient differs in the same ways, is missing or is one too many."""

    rule = "gradients"


class BuffersDifferError(VerificationError):
    """A buffer differs after the step."""

    rule = "buffers"


class InputsDifferError(VerificationError):
    """An argument was changed otherwise than by the unrewritten step."""

    rule = "inputs"


class RandomStateDiffersError(VerificationError):
    """A generator is in another state after the step."""

    rule = "random state"


class OverBudgetError(VerificationError):
    """The measured peak is above the budget.

    Attributes:
        measured_bytes: What the allocator held. [bytes]
        budget_bytes: What was allowed. [bytes]
    """

    rule = "budget"

    def __init__(self, message: str, measured_bytes: int = 0, budget_bytes: int = 0) -> None:
        super().__init__(message)
        self.measured_bytes = measured_bytes
        self.budget_bytes = budget_bytes


class PeakDiffersError(VerificationError):
    """The step held, or left behind, more than the plan says, though not more than the budget.

    Attributes:
        measured_bytes: What the allocator held. [bytes]
        predicted_bytes: What the plan says. [bytes]
    """

    rule = "peak"

    def __init__(self, message: str, measured_bytes: int = 0, predicted_bytes: int = 0) -> None:
        super().__init__(message)
        self.measured_bytes = measured_bytes
        self.predicted_bytes = predicted_bytes


class StepFailsError(VerificationError):
    """The planned step raises, and the unrewritten one does not; the cause is chained."""

    rule = "step"
