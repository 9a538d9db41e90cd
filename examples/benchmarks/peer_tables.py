"""The tables of the benchmark."""

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from peer_models import Sizes
from tabulate import tabulate

import fxremat

TARGET = 0.8  # of torch's extra time and cost, at most
SLACK = 0.01  # of a step: the most by which fxremat's extra time may pass torch's at one point
MIB = 1 << 20
HEADERS = ("", "knob", "peak MiB", "step ms", "spread", "extra", "recompute", "bits")
RATIO_HEADERS = (
    "knob",
    "peak MiB",
    "torch extra",
    "fxremat extra",
    "ratio",
    "torch recompute",
    "fxremat recompute",
    "ratio",
    "holds",
)


@dataclass
class Row:
    """One kind of step and what was found about it.

    Attributes:
        name: For people.
        knob: The value of ``activation_memory_budget`` that set its peak.
        tool: "torch" or "fxremat" where both meet at a knob.
        base: The step that its extra time is counted from; None for itself.
        step: Its forward; None where there is no plan.
        peak_bytes: Measured above the start of the step. [bytes]
        budget_bytes: What it was allowed, counted alike. [bytes]
        cost_ns: Cost of its operations under the one table. [ns]
        recompute_ns: That, less that of its base. [ns]
        planned_ns: What the plan says ``recompute_ns`` is. [ns]
        equal: Outputs and gradients are its base's, bit for bit.
        times_s: Of its steps. [s]
        note: What else there is to say.
    """

    name: str
    knob: float | None = None
    tool: str = ""
    base: "Row | None" = None
    step: Callable[[], Any] | None = None
    peak_bytes: int = 0
    budget_bytes: int | None = None
    cost_ns: int | None = None
    recompute_ns: int | None = None
    planned_ns: int | None = None
    equal: bool | None = None
    times_s: tuple[float, ...] = ()
    note: str = ""

    @property
    def step_s(self) -> float:
        """Median time of a step. [s]"""
        return statistics.median(self.times_s)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.times_s) - min(self.times_s)) / self.step_s

    @property
    def extra(self) -> float:
        """Extra time as a share of the base's step: the median of what each round found."""
        if self.base is None:
            return 0.0
        rounds = zip(self.times_s, self.base.times_s, strict=True)
        return statistics.median(mine / base for mine, base in rounds) - 1

    @property
    def recompute(self) -> float:
        """Extra cost as a share of the base's."""
        base_ns = None if self.base is None else self.base.cost_ns
        return 0.0 if not base_ns or self.recompute_ns is None else self.recompute_ns / base_ns


def tables(rows: Sequence[Row], style: str) -> str:
    """All rows, then torch and fxremat at equal peaks, then whether the targets hold."""
    pairs = [
        (theirs, ours)
        for theirs, ours in pairwise(rows)
        if theirs.tool == "torch" and ours.tool == "fxremat"
    ]
    first = [pair for pair in pairs if pair[0].base is rows[0]]
    parts = [
        tabulate(
            [_line(row) for row in rows], headers=HEADERS, tablefmt=style, disable_numparse=True
        ),
        tabulate(
            [_ratios(*pair) for pair in first],
            headers=RATIO_HEADERS,
            tablefmt=style,
            disable_numparse=True,
        ),
        _summary(first, rows),
    ]
    return "\n\n".join(str(part) for part in parts)


def _line(row: Row) -> tuple[str, ...]:
    bits = {None: "", True: "equal", False: "differ"}[row.equal]
    if not row.times_s:
        return row.name, _knob(row), "", "", "", "", "", row.note
    shown_cost = row.recompute_ns is not None and row.base is not None
    return (
        row.name,
        _knob(row),
        f"{row.peak_bytes / MIB:.1f}",
        f"{row.step_s * 1e3:.1f}",
        f"{row.spread:.1%}",
        "" if row.base is None else f"{row.extra:+.1%}",
        f"{row.recompute:+.1%}" if shown_cost else "",
        bits,
    )


def _knob(row: Row) -> str:
    return "" if row.knob is None else f"{row.knob:g}"


def _ratios(theirs: Row, ours: Row) -> tuple[str, ...]:
    peak = f"{theirs.peak_bytes / MIB:.1f}"
    head = (_knob(theirs), peak, f"{theirs.extra:+.1%}")
    if not ours.times_s:
        return (*head, "", "", f"{theirs.recompute:+.1%}", "", "", f"no: {ours.note}")
    return (
        *head,
        f"{ours.extra:+.1%}",
        _ratio(ours.extra, theirs.extra),
        f"{theirs.recompute:+.1%}",
        f"{ours.recompute:+.1%}",
        _ratio(ours.recompute, theirs.recompute),
        "yes" if _holds(theirs, ours) else "no",
    )


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}" if theirs > 0 else "-"


def _holds(theirs: Row, ours: Row) -> bool:
    """Cheaper by the table, not slower by the clock, and no more bytes?"""
    cheaper = ours.recompute <= TARGET * max(theirs.recompute, 0.0)
    return cheaper and ours.extra <= theirs.extra + SLACK and ours.peak_bytes <= theirs.peak_bytes


def _summary(pairs: Sequence[tuple[Row, Row]], rows: Sequence[Row]) -> str:
    """The targets in words."""
    lines = []
    ran = [(theirs, ours) for theirs, ours in pairs if ours.times_s]
    if ran:
        theirs_s = sum(theirs.extra for theirs, _ in ran)
        ours_s = sum(ours.extra for _, ours in ran)
        verdict = "holds" if ours_s <= TARGET * theirs_s else "missed"
        lines.append(
            f"Extra step time summed over {len(ran)} peaks: fxremat {ours_s:.1%}, torch "
            f"{theirs_s:.1%} of a step, ratio {_ratio(ours_s, theirs_s)} (target at most "
            f"{TARGET:.2f}: {verdict})."
        )
        worst = max(ours.extra - theirs.extra for theirs, ours in ran)
        verdict = "holds" if worst <= SLACK else "missed"
        lines.append(
            f"Largest excess over torch at one peak: {worst:+.1%} of a step (target at most "
            f"{SLACK:.0%}: {verdict})."
        )
        share = sum(_holds(theirs, ours) for theirs, ours in pairs)
        lines.append(f"Points at which everything holds: {share} of {len(pairs)}.")
    over = [
        row for row in rows if row.budget_bytes is not None and row.peak_bytes > row.budget_bytes
    ]
    lines += [f"OVER BUDGET: {r.name}: {r.peak_bytes:,} of {r.budget_bytes:,} bytes." for r in over]
    odd = [r for r in rows if (r.planned_ns or 0) < (r.recompute_ns or 0) and r.tool == "fxremat"]
    lines += [
        f"The plan of {r.name} ({_knob(r)}) recomputes for {r.planned_ns:,} ns, its graphs for "
        f"{r.recompute_ns:,} ns."
        for r in odd
    ]
    return "\n".join(lines)


def describe_machine(device: torch.device, repeats: int, sizes: Sizes) -> str:
    """What ran it, in a paragraph."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return (
        f"{name}, {torch.get_num_threads()} threads, {platform.system()}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, fxremat {fxremat.__version__}. "
        f"{sizes.layers} layers, width {sizes.width}, {sizes.batch} x {sizes.tokens} tokens, "
        f"vocabulary {sizes.vocabulary}; medians of {repeats} steps of each kind, taken in turn; "
        "spread is (slowest - fastest) / median; peaks are above parameters and inputs; extra is "
        "the median over the rounds of the step's time over the unrewritten one's in the same "
        "round, less 1; recompute is a share of the unrewritten step's cost."
    )


def _processor() -> str:
    """The processor's name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
