"""Chains of equal steps: what the classical counts speak of."""

from fxremat.problem import Kind, RematProblem
from fxremat.simulate import Schedule
from tests.problems import Tape

STATE_BYTES = 1000


def chain_of_steps(steps: int, *, gradient_bytes: int = 1) -> RematProblem:
    """``steps`` backward steps, each of which reads the state before it.

    The state before the first step is an input; the last state is not needed. A call costs 1 ns.
    """
    tape = Tape()
    states = [tape.given("state_0", STATE_BYTES, Kind.PRIMAL)]
    for step in range(1, steps):
        states += tape.run(f"state_{step}", [states[-1]], [STATE_BYTES], 1)
    tape.turn()
    gradient = tape.given("tangent", gradient_bytes, Kind.TANGENT)
    for step in reversed(range(steps)):
        (gradient,) = tape.run(f"back_{step}", [gradient, states[step]], [gradient_bytes], 1)
    return tape.problem(outputs=[], gradients=[gradient], name=f"chain of {steps} steps")


def calls_of(schedule: Schedule) -> int:
    """Forward operations and replays that a schedule runs."""
    return len(schedule.forward) + sum(step.replay >= 0 for step in schedule.backward)
