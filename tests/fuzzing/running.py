"""One program run by eager, by torch's own trace, or under a plan, and everything it shows."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat.check import same_bits
from fxremat.install import Installed
from fxremat.options import make_options
from fxremat.passes.meter import measure_peak
from fxremat.passes.seeding import seeded_loss, tensors_in, unit
from fxremat.unrewritten import ReferenceTrace

Seen = dict[str, torch.Tensor | None]
Make = Callable[[], tuple[nn.Module, tuple[Any, ...]]]
STEPS = 2


def weighted_sum(output: Any) -> torch.Tensor:
    """A loss in which every element of every differentiable output has a weight of its own."""
    total = torch.zeros(())
    for number, tensor in enumerate(t for t in every_tensor(output) if t.requires_grad):
        weights = torch.arange(tensor.numel()).mul(0.37).add(number).cos().view(tensor.shape)
        total = total + (tensor.float() * weights).sum()
    return total


def every_tensor(output: Any) -> Iterator[torch.Tensor]:
    """Tensors of an output; one that is there twice comes twice, be it one object or two."""
    for leaf in pytree.tree_leaves(output):
        yield from tensors_in(leaf)


def features(output: Any, args: tuple[Any, ...]) -> set[str]:
    """What is known to matter for the peak, so that alike failures have one name."""
    wanted = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    inputs = {tensor.untyped_storage()._cdata for tensor in args}
    found = set()
    for tensor in wanted:
        if tensor.untyped_storage()._cdata in inputs:
            found.add("an output is a view of an argument")
        if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            found.add("an output is a part of its storage")
    return found


class Run:
    """One copy of a program with its arguments."""

    def __init__(self, make: Make, wrap: Callable[[nn.Module], Any] = lambda net: net) -> None:
        self.net, self.args = make()
        self.call = wrap(self.net)
        self.features: set[str] = set()  # of its outputs
        torch.manual_seed(11)

    def steps(self) -> Seen:
        """Everything that some steps show."""
        seen: Seen = {}
        for number in range(STEPS):
            output = self.call(*self.args)
            self.features |= features(output, self.args)
            weighted_sum(output).backward()
            found = self.watched(output).items()
            seen |= {f"step {number} {n}": None if t is None else t.clone() for n, t in found}
            self.free_gradients()
        return seen | {"generator": torch.get_rng_state()}

    def watched(self, output: Any) -> Seen:
        """What a step has left."""
        seen: Seen = {}
        for number, tensor in enumerate(every_tensor(output)):
            seen[f"output {number}"] = tensor.detach()
            seen[f"output {number} needs a gradient"] = torch.tensor(tensor.requires_grad)
        for number, argument in enumerate(self.args):
            seen[f"argument {number}"] = argument.detach()
            seen[f"gradient of argument {number}"] = argument.grad
        seen |= {f"gradient of {name}": p.grad for name, p in self.net.named_parameters()}
        return seen | {f"buffer {name}": b.detach() for name, b in self.net.named_buffers()}

    def free_gradients(self) -> None:
        """As zero_grad does, for arguments too."""
        for tensor in (*self.args, *self.net.parameters()):
            tensor.grad = None

    def peak_bytes(self) -> int:
        """What a step holds above what is there when it begins. [bytes]"""
        unit(torch.device("cpu"))  # is there before
        kept: list[Any] = []

        def step() -> None:
            kept.append(self.call(*self.args))
            torch.autograd.backward(seeded_loss(kept[0]), unit(torch.device("cpu")))

        found = measure_peak(step, device="cpu").peak_bytes
        self.free_gradients()
        return found


def differing(expected: Seen, got: Seen) -> list[str]:
    """Names of what is not equal bit for bit."""
    return [n for n in {**expected, **got} if not same_bits(expected.get(n), got.get(n))]


NEAR = 0.05  # of the largest value: what roundings may make of bfloat16


def far_apart(expected: Seen, got: Seen) -> list[str]:
    """Names of what differs by more than roundings do: then the trace itself is wrong."""
    found = []
    for name in differing(expected, got):
        one, other = expected.get(name), got.get(name)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            found.append(name)
            continue
        one, other = one.double(), other.double()
        scale = one.abs().nan_to_num(posinf=0.0).amax().item() if one.numel() else 0.0
        if not torch.allclose(one, other, rtol=NEAR, atol=NEAR * scale, equal_nan=True):
            found.append(name)
    return found


class References:
    """What a step must show: eager's bits, or those of AOTAutograd where it differs from eager."""

    def __init__(self, make: Make) -> None:
        self.make = make
        self.eager = Run(make).steps()
        self.traced: Seen | None = None
        if differing(self.eager, Run(make).steps()):
            raise RuntimeError("eager differs from itself")

    def traced_steps(self) -> Seen:
        """Bits of torch's own trace."""
        if self.traced is None:
            self.traced = Run(self.make, traced_by_torch).steps()
        return self.traced


def traced_by_torch(net: nn.Module) -> Any:
    """The step as AOTAutograd makes it, without a plan.

    Its default partition, with the draws that nobody reads: the other one reads buffers again that
    were written meanwhile.
    """
    return Installed(net._call_impl, net, make_options("1TiB", {}), trace=ReferenceTrace)
