"""What a call is measured by before it runs: pieces, gradients, and forwards that wait."""

from collections.abc import Collection, Sequence
from typing import NoReturn

from fxremat.errors import InfeasibleBudgetError, OverBudgetError
from fxremat.plans import Plan
from fxremat.records import Flight, GraphRecord


def check_pieces(ran: Sequence[GraphRecord]) -> None:
    """Do the pieces that have run, each under a plan of its own, fit together?

    Raises:
        InfeasibleBudgetError: They do not.
    """
    held_bytes, gradient_bytes = 0, sum(r.piece.gradient_bytes for r in ran)
    given_bytes = max(
        record.given_bytes for record in ran
    )  # later pieces know what earlier ones were given
    for each in ran:
        gradient_bytes -= each.piece.gradient_bytes  # those of later pieces, run back before it
        more_bytes = held_bytes + gradient_bytes - each.piece.others_bytes
        more_bytes += given_bytes - each.given_bytes
        if each.differentiated:
            _check_piece(each.plan, each.plan.peak_bytes + more_bytes)
        held_bytes += each.held_bytes


def refuse_another(record: GraphRecord, others: Collection[Flight]) -> NoReturn:
    """Refuse a forward beside others that wait for their backward.

    Raises:
        InfeasibleBudgetError: With the number of them that fits.
    """
    plan, count = record.plan, len(others)
    peak_bytes = record.peak_beside(others)
    held_bytes = sum(flight.held_bytes for flight in others)
    raise InfeasibleBudgetError(
        f"{count} earlier forward{'s wait' if count > 1 else ' waits'} for a backward and "
        f"hold{'' if count > 1 else 's'} {held_bytes:,} bytes: with this one, and the gradients of "
        f"the first to run back, the peak would be {peak_bytes:,} bytes, above the budget of "
        f"{plan.budget_bytes:,} bytes. The plan has room for {record.most_in_flight} at once. "
        "Run their backward first, drop their outputs, or put evaluations "
        f"under torch.no_grad(); where {count + 1} are meant, say in_flight={count + 1}.",
        plan.budget_bytes,
        peak_bytes,
    )


def check_gradients(plan: Plan, more_bytes: int, option: str) -> None:
    """Is there room for gradients that a step finds and its plan does not know?

    Args:
        plan: The step's.
        more_bytes: Of those gradients. [bytes]
        option: What was said of ``gradients``.

    Raises:
        OverBudgetError: There is not.
    """
    peak_bytes = plan.peak_bytes + more_bytes
    if peak_bytes <= plan.budget_bytes:
        return
    cause, remedy = "gradients='freed' left out", "say gradients='auto'"
    if option != "freed":
        cause = "its plan has no room for: of parameters, or of earlier arguments still alive"
        remedy = f"raise the budget to {peak_bytes:,} bytes"
    raise OverBudgetError(
        f"the step begins with {more_bytes:,} bytes of gradients that {cause}; with them its peak "
        f"would be {peak_bytes:,} bytes, above the budget of {plan.budget_bytes:,} bytes. Free "
        f"them (zero_grad(set_to_none=True)), or {remedy}.",
        peak_bytes,
        plan.budget_bytes,
    )


def _check_piece(plan: Plan, peak_bytes: int) -> None:
    if peak_bytes > plan.budget_bytes:
        raise InfeasibleBudgetError(
            f"the pieces between the graph breaks of {plan.problem.name} hold {peak_bytes:,} bytes "
            f"together, more than the budget of {plan.budget_bytes:,} bytes. Raise the budget to "
            f"{peak_bytes:,} bytes, or remove the graph breaks: one graph needs less.",
            plan.budget_bytes,
            peak_bytes,
        )
