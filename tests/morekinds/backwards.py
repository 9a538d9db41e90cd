"""Kinds of backward: partial, repeated, hooked, accumulated, across several calls."""

from typing import Any

import torch
from torch import nn

from tests.morekinds.program import Kind, Named, clear, descend, state_of
from tests.steps import leaf, weighted_sum


def block() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 6)
    )


def kept_graph() -> Kind:
    net = block()

    def program(call: Any) -> Named:
        x = leaf(5, 6)
        output = call(x)
        for number in range(3):
            x.grad = None
            output[:, number].exp().sum().backward(retain_graph=number < 2)
            yield f"{number}", x.grad
            yield from state_of(net, f"{number} ")
            clear(net.parameters())

    return Kind(net, program, fractions=(4,))  # what is saved must fit until the end


def gradients_of_inputs_only() -> Kind:
    net = block()

    def program(call: Any) -> Named:
        a, b = leaf(5, 6), leaf(5, 6)
        (found,) = torch.autograd.grad(call(a * b).square().sum(), b)
        yield "of one", found
        wanted = [net.get_parameter("0.weight"), a]
        yield "of both", torch.autograd.grad(call(a).square().sum(), wanted)
        torch.autograd.backward([call(a + b).square().sum()], inputs=[a])
        yield "of inputs=", (a.grad, b.grad)

    return Kind(net, program)


def intermediate_gradient() -> Kind:
    net = nn.ModuleList([nn.Linear(6, 6), block()])

    def step(x: torch.Tensor) -> Any:
        h = net[0](x).tanh()
        return h, net[1](h)

    def program(call: Any) -> Named:
        h, y = call(leaf(5, 6))
        h.retain_grad()
        weighted_sum((h, y)).backward()
        yield "kept", h.grad

    return Kind(step, program, net, traced=True)  # inside the graph, y does not come from h


def given_tangents() -> Kind:
    net = block()

    def program(call: Any) -> Named:
        for number, tangent in enumerate(
            (torch.ones(1, 1).expand(5, 6), torch.randn(6, 5).t(), torch.randn(5, 12)[:, ::2])
        ):
            x = leaf(5, 6)
            output = call(x)
            torch.autograd.backward([output], [tangent])
            yield f"{number}", (output, x.grad)
            yield from state_of(net, f"{number} ")
            descend(net)
            del output

    return Kind(net, program, traced=True)  # tangents are made to lie as the outputs do


def accumulated(set_to_none: bool) -> Kind:
    net = block()

    def program(call: Any) -> Named:
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for number in range(4):
            (call(torch.randn(5, 6)).square().mean() / 2).backward()
            yield from state_of(net, f"{number} ")
            if number % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)

    return Kind(net, program)


def accumulated_and_freed() -> Kind:
    return accumulated(True)


def accumulated_and_zeroed() -> Kind:
    return accumulated(False)


def siamese() -> Kind:
    net = block()

    def program(call: Any) -> Named:
        for number in range(2):
            x, y, z = leaf(5, 6), leaf(5, 6), leaf(4, 6)
            a, b, c = call(x), call(y), call(z)
            yield f"{number} out", (a, b, c)
            (torch.cosine_similarity(a, b).sum() + c.square().sum()).backward()
            yield f"{number} in", (x.grad, y.grad, z.grad)
            yield from state_of(net, f"{number} ")
            descend(net)
            del a, b, c  # they keep the inputs and their gradients

    return Kind(net, program, options={"in_flight": 3})


def other_order_of_backwards() -> Kind:
    net = block()

    def program(call: Any) -> Named:
        x, y = leaf(5, 6), leaf(5, 6)
        first, second = call(x), call(y)
        first.square().sum().backward()
        yield "first", x.grad
        clear((x, *net.parameters()))
        third = call(x * 2)
        third.square().sum().backward()
        second.square().sum().backward()
        yield "in", (x.grad, y.grad)

    return Kind(net, program, options={"in_flight": 2})


def evaluation_before_the_backward() -> Kind:
    net = block()

    def program(call: Any) -> Named:
        x = leaf(5, 6)
        output = call(x)
        with torch.no_grad():
            yield "evaluated", call(torch.randn(5, 6))
        yield "random", torch.rand(3)
        output.square().sum().backward()
        yield "in", x.grad

    return Kind(net, program)


def adversaries() -> Kind:
    maker, judge = block(), nn.Sequential(nn.Linear(6, 9), nn.LeakyReLU(), nn.Linear(9, 1))

    def program(call: Any) -> Named:
        for number in range(2):
            fake = maker(torch.randn(5, 6))
            real = call(torch.randn(5, 6))
            (call(fake.detach()).sigmoid().mean() - real.sigmoid().mean()).backward()
            yield from state_of(judge, f"{number} judge ")
            descend(judge)
            judge.requires_grad_(False)
            (-call(fake).sigmoid().mean()).backward()
            judge.requires_grad_(True)
            yield from state_of(maker, f"{number} maker ")
            descend(maker)

    return Kind(judge, program, options={"in_flight": 2})


def unused_graph() -> Kind:
    """A forward whose backward never comes."""
    net = block()

    def program(call: Any) -> Named:
        for number in range(3):
            yield f"{number} lost", call(leaf(5, 6))
            x = leaf(5, 6)
            call(x).square().sum().backward()
            yield f"{number}", x.grad
            descend(net)

    return Kind(net, program)


def saved_tensors_are_packed() -> Kind:
    net = block()

    def program(call: Any) -> Named:
        x = leaf(5, 6)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            output = call(x)
        output.square().sum().backward()
        yield "packed", x.grad
        with torch.autograd.graph.save_on_cpu():
            output = call(x)
        output.square().sum().backward()
        yield "on the CPU", x.grad

    return Kind(net, program)


def anomalies_are_looked_for() -> Kind:
    net = block()

    def program(call: Any) -> Named:
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            x = leaf(5, 6)
            call(x).square().sum().backward()
            yield "in", x.grad

    return Kind(net, program)


def called_functionally() -> Kind:
    net = block()

    def program(call: Any) -> Named:
        for number in range(2):
            weights = {n: (p * 0.5).detach().requires_grad_() for n, p in net.named_parameters()}
            output = torch.func.functional_call(net, weights, (torch.randn(5, 6),))
            output.square().sum().backward()
            yield f"{number}", (output.detach(), [w.grad for w in weights.values()])
            del output, weights
        x = leaf(5, 6)
        call(x).square().sum().backward()
        yield "own", x.grad

    return Kind(net, program)


CASES = (
    kept_graph, gradients_of_inputs_only, intermediate_gradient, given_tangents,
    accumulated_and_freed, accumulated_and_zeroed, siamese, other_order_of_backwards,
    evaluation_before_the_backward, adversaries, unused_graph, saved_tensors_are_packed,
    anomalies_are_looked_for, called_functionally,
)  # fmt: skip
