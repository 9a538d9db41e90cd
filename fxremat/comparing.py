"""How two runs of one step are compared: bit for bit, and by what else a caller can see."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

# Inductor fuses what stands together, and a plan moves things apart: sums may then round otherwise.
INDUCTOR_EPSILONS = (
    256  # allowed difference, in units of the type's epsilon times the largest value
)
GRADIENT, STRIDES, SHARED, STRUCTURE = "requires_grad", "strides", "memory shared", "structure"
BOUND_TRAITS = (GRADIENT, STRUCTURE)  # what Inductor is held to; it may lay things out otherwise

GROUPS = ("outputs", "gradients", "buffers", "inputs", "generators")
"""The fields of ``Observed`` with values, in the order in which they are judged."""


@dataclass(frozen=True)
class Observed:
    """Everything that one run of a step showed, by name.

    Attributes:
        outputs: What the forward returned.
        gradients: Gradients of parameters and arguments; None where there is none.
        buffers: Buffers after the step.
        inputs: Arguments after the step.
        generators: States of the generators after the step.
        traits: Of an output or a gradient, what its bits do not tell: whether it requires a
            gradient, its strides, with what it shares memory; of "the output", its structure.
    """

    outputs: Mapping[str, torch.Tensor | None]
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor | None]
    inputs: Mapping[str, torch.Tensor | None]
    generators: Mapping[str, torch.Tensor | None]
    traits: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


WHOLE_OUTPUT = "the output"  # bears the trait STRUCTURE


@dataclass(frozen=True)
class Comparison:
    """What differs between two runs.

    Attributes:
        differing: For each group, the values that differ in a bit or in a trait.
        max_abs_diff: Of each of them, the largest difference; 0 where only a trait differs.
        words: Of each of them, what differs.
        beyond: Those that differ by more than the executor's bound.
    """

    differing: Mapping[str, tuple[str, ...]]
    max_abs_diff: Mapping[str, float]
    words: Mapping[str, str]
    beyond: tuple[str, ...]


def compare(reference: Observed, got: Observed, executor: str, label: str = "") -> Comparison:
    """Compare two runs.

    Args:
        reference: The run of the unrewritten step.
        got: That of the planned one.
        executor: What ran both.
        label: Stands before the names.
    """
    differing: dict[str, tuple[str, ...]] = {}
    largest: dict[str, float] = {}
    words: dict[str, str] = {}
    beyond: list[str] = []
    for group in GROUPS:
        expected, found = getattr(reference, group), getattr(got, group)
        whole = {WHOLE_OUTPUT: None} if group == "outputs" else {}
        names = []
        for name in {**whole, **expected, **found}:
            one, other = expected.get(name), found.get(name)
            trait = trait_in_words(reference, got, name, executor)
            equal = same_bits(one, other)
            if equal and not trait:
                continue
            names.append(label + name)
            largest[label + name] = difference = 0.0 if equal else largest_difference(one, other)
            words[label + name] = trait if equal else difference_in_words(one, other)
            bound = _allowed(one, executor)
            if trait or difference > bound or group == "generators":
                beyond.append(label + name)
        differing[group] = tuple(names)
    return Comparison(differing, largest, words, tuple(beyond))


def joined(parts: list[Comparison]) -> Comparison:
    """Several comparisons, with labels that differ, as one."""
    groups = {group: tuple(n for p in parts for n in p.differing[group]) for group in GROUPS}
    largest = {name: value for p in parts for name, value in p.max_abs_diff.items()}
    words = {name: text for p in parts for name, text in p.words.items()}
    return Comparison(groups, largest, words, tuple(n for p in parts for n in p.beyond))


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Are two tensors equal bit for bit, NaNs too, or both absent?"""
    if a is None or b is None:
        return a is b
    if (a.shape, a.dtype, a.device, a.layout) != (b.shape, b.dtype, b.device, b.layout):
        return False
    return a.numel() == 0 or torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    return plain.contiguous().view(-1).view(torch.uint8)


def largest_difference(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """The largest difference of two tensors; infinite where they cannot be compared."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    one, other = _wide(a), _wide(b)
    equal = (one == other) | ((one != one) & (other != other))  # infinities, NaNs: no difference
    found = torch.where(equal, torch.zeros_like(one), one - other).abs().max().item()
    return float("inf") if found != found else float(found)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().cpu().resolve_conj()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    return plain.to(torch.complex128 if plain.is_complex() else torch.float64)


def difference_in_words(reference: torch.Tensor | None, got: torch.Tensor | None) -> str:
    """How a value differs, for people: where first, both numbers, how much at most."""
    if got is None:
        return "it is missing"
    if reference is None:
        return "it is there, and the unrewritten step has none"
    for what in ("shape", "dtype", "device", "layout"):
        expected, found = getattr(reference, what), getattr(got, what)
        if expected != found:
            return f"its {what} is {_show(found)} instead of {_show(expected)}"
    width = reference.element_size()
    wrong = (_bytes(reference) != _bytes(got)).view(-1, width).any(1)
    flat = int(wrong.nonzero()[0])
    place = [int(i) for i in torch.unravel_index(torch.tensor(flat), reference.shape)]
    expected, found = (_wide(t).reshape(-1)[flat].item() for t in (reference, got))
    text = (
        f"{int(wrong.sum()):,} of {reference.numel():,} elements differ, the first at {place}: "
        f"{found!r} instead of {expected!r}, largest difference "
        f"{largest_difference(reference, got):.3g}"
    )
    return text + (" (of the sign or in a NaN's bits)" if expected == found else "")


def _show(value: object) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


def trait_in_words(reference: Observed, got: Observed, name: str, executor: str) -> str:
    """The first trait of a value that differs; empty where none does."""
    expected, found = reference.traits.get(name, {}), got.traits.get(name, {})
    if not expected or not found:  # one of them is missing, which its bits tell
        return ""
    for trait in expected:
        if executor != "eager" and trait not in BOUND_TRAITS:
            continue
        if expected[trait] != found.get(trait):
            return f"its {trait} is {found.get(trait)} instead of {expected[trait]}"
    return ""


def _allowed(reference: torch.Tensor | None, executor: str) -> float:
    """The largest difference that the executor may show; below 0 for none at all."""
    if executor == "eager" or reference is None:
        return -1.0
    if not (reference.is_floating_point() or reference.is_complex()):
        return -1.0
    sizes = reference.detach().abs().double()
    finite = sizes[torch.isfinite(sizes)]
    scale = max(1.0, finite.max().item()) if finite.numel() else 1.0
    return INDUCTOR_EPSILONS * torch.finfo(reference.dtype).eps * scale


def bound_in_words(executor: str) -> str:
    """What is promised for an executor."""
    if executor == "eager":
        return "bit for bit"
    return f"within {INDUCTOR_EPSILONS} epsilons of the largest value, generators bit for bit"
