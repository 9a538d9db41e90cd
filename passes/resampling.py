"""Resampling (``F.interpolate``, ``nn.Upsample``) as one operator, as eager runs it.

For tracing, torch registers Python code that makes bilinear and bicubic resampling of a dozen plain
operators; they round otherwise and keep more. Without that code the trace has the operator itself.
Private to torch: an overload's table of Python kernels and its cache.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@functools.cache
def _overloads() -> tuple[Any, ...]:
    """Resampling operators of which the trace would be another than eager's."""
    names = (n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names())
    split = (n.partition(".") for n in sorted(names) if n.lstrip("_").startswith("upsample_"))
    found = (getattr(getattr(torch.ops.aten, name), to or "default") for name, _, to in split)
    return tuple(each for each in found if any(key in each.py_kernels for key in _KEYS))


@contextlib.contextmanager
def whole_resampling(*, wanted: bool) -> Iterator[None]:
    """While a graph is traced: resampling stays one operator.

    Args:
        wanted: Inductor fuses the plain operators and is better left alone.
    """
    taken = [
        (each, key, each.py_kernels.pop(key))
        for each in (_overloads() if wanted else ())
        for key in _KEYS
        if key in each.py_kernels
    ]
    try:
        _forget(taken)
        yield
    finally:
        for each, key, kernel in taken:
            each.py_kernels[key] = kernel
        _forget(taken)


def _forget(taken: list[tuple[Any, DispatchKey, Any]]) -> None:
    """Let each operator choose its kernels anew."""
    for each, _, _ in taken:
        each._dispatch_cache.clear()
