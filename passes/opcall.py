"""One operator call without its tensors: what is called, on which sizes, with which constants.

An ``OpCall`` holds what the fx graph holds. ``concrete`` takes the tensors and symbols out of it,
and ``cost_key`` writes the result as one line of text, the same for equal calls in every process.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import torch

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Unmeasurable(Exception):  # noqa: N818 - not an error: the reason for a guess
    """Why a call cannot be run on made-up inputs."""


@dataclass(frozen=True)
class OpCall:
    """One call of the graph.

    Attributes:
        target: The operator, as the fx node has it.
        args: The node's arguments, each fx node in them replaced by its ``meta["val"]``.
        kwargs: The same by name.
        result: ``meta["val"]`` of the node itself, if known; lets a call be priced that cannot run.
    """

    target: Callable[..., object]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    result: object = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as far as time and bytes depend on it.

    Attributes:
        shape: Sizes.
        stride: Steps. [elements]
        dtype: Type of an element.
        device: Where it is.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def elements(self) -> int:
        """Elements of the smallest storage that holds it."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @property
    def size_bytes(self) -> int:
        """Bytes of that storage. [bytes]"""
        return self.elements * self.dtype.itemsize

    @property
    def read_bytes(self) -> int:
        """Bytes of its distinct elements at most: broadcast dimensions count once. [bytes]"""
        return min(prod(self.shape), self.elements) * self.dtype.itemsize


def tree(value: object, leaf: Callable[[object], object]) -> object:
    """The same lists, tuples and dicts with every leaf replaced."""
    if isinstance(value, (list, tuple)):
        made = [tree(v, leaf) for v in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, Mapping):
        return {k: tree(v, leaf) for k, v in value.items()}
    return leaf(value)


def specs(value: object) -> Iterator[TensorSpec]:
    """Every tensor in a value that went through ``concrete``, in order."""
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from specs(v)
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from specs(v)


def concrete(value: object) -> object:
    """Replace tensors by their specs, and symbolic numbers by the sizes that were traced with.

    Raises:
        Unmeasurable: A number is not known before the step runs, or a tensor is not strided.
    """
    return tree(value, _concrete_leaf)


def _concrete_leaf(value: object) -> object:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise Unmeasurable(f"a tensor has the layout {value.layout}")
        return TensorSpec(
            shape=tuple(_number(n) for n in value.shape),
            stride=tuple(_number(n) for n in value.stride()),
            dtype=value.dtype,
            device=value.device,
        )
    if isinstance(value, _SYMBOLS):
        return _number(value)
    return value


def _number(value: object) -> int:
    """A plain number; of a symbolic one, its value in the trace."""
    if not isinstance(value, _SYMBOLS):
        return value  # type: ignore[return-value]
    if not value.node.has_hint():
        raise Unmeasurable(f"the size {value} is known only when the step runs")
    return value.node.hint  # type: ignore[no-any-return]


def operator_name(target: Callable[..., object]) -> str:
    """The operator's name as the graph prints it, such as ``aten.addmm.default``."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target._name}"
    module = getattr(target, "__module__", "")
    return f"{module}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def cost_key(call: OpCall) -> str:
    """One line of text that is equal for calls that cost the same.

    It has the operator; of each tensor type, sizes, strides and kind of device; constants in full.

    >>> from torch import ops, zeros
    >>> cost_key(OpCall(ops.aten.add.Tensor, (zeros(3, 5), 2.0)))
    'aten.add.Tensor(float32[3,5]{5,1}:cpu, 2.0)'
    """
    parts = [_text(value) for value in call.args]
    parts += [f"{name}={_text(call.kwargs[name])}" for name in sorted(call.kwargs)]
    return f"{operator_name(call.target)}({', '.join(parts)})"


def _text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(v) for v in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_text(value[k])}" for k in sorted(value, key=str)) + "}"
    try:
        value = _concrete_leaf(value)
    except Unmeasurable:
        return _unmeasurable_text(value)
    if isinstance(value, TensorSpec):
        dtype = str(value.dtype).removeprefix("torch.")
        shape, stride = (",".join(map(str, numbers)) for numbers in (value.shape, value.stride))
        return f"{dtype}[{shape}]{{{stride}}}:{value.device.type}"
    if isinstance(value, torch.device):
        return value.type  # all devices of a machine are held to be equal
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    return _object_text(value)


def _unmeasurable_text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        sizes = ",".join(map(str, value.shape))
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]:{value.device.type}"
    return str(value)


def _object_text(value: object) -> str:
    """Anything else: an operator by name, a subgraph by the hash of its code, others by type."""
    if isinstance(value, torch.fx.GraphModule):
        return f"graph:{hashlib.sha256(value.code.encode()).hexdigest()[:16]}"
    if callable(value):
        return operator_name(value)
    return type(value).__qualname__
