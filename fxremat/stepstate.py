"""Everything that a step may change: kept, put back, and seen after it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat.comparing import GRADIENT, SHARED, STRIDES, STRUCTURE, WHOLE_OUTPUT, Observed
from fxremat.errors import VerificationError
from fxremat.passes.seeding import tensors_in
from fxremat.pystate import PythonState

GRAPH_INPUT = "graph input"  # what only a trace has found


class StepState:
    """What a step may change, so that it can be put back.

    Steps begin without gradients, or with zeros for parameters where ``held`` says so. An argument
    that others computed is represented by a copy: a backward of ours must not run through theirs.
    """

    def __init__(
        self,
        module: nn.Module | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        held: bool,
        target: Callable[..., Any] | None = None,
    ) -> None:
        self.module = module
        self.held = held
        self.given = (tuple(args), dict(kwargs))
        found = list(tensors_in(self.given))
        self.tensors: dict[str, torch.Tensor] = {f"input {i}": t for i, t in enumerate(found)}
        self.leaves = {f"input {i}": again(t) for i, t in enumerate(found) if is_computed(t)}
        for name, leaf in self.leaves.items():
            self.tensors[name] = leaf.requires_grad_()
        self.computed = {id(found[int(name.split()[1])]): name for name in self.leaves}
        self._refuse_hidden()
        self.stand_ins: dict[str, torch.Tensor] = {}  # of those, for the step in progress
        self.kept: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor | None] = {}
        if module is not None:
            _refuse_uninitialised(module)
            self.tensors |= {f"parameter {n}": p for n, p in module.named_parameters()}
            self.tensors |= {f"buffer {n}": b for n, b in module.named_buffers()}
        self.python = PythonState([module, target, self.given])
        self.tensors |= self._attributes()
        self.generators = generator_states()
        self.keep()

    def _refuse_hidden(self) -> None:
        """Stand-ins can be put into containers, not into objects."""
        visible = {id(leaf) for leaf in pytree.tree_leaves(self.given)}
        for known, name in self.computed.items():
            if known not in visible:
                raise VerificationError(
                    f"{name} was computed from something that requires a gradient, and lies inside "
                    "an object that is no container. Detach it, or pass it by itself."
                )

    def _attributes(self) -> dict[str, torch.Tensor]:
        """Tensors that lie in Python's state and are not watched by another name."""
        known = {id(tensor) for tensor in (*self.tensors.values(), *self.stand_ins.values())}
        if self.module is not None:
            known |= {id(tensor) for tensor in self.module.buffers()}
        return {n: t for n, t in self.python.tensors().items() if id(t) not in known}

    def keep(self) -> None:
        """Copy what is not copied yet."""
        for name, tensor in self.tensors.items():
            if name not in self.kept:
                self.kept[name] = tensor.detach().clone()
                self.gradients[name] = tensor.grad if tensor.is_leaf else None

    def add(self, found: Sequence[tuple[str, Any]]) -> None:
        """Also watch what a trace found to be the inputs of its graph.

        Raises:
            VerificationError: One was computed by others; a backward would run through that.
        """
        own = [*self.tensors.values(), *self.stand_ins.values()]
        known = {id(tensor) for tensor in own}
        new = [(n, v) for n, v in found if isinstance(v, torch.Tensor) and id(v) not in known]
        for name, tensor in new:
            if is_computed(tensor):
                raise VerificationError(
                    f"the step reads {name}, which was computed outside of it from something that "
                    "requires a gradient. Pass it as an argument, or compute it inside."
                )
        self.tensors |= {f"{GRAPH_INPUT} {name}": value for name, value in new}
        self.keep()
        for _, tensor in new:
            self.clear(tensor)

    def clear(self, tensor: torch.Tensor) -> None:
        """Give a tensor the gradient that a step is to find."""
        if tensor.is_leaf:
            zeros = self.held and tensor.requires_grad and isinstance(tensor, nn.Parameter)
            tensor.grad = torch.zeros_like(tensor) if zeros else None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to call the step with; new stand-ins each time."""
        copy: Callable[[torch.Tensor], torch.Tensor] = _Again.apply
        made = {name: copy(leaf) for name, leaf in self.leaves.items()}
        self.stand_ins = made

        def stand_in(value: Any) -> Any:
            return made[self.computed[id(value)]] if id(value) in self.computed else value

        args, kwargs = pytree.tree_map(stand_in, self.given) if made else self.given
        return args, kwargs

    def put_back(self) -> None:
        """As it was, with the gradients that a step is to find."""
        self.python.put_back()
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if not _repeats(tensor):  # nobody can write to one that does
                    tensor.detach().copy_(self.kept[name])
                self.clear(tensor)
        set_generator_states(self.generators)

    def restore(self) -> None:
        """As it was, with the gradients that were there."""
        self.put_back()
        for name, tensor in self.tensors.items():
            if tensor.is_leaf:
                tensor.grad = self.gradients[name]

    def observe(self, output: Any) -> Observed:
        """What a step has left, on copies."""
        present = {**self.tensors, **self.stand_ins, **self._attributes()}
        if self.module is not None:
            present |= {f"buffer {n}": b for n, b in self.module.named_buffers()}
        outputs = {f"output {i}": t for i, t in enumerate(tensors_in(output))}
        gradients = {f"gradient of {n}": t.grad for n, t in self.tensors.items() if t.is_leaf}
        buffers = {n: t for n, t in present.items() if n.startswith("buffer")}
        return Observed(
            outputs=_copied(outputs),
            gradients=_copied(gradients),
            buffers=_copied(buffers),
            inputs=_copied({n: t for n, t in present.items() if n not in buffers}),
            generators=dict(generator_states()),
            traits={
                **_traits({**outputs, **gradients}, present),
                WHOLE_OUTPUT: {STRUCTURE: structure(output)},
            },
        )


def _refuse_uninitialised(module: nn.Module) -> None:
    """A step that makes its parameters cannot be run twice from one state."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    lazy = [name for name, tensor in tensors if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise VerificationError(
            f"{', '.join(lazy)} of {type(module).__name__} have no shape yet, so there is no "
            "state to run two steps from. Call the model once, under torch.no_grad(), before."
        )


class _Again(torch.autograd.Function):
    """A copy that is no leaf, and that hands its gradient on."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return again(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def again(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies as the tensor does, in memory of its own."""
    plain = tensor.detach()
    place = (plain.storage_offset(), plain.size(), plain.stride())
    return torch.empty(0, dtype=plain.dtype, device=plain.device).set_(
        plain.untyped_storage().clone(), *place
    )


def is_computed(tensor: torch.Tensor) -> bool:
    """Would a backward run on into what made it?"""
    return tensor.requires_grad and not tensor.is_leaf


def _repeats(tensor: torch.Tensor) -> bool:
    """Is one element of memory several of its elements?"""
    if tensor.layout is not torch.strided:
        return False
    return any(
        size > 1 and stride == 0
        for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )


def _copied(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {n: None if t is None else t.detach().clone() for n, t in tensors.items()}


def _traits(
    made: Mapping[str, torch.Tensor | None], present: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, object]]:
    """What a caller can see of outputs and gradients besides their bits."""
    sharing: dict[int, list[str]] = {}
    for name, tensor in {**present, **made}.items():
        if tensor is not None and tensor.layout is torch.strided and tensor.numel():
            sharing.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    with_whom = {name: names for names in sharing.values() for name in names}
    traits: dict[str, dict[str, object]] = {}
    for name, tensor in made.items():
        if tensor is None:
            continue
        others = [n for n in with_whom.get(name, ()) if n != name]
        traits[name] = {
            GRADIENT: tensor.requires_grad,
            STRIDES: _strides(tensor),
            SHARED: f"with {', '.join(others)}" if others else "with nothing",
        }
    return traits


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides, those of dimensions of one element as 0: they reach nothing."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return ()
    pairs = zip(tensor.size(), tensor.stride(), strict=True)
    return tuple(stride if size > 1 else 0 for size, stride in pairs)


def structure(value: Any) -> str:
    """A nested value without the numbers in its tensors: types, keys, constants.

    A tensor that is there twice is named by the number of its first place.
    """
    numbers: dict[int, int] = {}

    def parts(top: Any) -> Iterator[str]:
        if isinstance(top, torch.Tensor):
            yield f"tensor {numbers.setdefault(id(top), len(numbers))}"
        elif isinstance(top, dict):
            yield f"{type(top).__name__}{{"
            for key, item in top.items():
                yield from (f"{key!r}: ", *parts(item), ", ")
            yield "}"
        elif isinstance(top, list | tuple):
            yield f"{type(top).__name__}("
            for item in top:
                yield from (*parts(item), ", ")
            yield ")"
        elif top is None or isinstance(top, bool | int | float | str):
            yield repr(top)
        else:
            yield type(top).__name__

    return "".join(parts(value))


def generator_states() -> dict[str, torch.Tensor]:
    """States of the default generators."""
    states = {"generator cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"generator cuda:{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_generator_states(states: Mapping[str, torch.Tensor]) -> None:
    """Put the default generators back."""
    torch.set_rng_state(states["generator cpu"])
    if len(states) > 1:
        torch.cuda.set_rng_state_all([s for n, s in states.items() if n != "generator cpu"])
