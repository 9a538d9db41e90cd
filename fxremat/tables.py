"""Numbers and rows for people: what reports and the command line print."""

import re
from collections.abc import Sequence

from tabulate import tabulate

from fxremat.budget import format_bytes
from fxremat.decisions import Decision

DECISION_HEADERS = ("module", "operator", "values", "freed", "cost")
_MOST_ROWS = 20  # of what is recomputed; the rest is added up in one row


def table(rows: Sequence[Sequence[object]], headers: Sequence[str] = ()) -> str:
    """Rows as text; a cell that looks like a number stays as it is written."""
    style = "simple" if headers else "plain"
    return str(tabulate(rows, headers, tablefmt=style, disable_numparse=True))


def format_cost(cost_ns: int, costs: str = "measured") -> str:
    """A cost for people: a time, or calls where every call counts 1 (``costs="uniform"``)."""
    if costs == "uniform":
        return f"{cost_ns:,} {'call' if abs(cost_ns) == 1 else 'calls'}"
    for unit, scale in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if abs(cost_ns) >= scale:
            return (
                f"{cost_ns / scale:.3g} {unit}"
                if abs(cost_ns) < 100 * scale
                else (f"{cost_ns / scale:,.0f} {unit}")
            )
    return f"{cost_ns} ns"


def fold_indices(module: str) -> str:
    """``transformer.h.3.mlp`` -> ``transformer.h.*.mlp``."""
    return re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", module)


def decision_rows(rows: Sequence[Decision], costs: str) -> list[tuple[str, str, int, str, str]]:
    """Recomputed values by folded module and operator, most expensive first.

    Returns:
        Module, operator, number of values, bytes freed and cost, the last two for people.
    """
    groups: dict[tuple[str, str], list[Decision]] = {}
    for row in rows:
        if row.decision == "recompute":
            groups.setdefault((fold_indices(row.module), row.operator), []).append(row)
    ranked = sorted(groups.items(), key=lambda item: -sum(row.cost_ns for row in item[1]))
    if len(ranked) > _MOST_ROWS:
        rest = [row for _, group in ranked[_MOST_ROWS - 1 :] for row in group]
        ranked[_MOST_ROWS - 1 :] = [(("others", ""), rest)]
    return [
        (
            module,
            operator,
            len(group),
            format_bytes(sum(row.freed_bytes for row in group)),
            format_cost(sum(row.cost_ns for row in group), costs),
        )
        for (module, operator), group in ranked
    ]
