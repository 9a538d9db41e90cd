"""Schedules that replay more than once: counts on chains of steps, and contracts on any graph."""

import pytest

from fxremat.problem import Kind, RematProblem
from fxremat.schedule import Phase, expand
from fxremat.simulate import simulate
from fxremat.solvers.chain import find_chain
from fxremat.solvers.needs import find_needs
from fxremat.solvers.nested import unroll
from fxremat.solvers.revolve import _binomial, binomial_calls, binomial_cut, halving_counts
from fxremat.solvers.rotor import rotor
from tests.chains import STATE_BYTES, calls_of, chain_of_steps
from tests.problems import Tape, transformer

REVOLVE = [
    (10, 3, 15), (25, 3, 65), (50, 5, 122), (100, 5, 316), (100, 10, 222), (250, 10, 672),
    (500, 10, 1636), (1000, 10, 3636), (1000, 20, 2747),
]  # fmt: skip


@pytest.mark.parametrize(("steps", "slots", "calls"), REVOLVE)
def test_binomial_counts(steps: int, slots: int, calls: int) -> None:
    assert binomial_calls(steps, slots) == calls

    def run(steps: int, slots: int) -> int:
        """What the procedure does."""
        total = 0
        stack = [(steps, slots)]
        while stack:
            left, free = stack.pop()
            if left > 1:
                ahead = binomial_cut(left, free)
                total += ahead
                stack += [(left - ahead, free - 1), (ahead, free)]
        return total

    if steps <= 250:
        assert run(steps, slots) == calls


def test_counts_of_plain_schedules() -> None:
    assert binomial_calls(1024, 1) == 523_776
    assert binomial_calls(1024, 1024) == 1023


def test_halving_counts() -> None:
    assert halving_counts(8) == (12, 3)
    assert halving_counts(1024) == (5120, 10)

    def run(start: int, stop: int, kept: int) -> tuple[int, int]:
        """The procedure: calls, and the most states kept at once."""
        if stop - start <= 1:
            return 0, kept
        middle = start + (stop - start) // 2
        calls = middle - start
        later, most = run(middle, stop, kept + 1)
        earlier, less = run(start, middle, kept)
        return calls + later + earlier, max(most, less)

    assert halving_counts(100) == run(0, 100, 0)


@pytest.mark.parametrize(("steps", "slots", "calls"), REVOLVE[:5])
def test_nested_replays_on_a_chain_are_as_few_as_the_binomial_ones(
    steps: int, slots: int, calls: int
) -> None:
    problem = chain_of_steps(steps)
    chain = find_chain(problem)
    assert len(chain) == steps
    schedule = unroll(problem, chain, _binomial, slots)
    assert calls_of(schedule) == calls
    peak_bytes = simulate(problem, schedule).peak_bytes
    assert peak_bytes // STATE_BYTES == slots + 1  # two at work beside those kept
    lingering = unroll(problem, chain, _binomial, slots, linger=True)
    assert simulate(problem, lingering).peak_bytes // STATE_BYTES == slots + 1
    assert calls_of(lingering) <= calls
    found = rotor(problem, peak_bytes + 1, time_limit_s=60.0).schedule  # one gradient more
    assert found is not None
    assert simulate(problem, found).peak_bytes <= peak_bytes + 1
    assert calls_of(found) <= calls


def test_a_value_that_was_let_go_is_replayed_again() -> None:
    problem = chain_of_steps(4)
    one = problem.forward[0].creates[0]
    assert calls_of(expand(problem, ())) == 3
    nothing: frozenset[int] = frozenset()
    phases = [Phase(position, nothing) for position in range(4)]
    assert calls_of(expand(problem, (), phases=phases)) == 3 + 2 + 1
    phases[1:3] = [Phase(1, frozenset({one})), Phase(2, frozenset({one}))]
    assert calls_of(expand(problem, (), phases=phases)) == 3 + 1


def test_what_joins_a_chain_on_the_way_is_replayed_when_it_is_needed() -> None:
    tape = Tape()
    given = tape.given("input", 10, Kind.PRIMAL)
    state = tape.given("state_0", 10, Kind.PRIMAL)
    for step in range(1, 9):
        (joining,) = tape.run(f"joining_{step}", [given], [1000], 1)
        (state,) = tape.run(f"state_{step}", [joining, state], [10], 1)
    tape.turn()
    gradient = tape.given("tangent", 10, Kind.TANGENT)
    (gradient,) = tape.run("back", [gradient, state], [10], 1)
    problem = tape.problem(outputs=[], gradients=[gradient], name="a chain that others join")
    assert simulate(problem, expand(problem, ())).peak_bytes < 1100


@pytest.fixture(scope="module")
def layers() -> RematProblem:
    return transformer(4, tokens=256, width=64, context=64, vocabulary=512, resident_bytes=0)


def test_the_blocks_of_a_transformer_lie_between_its_residual_sums(layers: RematProblem) -> None:
    chain = find_chain(layers)
    names = {layers.storages[g].name for frontier in chain.frontiers for g in frontier}
    for layer in range(4):
        assert {f"res1_{layer}", f"res2_{layer}"} <= names
    assert list(chain.phases) == sorted(chain.phases, reverse=True)


def test_nested_schedules_keep_within_their_budget_or_are_refused(layers: RematProblem) -> None:
    high = simulate(layers, expand(layers, find_needs(layers).candidates)).peak_bytes
    fitted = 0
    for percent in range(30, 101, 10):
        budget_bytes = high * percent // 100
        schedule = rotor(layers, budget_bytes, time_limit_s=60.0).schedule
        if schedule is not None:
            fitted += 1
            assert simulate(layers, schedule).peak_bytes <= budget_bytes
    assert fitted >= 3
