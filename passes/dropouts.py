"""Dropout in a trace as eager runs it, where torch's own decomposition is another function.

Python's decomposition of ``aten.dropout`` (torch/_decomp/decompositions.py, 2.11 to 2.13) returns a
copy where eager returns the argument itself (p = 0, or no training), so that a write to the result
misses the argument; for p = 1 it draws a mask where eager multiplies by zero and leaves the
generator alone; and its scale is rounded once where eager's on the CPU is rounded twice, which for
p = 0.15 differs in the last bit, and in 16 bits for nearly every p.
"""

import contextlib
import struct
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey

_DROPOUT: Any = torch.ops.aten.dropout.default
_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)

if not all(key in getattr(_DROPOUT, "py_kernels", {}) for key in _KEYS):
    raise ImportError(
        "fxremat mends the decomposition of aten.dropout, which torch "
        f"{torch.__version__} registers elsewhere; torch 2.11 to 2.13 do so in py_kernels"
    )

_THEIRS: dict[DispatchKey, Any] = {key: _DROPOUT.py_kernels[key] for key in _KEYS}


def _dropout(value: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """What ATen/native/Dropout.cpp does, with a mask of one byte that a plan can keep."""
    if p == 0 or not train:
        return value
    if p == 1:
        return value.mul(torch.zeros((), dtype=value.dtype, device=value.device))
    if value.device.type == "cpu" and _rounds_otherwise(p, value.dtype):
        # It draws into memory laid out like value, as eager does; in a trace bernoulli_ would not.
        kept = torch.native_dropout(value, p, train)[1]
        return value * kept.to(value.dtype).div(1 - p)
    dropped: torch.Tensor = torch.native_dropout(value, p, train)[0]
    return dropped


def _rounds_otherwise(p: float, dtype: torch.dtype) -> bool:
    """Does the scale of ``native_dropout`` differ from that of eager's dropout?

    Eager divides a mask of the value's own type; there a type of 16 bits has rounded the scale.
    """
    if dtype == torch.float32:
        return _rounded(1 / _rounded(1 - p)) != _rounded(1 / (1 - p))
    if dtype in (torch.bfloat16, torch.float16):
        return float(torch.tensor(1 / (1 - p), dtype=dtype)) != 1 / (1 - p)
    return False


def _rounded(value: float) -> float:
    """The nearest float of 32 bits."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


class _Depth:
    """How many traces are in progress, in all threads."""

    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.Lock()

    def change(self, by: int) -> None:
        """A trace begins or ends; the first and the last of them change the kernels."""
        with self.lock:
            self.count += by
            kernels = dict.fromkeys(_KEYS, _dropout) if self.count else _THEIRS
            if _DROPOUT.py_kernels[_KEYS[0]] is not kernels[_KEYS[0]]:
                _DROPOUT.py_kernels.update(kernels)
                _DROPOUT._dispatch_cache.clear()


_depth = _Depth()


@contextlib.contextmanager
def dropout_as_it_runs() -> Iterator[None]:
    """While torch traces: dropout as eager runs it."""
    _depth.change(+1)
    try:
        yield
    finally:
        _depth.change(-1)
