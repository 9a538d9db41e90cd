"""Reads what people write for a number of bytes, and writes numbers of bytes for people.

KiB, MiB, GiB and TiB are powers of 1,024; kB, MB, GB and TB are powers of 1,000. A percentage is
of the predicted peak with everything saved. Text is read here, once; the rest speaks of ``int``.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real

from fxremat.errors import BudgetError, OptionError

_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("ib", 1024), ("b", 1000))
    for power, prefix in enumerate("kmgt", start=1)
}
_TEXT = re.compile(
    r"(?P<number>[0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)\s*(?P<unit>[a-z]*|%)", re.I | re.A
)
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+", re.A)
_ABSOLUTE = '8589934592, "8GiB", "8GB" or "512 MiB"'
_SPELLINGS = '8589934592, "8GiB", "8GB", "512 MiB" or "60%"'


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget as it was asked for; exactly one of the two is given.

    Attributes:
        bytes_: An absolute number of bytes, resident bytes included. [bytes]
        fraction: A share of the baseline peak.
    """

    bytes_: int | None = None
    fraction: Fraction | None = None

    def __post_init__(self) -> None:
        if (self.bytes_ is None) == (self.fraction is None):
            raise ValueError("a budget is either a number of bytes or a share of the baseline")

    def resolve(self, baseline_peak_bytes: int) -> int:
        """The budget as a number of bytes.

        Args:
            baseline_peak_bytes: Predicted peak with everything saved, with resident. [bytes]

        Returns:
            The budget, rounded down. [bytes]
        """
        if self.bytes_ is not None:
            return self.bytes_
        assert self.fraction is not None  # by __post_init__
        return math.floor(self.fraction * baseline_peak_bytes)


def parse_budget(budget: object) -> Budget:
    """Read a budget.

    Args:
        budget: An ``int`` above 0, text such as ``"8GiB"``, ``"8GB"``, ``"512 MiB"``, or ``"60%"``
            of the baseline peak. A float is refused: 0.6 and 8.0 leave open what was meant.

    Returns:
        The budget.

    Raises:
        BudgetError: It cannot be read, or is not above 0.

    >>> parse_budget("512 MiB").resolve(0)
    536870912
    >>> parse_budget("60%").resolve(1000)
    600
    """
    if isinstance(budget, Budget):
        return budget
    found = _read(budget)
    if isinstance(found, str):
        raise BudgetError(f"budget {budget!r} {found}", budget)
    if (found.bytes_ if found.bytes_ is not None else found.fraction) == 0:
        raise BudgetError(f"budget {budget!r} is 0: write it as {_SPELLINGS}.", budget)
    return found


def parse_bytes(value: object, option: str) -> int:
    """Read a number of bytes that is no budget, such as ``reserve``; 0 is allowed.

    Args:
        value: An ``int`` of at least 0, or text such as ``"8GiB"``; no percentage.
        option: Name of the option, for the message.

    Returns:
        The number of bytes. [bytes]

    Raises:
        OptionError: It cannot be read, or is negative.
    """
    found = _read(value)
    if isinstance(found, Budget) and found.bytes_ is None:
        found = 'is a percentage; only a budget can be one: write bytes, such as "512 MiB".'
    if isinstance(found, str):
        found = found.replace(_SPELLINGS, _ABSOLUTE)
        raise OptionError(f"{option} {value!r} {found}", option, value)
    assert found.bytes_ is not None  # a percentage was refused above
    return found.bytes_


def format_bytes(size_bytes: int, *, exact: bool = False) -> str:
    """A number of bytes for people.

    Args:
        size_bytes: The number. [bytes]
        exact: All digits instead of three or four of them.

    >>> format_bytes(8 * 2**30), format_bytes(608_600_000), format_bytes(1_048_576, exact=True)
    ('8.00 GiB', '580.4 MiB', '1,048,576 bytes')
    """
    if exact or abs(size_bytes) < 1024:
        return f"{size_bytes:,} {'byte' if abs(size_bytes) == 1 else 'bytes'}"
    for unit, power in (("KiB", 1), ("MiB", 2), ("GiB", 3), ("TiB", 4)):
        scaled = size_bytes / 1024**power
        if abs(scaled) < 999.95 or unit == "TiB":  # above, one digit behind the point shows 1000.0
            break
    return f"{scaled:.{2 if unit in ('GiB', 'TiB') else 1}f} {unit}"


def _read(value: object) -> Budget | str:
    """The value, or what is wrong with it, as the rest of a sentence."""
    if isinstance(value, bool):
        return f"is a bool: write bytes as {_SPELLINGS}."
    if isinstance(value, Integral):
        number = int(value)
        return Budget(number) if number >= 0 else f"is negative: write it as {_SPELLINGS}."
    if isinstance(value, Real):
        return _refuse_float(float(value))
    if isinstance(value, str):
        return _read_text(value.strip())
    return f"is a {type(value).__name__}: write it as {_SPELLINGS}."


def _read_text(text: str) -> Budget | str:
    """Text with a unit, a percentage, or digits alone."""
    match = _TEXT.fullmatch(text)
    if match is None:
        return f"cannot be read: write it as {_SPELLINGS}."
    digits, unit = match["number"], match["unit"].lower()
    scale = _UNITS.get(unit)
    if "," in digits:
        # "1,500GiB" may mean 1.5 of them; "1,500 bytes" can mean one thing only.
        if scale != 1 or not _GROUPED.fullmatch(digits):
            return f"has a comma: write it as {_SPELLINGS}."
        digits = digits.replace(",", "")
    try:
        number = Fraction(digits)
    except ValueError:  # misplaced underscores
        return f"cannot be read: write it as {_SPELLINGS}."
    if unit == "%":
        return Budget(fraction=number / 100)
    if scale is None:
        if unit in ("k", "m", "g", "t"):
            big = "K" if unit == "k" else unit.upper()
            small = "k" if unit == "k" else big
            spellings = f'"{digits}{big}iB" (powers of 1,024) or "{digits}{small}B"'
            return f"may mean two things: write {spellings}."
        return f"has no unit that is known: write it as {_SPELLINGS}."
    if unit == "" and number.denominator != 1:
        return _refuse_float(float(number))
    if scale == 1 and number.denominator != 1:
        return "is no whole number of bytes."
    return Budget(math.floor(number * scale))


def _refuse_float(number: float) -> str:
    """The two spellings that may have been meant."""
    if not math.isfinite(number) or number < 0:
        return f"is no number of bytes: write it as {_SPELLINGS}."
    if number <= 1:
        first, second = f'"{100 * number:.6g}%" of the baseline peak', f'"{number:g}GiB"'
    elif number < 2**20:
        first, second = f'"{number:g}GiB"', f"{round(number)} for that many bytes"
    else:
        first, second = f"{round(number)} for that many bytes", f'"{number / 2**20:.6g}MiB"'
    return f"is a float, which may mean two things: write {first}, or {second}."
