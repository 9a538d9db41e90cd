"""Makes a failing program smaller: fewer statements and outputs, the same kind of failure."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzzing.program import VALUE, Program, made_by

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, tries: int = 80) -> Program:
    """A smaller program that fails alike.

    Args:
        program: One that fails.
        fails: Whether a program fails in the same way.
        tries: How many programs to run at most.

    Returns:
        The smallest found.
    """
    size = max(1, len(program.statements) // 2)
    while tries > 0:
        for smaller in _smaller(program, size):
            if tries <= 0:
                break
            tries -= 1
            if fails(smaller):
                program = smaller
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
    return program


def _smaller(program: Program, size: int) -> Iterator[Program]:
    """Programs with some statements less, or one output less, or one argument less."""
    if size == 1:
        for number in range(len(program.outputs)):
            rest = program.outputs[:number] + program.outputs[number + 1 :]
            if rest:
                yield replace(program, outputs=rest)
        if program.packing != "tuple":
            yield replace(program, packing="tuple")
    for end in range(len(program.statements), 0, -size):
        yield from _without(program, range(max(0, end - size), end))


def _without(program: Program, numbers: range) -> Iterator[Program]:
    """The program without some statements, others reading something alike instead."""
    gone = {name for number in numbers for name in made_by(program.statements[number])}
    kept = [s for number, s in enumerate(program.statements) if number not in numbers]
    before = [*program.arguments]
    for statement in program.statements[: numbers.start]:
        before += made_by(statement)
    stand_ins = {name: _alike(program, name, before) for name in gone}
    if all(stand_ins.values()) or not gone:

        def swap(text: str) -> str:
            return VALUE.sub(lambda match: stand_ins.get(match[0]) or match[0], text)

        yield replace(
            program,
            statements=tuple(swap(statement) for statement in kept),
            outputs=tuple(swap(output) for output in program.outputs),
        )
    yield from _without_readers(program, numbers, gone)


def _alike(program: Program, name: str, before: list[str]) -> str | None:
    """An earlier value with the same shape and type."""
    kind = program.kinds.get(name)
    return next((other for other in reversed(before) if program.kinds.get(other) == kind), None)


def _without_readers(program: Program, numbers: range, gone: set[str]) -> Iterator[Program]:
    """The program without some statements and without all that reads what they made."""
    gone, kept = set(gone), []
    for number, statement in enumerate(program.statements):
        if number in numbers:
            continue
        if gone & set(VALUE.findall(statement)):
            gone |= set(made_by(statement))
        else:
            kept.append(statement)
    outputs = tuple(o for o in program.outputs if not gone & set(re.findall(VALUE, o)))
    if outputs:
        yield replace(program, statements=tuple(kept), outputs=outputs)
