"""A training program as text: it can be printed, run, and made smaller statement by statement."""

import hashlib
import linecache
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

VALUE = re.compile(r"\b[vx]\d+\b")  # v: made by a statement, x: an argument
MEMBER = re.compile(r"self\.(\w+)")

PREAMBLE = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
"""

FUNCTIONS = {
    "Rounded": '''

class Rounded(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * torch.cos(x) * ctx.scale, None
''',
    "Squashed": '''

class Squashed(torch.autograd.Function):
    """It saves its result and one of two inputs."""

    @staticmethod
    def forward(ctx, x, y):
        z = torch.tanh(x) * y
        ctx.save_for_backward(z, y)
        return z

    @staticmethod
    def backward(ctx, gradient):
        z, y = ctx.saved_tensors
        return gradient * (y - z), gradient * z
''',
}


@dataclass(frozen=True, slots=True)
class Program:
    """A module of random statements.

    Attributes:
        members: Name of a parameter, buffer or submodule -> the line that makes it.
        arguments: Name of an argument -> the expression that makes it.
        statements: Of the forward, in order.
        outputs: Expressions that the forward returns.
        packing: How they are returned: "single", "tuple", "dict" or "nested".
        kinds: What is known of each value, as text; equal texts can stand for each other.
    """

    members: Mapping[str, str]
    arguments: Mapping[str, str]
    statements: tuple[str, ...]
    outputs: tuple[str, ...]
    packing: str
    kinds: Mapping[str, str]

    @property
    def source(self) -> str:
        """The program as a file that runs."""
        members = [self.members[name] for name in self._used()] or ["pass"]
        body = [*self.statements, f"return {self._returned()}"]
        arguments = ", ".join(self.arguments)
        return "\n".join(
            [
                PREAMBLE,
                *(text for name, text in FUNCTIONS.items() if f"{name}.apply" in "".join(body)),
                "\nclass Net(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *_indented(members),
                f"\n    def forward(self, {arguments}):",
                *_indented(body),
                "\n\ndef make():",
                "    torch.manual_seed(7)",
                f"    return Net(), ({', '.join(self.arguments.values())},)",
                "",
            ]
        )

    @property
    def rebinds(self) -> bool:
        """Does a step release what was there before it, which no meter on the CPU sees?"""
        return any(re.match(r"self\.\w+ = ", statement) for statement in self.statements)

    def _used(self) -> list[str]:
        """Members that a statement names, and those that they are made of, in order."""
        used = set(MEMBER.findall("\n".join([*self.statements, *self.outputs])))
        for name in reversed(list(self.members)):
            if name in used:
                used |= set(MEMBER.findall(self.members[name]))
        return [name for name in self.members if name in used]

    def _returned(self) -> str:
        if self.packing == "single":
            return self.outputs[0]
        if self.packing == "dict":
            entries = (f"'r{number}': {output}" for number, output in enumerate(self.outputs))
            return "{" + ", ".join(entries) + "}"
        if self.packing == "nested":
            rest = ", ".join(self.outputs[1:])
            return f"{{'first': {self.outputs[0]}, 'rest': ([{rest}], None, 3)}}"
        return f"({', '.join(self.outputs)},)"

    def maker(self) -> Callable[[], tuple[torch.nn.Module, tuple[Any, ...]]]:
        """What makes the module and its arguments, the same ones each time."""
        text = self.source
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        name = f"<program {digest}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        module = types.ModuleType(f"program_{digest}")
        sys.modules[module.__name__] = module  # Dynamo imports it by its name, and keeps it
        exec(compile(text, name, "exec"), module.__dict__)
        make: Callable[[], tuple[torch.nn.Module, tuple[Any, ...]]] = module.make
        return make


def _indented(lines: list[str]) -> list[str]:
    return [f"        {line}" for text in lines for line in text.splitlines()]


def made_by(statement: str) -> list[str]:
    """Names of the values that a statement binds."""
    found: list[str] = []
    for line in statement.splitlines():
        left, equals, _ = line.partition(" = ")
        if equals and re.fullmatch(r"\s*v\d+(?:, v\d+)*(?:, \*_)?", left):
            found += VALUE.findall(left)
    return found
