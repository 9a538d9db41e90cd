"""Inputs for an operator that is run only to be measured: right sizes and strides, harmless values.

Floats are random, since some kernels take other paths for zeros. Integers are zero, which is a
valid index into anything; where an operator is known to take indices they are spread over the valid
range, since a scatter that always hits one place is not as fast as a real one.

Some operators hold more or less inside themselves, depending on values: a mask that stands in an
index list becomes a list of its true places. Those get the values with which they hold the most.

Nothing here draws from torch's own generators.
"""

from collections.abc import Callable
from math import prod

import torch

from fxremat.passes.opcall import TensorSpec

Bounds = dict[tuple[int, ...], int]
"""Place in the arguments -> index below which values are valid; of a mask, how many are true."""

ONES = -1  # in place of a bound: every value is one
DISTINCT = -2  # in place of a bound: no value comes twice

_TILE = 1 << 16  # values that are really drawn; larger tensors repeat them, which is much faster
_SEED = 20


def _table(args: tuple[object, ...], table: int, index: int) -> Bounds:
    """``args[index]`` counts rows of ``args[table]``."""
    spec = args[table]
    return {(index,): spec.shape[0]} if isinstance(spec, TensorSpec) and spec.shape else {}


def _along(args: tuple[object, ...]) -> Bounds:
    """(self, dim, index, ...)"""
    spec, dim = args[0], args[1]
    if isinstance(spec, TensorSpec) and isinstance(dim, int) and spec.shape:
        return {(2,): spec.shape[dim]}
    return {}


def _fancy(args: tuple[object, ...]) -> Bounds:
    """(self, indices, values, ...) with one index tensor, mask or None after the other."""
    spec, indices = args[0], args[1]
    if not isinstance(spec, TensorSpec) or not isinstance(indices, (list, tuple)):
        return {}
    found: Bounds = {}
    dim = 0  # of ``spec``; a mask stands for as many as it has itself
    for place, index in enumerate(indices):
        mask = isinstance(index, TensorSpec) and index.dtype in (torch.bool, torch.uint8)
        if mask and isinstance(index, TensorSpec):
            dim += len(index.shape)
            found[(1, place)] = _trues(index, len(spec.shape) - dim, args)
        else:
            found[(1, place)] = spec.shape[dim] if dim < len(spec.shape) else 0
            dim += 1
    return found


def _trues(mask: TensorSpec, behind: int, args: tuple[object, ...]) -> int:
    """How many elements of a mask can be true at most: all, unless values for each are given.

    Args:
        mask: It stands in an index list.
        behind: Dimensions of ``self`` behind those of the mask.
        args: (self, indices, values, ...), or without values.
    """
    values = args[2] if len(args) > 2 else None
    if mask.dtype == torch.bool and isinstance(values, TensorSpec) and len(values.shape) > behind:
        count = values.shape[-behind - 1]
        if count != 1:
            return count
    return ONES


def _classes(scores: int) -> Callable[[tuple[object, ...]], Bounds]:
    """(..., scores, target, ...): targets count the classes, dimension 1 of a batch of scores."""

    def bounds(args: tuple[object, ...]) -> Bounds:
        spec = args[scores]
        if not isinstance(spec, TensorSpec) or not spec.shape:
            return {}
        return {(scores + 1,): spec.shape[1 if len(spec.shape) > 1 else 0]}

    return bounds


def _pooled(dims: int, index: int) -> Callable[[tuple[object, ...]], Bounds]:
    """(grad, self, ..., indices): indices count the pixels of ``self``."""

    def bounds(args: tuple[object, ...]) -> Bounds:
        spec = args[1]
        return {(index,): prod(spec.shape[-dims:])} if isinstance(spec, TensorSpec) else {}

    return bounds


def _rows(args: tuple[object, ...]) -> Bounds:
    """(grad, indices, num_weights, ...)"""
    return {(1,): args[2]} if isinstance(args[2], int) else {}


_BOUNDS: dict[str, Callable[[tuple[object, ...]], Bounds]] = {
    "aten::embedding": lambda args: _table(args, 0, 1),
    "aten::embedding_dense_backward": _rows,
    "aten::_embedding_bag": lambda args: _table(args, 0, 1),
    "aten::_embedding_bag_backward": lambda args: {(4,): ONES},  # of bags; empty ones cost nothing
    "aten::_embedding_bag_dense_backward": lambda args: {(3,): ONES},
    **dict.fromkeys(
        ("aten::linalg_lu_solve", "aten::lu_unpack", "aten::linalg_ldl_solve"),
        lambda args: {(1,): ONES},  # pivots count from one
    ),
    "aten::_embedding_bag_forward_only": lambda args: _table(args, 0, 1),
    **dict.fromkeys(
        (
            "aten::gather", "aten::scatter", "aten::scatter_", "aten::scatter_add",
            "aten::scatter_add_", "aten::scatter_reduce", "aten::scatter_reduce_",
            "aten::index_select", "aten::index_add", "aten::index_add_", "aten::index_copy",
            "aten::index_copy_", "aten::index_fill", "aten::index_reduce",
        ),
        _along,
    ),
    **dict.fromkeys(
        (
            "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_",
            "aten::_unsafe_index_put", "aten::_index_put_impl_",
        ),
        _fancy,
    ),
    "aten::nonzero_static": lambda args: {(0,): ONES},
    "aten::isin": lambda args: {(0,): DISTINCT, (1,): DISTINCT},  # it sorts the distinct ones
    "aten::nll_loss_forward": _classes(0),
    "aten::nll_loss2d_forward": _classes(0),
    "aten::nll_loss_backward": _classes(1),
    "aten::nll_loss2d_backward": _classes(1),
    "aten::max_pool2d_with_indices_backward": _pooled(2, 7),
    "aten::max_pool3d_with_indices_backward": _pooled(3, 7),
    "aten::adaptive_max_pool2d_backward": _pooled(2, 2),
    "aten::adaptive_max_pool3d_backward": _pooled(3, 2),
}  # fmt: skip


def index_bounds(operator: str, args: tuple[object, ...]) -> Bounds:
    """Where the arguments of an operator hold indices, and their upper limits.

    Args:
        operator: Its name without overload, such as "aten::gather".
        args: Its arguments, tensors as specs.
    """
    return _BOUNDS[operator](args) if operator in _BOUNDS else {}


def materialise(
    value: object, bounds: Bounds, *, positive: bool, path: tuple[int, ...] = ()
) -> object:
    """The same arguments with a real tensor for every spec.

    Args:
        value: Arguments, tensors as specs.
        bounds: What ``index_bounds`` found.
        positive: Draw floats from [0, 1) instead of a normal distribution.
        path: Where ``value`` stands in the arguments.
    """
    if isinstance(value, TensorSpec):
        return make_tensor(value, bounds.get(path), positive=positive)
    if isinstance(value, (list, tuple)):
        made = [
            materialise(v, bounds, positive=positive, path=(*path, i)) for i, v in enumerate(value)
        ]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {k: materialise(v, {}, positive=positive) for k, v in value.items()}
    return value


def make_tensor(
    spec: TensorSpec, bound: int | None = None, *, positive: bool = False
) -> torch.Tensor:
    """One tensor of exactly these sizes and strides, in the smallest storage that holds it."""
    flat = torch.empty(spec.elements, dtype=spec.dtype, device=spec.device)
    if spec.elements:
        _fill(flat, bound, positive=positive)
    return flat.as_strided(spec.shape, spec.stride)


def _fill(flat: torch.Tensor, bound: int | None, *, positive: bool) -> None:
    """Write values, a tile of random ones over and over."""
    if bound == ONES:
        flat.fill_(1)
        return
    if bound == DISTINCT:
        flat.copy_(torch.arange(flat.numel(), device=flat.device))
        return
    if flat.dtype == torch.bool and bound is not None:
        flat[:bound] = True
        flat[bound:] = False
        return
    count = min(_TILE, flat.numel())
    source = torch.Generator("cpu").manual_seed(_SEED)
    if flat.dtype == torch.bool:
        tile = torch.rand(count, generator=source, device="cpu") < 0.5
    elif flat.is_floating_point() or flat.is_complex():
        kind = torch.cfloat if flat.is_complex() else torch.float32
        draw = torch.rand if positive else torch.randn
        tile = draw(count, generator=source, device="cpu", dtype=kind)
    elif bound is not None and bound > 1:
        tile = torch.randint(bound, (count,), generator=source, device="cpu")
    else:
        flat.fill_(0)
        return
    tile = tile.to(device=flat.device, dtype=flat.dtype)
    whole = flat.numel() // count * count
    flat[:whole].view(-1, count).copy_(tile)
    flat[whole:].copy_(tile[: flat.numel() - whole])
