"""Grows a program statement by statement; each runs when it is drawn, and stays if it could."""

import random
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from tests.fuzzing.holes import HOLE, Holes, NoValue
from tests.fuzzing.program import FUNCTIONS, PREAMBLE, Program, made_by
from tests.fuzzing.templates import IN_REGIONS, KINDS, WRITING

T = TypeVar("T")
Pick = Callable[[int], int]
"""Chooses a number below another."""

NAME = re.compile(r"[vx]\d+")
SUBMODULE = re.compile(r"@\[(.*?)\]@")
LARGEST = 40_000  # elements of a value
FARTHEST = 1e4  # values beyond it are not kept: sums of them hide what is wrong
TRIES = 6  # drawn for each statement that is wanted


class Grower:
    """A program as far as it has grown."""

    def __init__(self, pick: Pick) -> None:
        self.pick = pick
        self.members: dict[str, str] = {}
        self.made: dict[str, str] = {}  # member -> the expression that it was made by
        self.arguments = self.draw_arguments()
        self.statements: list[str] = []
        self.count = 0  # names given away
        self.values: dict[str, Any] = {}
        self.rerun()

    def one_of(self, things: Sequence[T]) -> T:
        """One of some things."""
        return things[self.pick(len(things))]

    def draw_arguments(self) -> dict[str, str]:
        """Arguments, from the name to the expression."""
        rows = self.one_of((3, 5, 6, 8, 67, 301))
        shape = self.one_of(((rows, 6), (rows, 4, 6), (rows, 5), (2, 3, 4, 6), (rows, 5, 4)))
        found = {"x0": f"torch.randn{shape}.requires_grad_()"}
        if self.pick(2):
            found["x1"] = f"torch.randn{shape}"
        if self.pick(3) == 0:
            found["x2"] = f"torch.randint(0, 7, {(min(rows, 8), 3)})"
        if self.pick(3) == 0:
            found["x3"] = f"torch.randn{shape[1:]}.requires_grad_()"
        return found

    def rerun(self) -> None:
        """Run what has grown from its beginning."""
        torch.manual_seed(7)
        self.values = {}
        exec("".join([PREAMBLE, *FUNCTIONS.values()]), self.values)
        self.values["self"] = nn.Module()
        for declaration in self.members.values():
            exec(declaration, self.values)
        for name, expression in self.arguments.items():
            exec(f"{name} = {expression}", self.values)
        for statement in self.statements:
            exec(statement, self.values)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every value so far."""
        found = self.values.items()
        return {n: v for n, v in found if NAME.fullmatch(n) and isinstance(v, torch.Tensor)}

    def late_one(self, fits: Callable[[str, torch.Tensor], bool]) -> str:
        """The name of a value that fits; late ones are drawn more often."""
        names = [name for name, tensor in self.tensors().items() if fits(name, tensor)]
        if not names:
            raise NoValue
        return names[max(self.pick(len(names)), self.pick(len(names)))]

    def member(self, kind: str, expression: str) -> str:
        """A member made in this way: one that is there, a second name for it, or a new one."""
        same = [name for name, made in self.made.items() if made == expression]
        if same and self.pick(2):
            return f"self.{self.one_of(same)}"
        name = f"{kind}{len(self.members)}"
        line = f"self.{name} = {expression}"
        if kind == "buffer":
            line = f"self.register_buffer('{name}', {expression})"
        elif same and self.pick(2):
            line = f"self.{name} = self.{same[0]}"
        exec(line, self.values)
        self.members[name], self.made[name] = line, expression
        return f"self.{name}"

    def new(self) -> str:
        """A fresh name."""
        self.count += 1
        return f"v{self.count}"

    def fill(self, template: str) -> str:
        """A template with its holes filled."""
        holes = Holes(self, template)
        text = HOLE.sub(lambda match: holes[match[1]], template)
        return SUBMODULE.sub(lambda match: self.member("part", match[1]), text)

    def region(self) -> str:
        """A checkpointed region."""
        name = self.new()
        lines = [f"    a = {self.one_of(IN_REGIONS)}\n" for _ in range(1 + self.pick(4))]
        return self.fill(
            f"def region_{name}(a, b):\n{''.join(lines)}    return a\n"
            f"{name} = checkpoint(region_{name}, <f>, <g>, use_reentrant=False)"
        )

    def draw(self) -> tuple[str, bool]:
        """A statement that has not run yet, and whether it writes to what is there."""
        drawn = [templates for templates, weight in KINDS for _ in range(weight)]
        templates = self.one_of(drawn)
        text = self.region() if templates is IN_REGIONS else self.fill(self.one_of(templates))
        return text, templates in WRITING

    def attempt(self) -> None:
        """Draw a statement, run it, and take it or leave no trace of it."""
        members, made, writes, statement = dict(self.members), dict(self.made), False, ""
        try:
            statement, writes = self.draw()
            exec(statement, self.values)
            if writes:
                self.check_backward()
            self.check_values(made_by(statement))
        except Exception:  # noqa: BLE001  # whatever torch says of a statement that cannot be
            self.members, self.made = members, made
            for name in made_by(statement):
                self.values.pop(name, None)
            if writes:
                self.rerun()
        else:
            self.statements.append(statement)

    def check_values(self, names: Sequence[str]) -> None:
        """Refuse values that are large, or far from 0."""
        for name in names:
            value = self.values[name]
            if not isinstance(value, torch.Tensor) or not 0 < value.numel() <= LARGEST:
                raise NoValue
            far = value.detach().abs().max() if value.is_floating_point() else torch.zeros(())
            if not far <= FARTHEST:
                raise NoValue

    def check_backward(self) -> None:
        """Ask autograd whether anything that it needs was written over."""
        tensors = [t for t in self.tensors().values() if t.requires_grad]
        leaves = [t for t in tensors if t.is_leaf]
        if len(leaves) < len(tensors):
            total = torch.stack([t.abs().float().sum() for t in tensors]).sum()
            torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)

    def outputs(self) -> tuple[tuple[str, ...], str]:
        """What the forward returns, and how."""
        found = [
            self.late_one(
                lambda name, t: t.requires_grad and t.is_floating_point() and not t.is_leaf
            )
        ]
        for _ in range(self.pick(4)):
            name = self.late_one(lambda name, t: True)
            found.append(
                self.one_of((name, name, name, f"{name}.detach()", f"{name}.view(-1)[:1]"))
            )
        buffers = [name for name in self.members if name.startswith("buffer")]
        if buffers and self.pick(8) == 0:
            found.append(f"self.{self.one_of(buffers)}")
        packing = self.one_of(("tuple", "tuple", "dict", "nested"))
        return tuple(found), "single" if len(found) == 1 and self.pick(2) else packing


def grow(pick: Pick) -> Program | None:
    """A program; None where nothing in it could be differentiated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grower = Grower(pick)
        wanted = 5 + pick(21)
        for _ in range(TRIES * wanted):
            if len(grower.statements) < wanted:
                grower.attempt()
        try:
            outputs, packing = grower.outputs()
        except NoValue:
            return None
    kinds = {n: f"{t.dtype}{tuple(t.shape)}" for n, t in grower.tensors().items()}
    return Program(
        grower.members, grower.arguments, tuple(grower.statements), outputs, packing, kinds
    )


def program_of(seed: int) -> Program | None:
    """The program of a seed."""
    return grow(random.Random(seed).randrange)
