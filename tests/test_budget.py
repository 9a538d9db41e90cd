"""Every spelling of a budget, and the words for those that are none."""

import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.budget import Budget, format_bytes, parse_budget, parse_bytes
from fxremat.errors import BudgetError, FxrematError, OptionError


@pytest.mark.parametrize(
    ("budget", "size_bytes"),
    [
        (1, 1),
        (np.int64(7), 7),
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("  3 kib ", 3072),
        ("3kB", 3000),
        ("3KB", 3000),
        (".5 MiB", 2**19),
        ("2TiB", 2**41),
        ("17 B", 17),
        ("17 bytes", 17),
        ("1 byte", 1),
        ("1,310,720 bytes", 1_310_720),
        ("1_000", 1000),
        ("1048576", 2**20),
        ("0.0001KiB", 0),
    ],
)
def test_reads_bytes(budget: object, size_bytes: int) -> None:
    assert parse_bytes(budget, "reserve") == size_bytes
    assert parse_budget(budget) == Budget(size_bytes) if size_bytes else True


@pytest.mark.parametrize(
    ("budget", "size_bytes"),
    [("60%", 606), ("100 %", 1011), ("33.3%", 336), ("150%", 1516), ("0.1%", 1)],
)
def test_reads_shares_of_the_baseline_exactly(budget: str, size_bytes: int) -> None:
    assert parse_budget(budget).resolve(1011) == size_bytes


def test_bytes_do_not_depend_on_the_baseline() -> None:
    assert parse_budget("1KiB").resolve(10) == 1024
    assert parse_budget(Budget(5)) == Budget(5)


ZEROS = (0, "0", "0GiB", "0%", "0.0001KiB")
TEXTS = ("", " ", "-8GiB", "GiB", "8 GiBs", "8QB", "nan", "inf", "1e9", "8GiB 3", "1__0", "1.5 B")
AMBIGUOUS = ("1,5GiB", "1,500GiB", "10,00", "0.6", "8G", 0.6, 8.0)
OTHERS: tuple[object, ...] = (
    True,
    False,
    -1,
    None,
    [],
    b"8GiB",
    Decimal(8),
    3 + 0j,
    math.nan,
    math.inf,
    -0.5,
)


@pytest.mark.parametrize("budget", [*ZEROS, *TEXTS, *AMBIGUOUS, *OTHERS])
def test_refuses(budget: object) -> None:
    with pytest.raises(BudgetError, match="budget ") as caught:
        parse_budget(budget)
    assert isinstance(caught.value, FxrematError)
    assert caught.value.budget is budget


@pytest.mark.parametrize(
    ("budget", "spellings"),
    [
        (0.6, ('"60%"', '"0.6GiB"')),
        (1.0, ('"100%"', '"1GiB"')),
        (8.0, ('"8GiB"', "8 for that many bytes")),
        (2.0**30, ("1073741824 for that many bytes", '"1024MiB"')),
        (np.float32(0.5), ('"50%"', '"0.5GiB"')),
        ("0.6", ('"60%"', '"0.6GiB"')),
        ("8G", ('"8GiB"', '"8GB"')),
        ("8k", ('"8KiB"', '"8kB"')),
    ],
)
def test_names_both_spellings_that_may_have_been_meant(
    budget: object, spellings: tuple[str, str]
) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget(budget)
    assert all(spelling in str(caught.value) for spelling in spellings)


def test_every_spelling_in_a_refusal_can_be_read() -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget("many")
    for spelling in ("8GiB", "8GB", "512 MiB", "60%"):
        assert f'"{spelling}"' in str(caught.value)
        assert parse_budget(spelling).resolve(100) > 0


@pytest.mark.parametrize("value", [-1, True, 0.5, "60%", "much", None])
def test_other_bytes_are_refused_with_the_name_of_the_option(value: object) -> None:
    with pytest.raises(OptionError, match="reserve") as caught:
        parse_bytes(value, "reserve")
    assert caught.value.option == "reserve"
    assert caught.value.value is value


def test_other_bytes_may_be_0() -> None:
    assert parse_bytes(0, "reserve") == parse_bytes("0 MiB", "reserve") == 0


def test_a_budget_is_one_of_two_things() -> None:
    with pytest.raises(ValueError, match="either"):
        Budget()


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1024, "1.0 KiB"),
        (608_640_000, "580.4 MiB"),
        (2**20 - 1, "1.0 MiB"),
        (8 * 2**30, "8.00 GiB"),
        (2**50, "1024.00 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_writes_bytes_for_people(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(min_value=1, max_value=2**60))
def test_reads_exactly_what_it_writes_exactly(size_bytes: int) -> None:
    assert parse_budget(format_bytes(size_bytes, exact=True)).resolve(0) == size_bytes


@given(st.integers(min_value=1, max_value=2**60))
def test_reads_about_what_it_writes_for_people(size_bytes: int) -> None:
    assert parse_budget(format_bytes(size_bytes)).resolve(0) == pytest.approx(size_bytes, rel=0.05)
