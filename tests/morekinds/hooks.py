"""Kinds of hooks: on tensors, on parameters, on modules, after a gradient has been added up."""

from typing import Any

import torch

from tests.morekinds.backwards import block
from tests.morekinds.program import Kind, Named, descend, state_of, with_args
from tests.steps import leaf, weighted_sum


def hooks_on_tensors() -> Kind:
    net = block()
    net.get_parameter("0.weight").register_hook(lambda g: g * 0.5)
    net.get_parameter("4.bias").register_hook(lambda g: g.clamp(-1, 1))

    def program(call: Any) -> Named:
        seen: list[torch.Tensor] = []
        for number in range(2):
            x = leaf(5, 6)
            x.register_hook(lambda g: g + 1)
            output = call(x)
            output.register_hook(lambda g: g * 2)
            output.register_hook(lambda g: seen.append(g.clone()))
            output.square().sum().backward()
            yield f"{number}", (x.grad, seen)
            yield from state_of(net, f"{number} ")
            descend(net)

    return Kind(net, program)


def hooks_on_modules() -> Kind:
    net = block()
    net[1].register_forward_hook(lambda module, args, output: output * 1.5)
    net[2].register_forward_pre_hook(lambda module, args: (args[0].sin(),))
    net.register_forward_hook(lambda module, args, output: (output, output.exp()))

    def program(call: Any) -> Named:
        for number in range(2):
            x = leaf(5, 6)
            output = call(x)
            yield f"{number}", output
            weighted_sum(output).backward()
            yield f"{number} x", x.grad
            yield from state_of(net, f"{number} ")
            descend(net)
            del output  # it keeps x and its gradient

    return Kind(net, program, example=with_args(leaf(5, 6)))


def optimizer_in_the_backward() -> Kind:
    net = block()

    def update(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def program(call: Any) -> Named:
        for number in range(3):
            x = leaf(5, 6)
            call(x).square().sum().backward()
            yield f"{number}", x.grad
            yield from state_of(net, f"{number} ")

    return Kind(net, program, example=with_args(leaf(5, 6)))


CASES = (hooks_on_tensors, hooks_on_modules, optimizer_in_the_backward)
