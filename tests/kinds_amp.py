"""Tiny models in mixed precision, after what users report."""

import contextlib
from typing import Any

import torch
from torch import nn

from tests.steps import Made, Make, apply, bound, leaf


class Nested(nn.Module):
    """A region of full precision within one of half."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(10, 30), nn.Linear(30, 10), nn.LayerNorm(10)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=self.dtype):
            h = nn.functional.gelu(self.a(x))
            with torch.autocast("cpu", enabled=False):
                h = h.float().softmax(-1) * h.float()
            y = self.b(h)
            with torch.autocast("cpu", enabled=False):
                y = self.norm(y.float() + x)
            return self.a(y).sin()


def nested_regions() -> Made:
    return Nested(torch.bfloat16), (leaf(16, 10),)


def nested_regions_in_half() -> Made:
    return Nested(torch.float16), (leaf(16, 10),)


def weight_cast_without_gradients_first() -> Made:
    layer = nn.Linear(9, 9)

    def step(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                hint = layer(x).mean(0)
            return (torch.tanh(layer(x)) * hint).float()

    return bound(step, layer), (leaf(21, 9),)


def cache_switched_off() -> Made:
    layer = nn.Linear(9, 9)

    def step(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return layer(torch.tanh(layer(x))).float().exp()

    return bound(step, layer), (leaf(21, 9),)


def scaled_loss() -> Made:
    layer, head = nn.Linear(9, 27), nn.Linear(27, 5)

    def step(x: torch.Tensor, scale: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.float16):
            h = nn.functional.dropout(layer(x).relu(), 0.25)
            loss = nn.functional.cross_entropy(head(h), torch.arange(20) % 5)
        return loss * scale

    return bound(step, layer, head), (leaf(20, 9), torch.tensor(1024.0))


def overflowing_scale() -> Made:
    layer = nn.Linear(9, 9)

    def step(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.float16):
            h = layer(layer(x).tanh() * 60000.0)
        return (h * h).float().sin()

    return bound(step, layer), (leaf(20, 9),)


class CastIn(torch.autograd.Function):
    """Runs in full precision wherever it is called."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return torch.sin(x @ w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        inner = gradients[0] * torch.cos(x @ w)
        return inner @ w.t(), x.t() @ inner


def own_function_in_full_precision() -> Made:
    layer = nn.Linear(9, 9)

    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(apply(CastIn, layer(x), w)).tanh()

    return bound(step, layer), (leaf(20, 9), leaf(9, 9))


class CastAlong(torch.autograd.Function):
    """Runs in the precision of its surroundings, also in the backward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return torch.mm(x, w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return torch.mm(gradients[0], w.t()).to(x.dtype), torch.mm(x.t(), gradients[0]).to(w.dtype)


def own_function_in_the_precision_around() -> Made:
    layer = nn.Linear(9, 9)

    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(apply(CastAlong, torch.sin(layer(x)), w)).tanh().float()

    return bound(step, layer), (leaf(20, 9), leaf(9, 9))


def residual_in_full_precision() -> Made:
    a, b = nn.Linear(9, 18).bfloat16(), nn.Linear(18, 9).bfloat16()
    norm = nn.LayerNorm(9)

    def step(x: torch.Tensor) -> Any:
        for _ in range(2):
            x = x + b(nn.functional.silu(a(norm(x).bfloat16()))).float()
        return x

    return bound(step, a, b, norm), (leaf(20, 9),)


def decorated() -> Made:
    class Decorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)

        @torch.autocast("cpu", dtype=torch.bfloat16)  # type: ignore[untyped-decorator]
        def forward(self, x: torch.Tensor) -> Any:
            h = nn.functional.dropout2d(self.norm(self.conv(x)).relu(), 0.3)
            return h.flatten(1).logsumexp(1)

    return Decorated(), (leaf(5, 3, 8, 8),)


def asking_for_the_mode() -> Made:
    layer = nn.Linear(9, 9)

    def step(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if torch.is_autocast_enabled("cpu"):
                x = x.to(torch.get_autocast_dtype("cpu"))
            h = layer(x)
        return torch.sin(h).float() if h.dtype == torch.bfloat16 else h

    return bound(step, layer), (leaf(20, 9),)


def attention_in_half() -> Made:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                q, k, v = self.mix(x).view(2, 7, 3, 3, 4).permute(2, 0, 3, 1, 4)
                y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                return self.out(y.transpose(1, 2).flatten(2))

    return Attend(), (leaf(2, 7, 12),)


def double_and_single() -> Made:
    layer = nn.Linear(9, 9)

    def step(x: torch.Tensor) -> Any:
        h = layer(x)
        precise = h.double().exp().cumsum(0).log()
        return (precise - precise.mean()).float() * h, precise

    return bound(step, layer), (leaf(20, 9),)


def mode_around_the_call() -> Made:
    layer = nn.Linear(9, 9)

    def step(x: torch.Tensor) -> Any:
        return layer(torch.tanh(layer(x))).float().exp()

    return bound(step, layer, around=lambda: torch.autocast("cpu", dtype=torch.bfloat16)), (
        leaf(21, 9),
    )


def switched_by_an_argument() -> Made:
    layer = nn.Linear(9, 9)

    def step(x: torch.Tensor, *, half: bool = True) -> Any:
        mode: Any = torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext()
        with mode:
            return layer(x).sin().float()

    return bound(step, layer), (leaf(20, 9),)


HOLD = (
    weight_cast_without_gradients_first, cache_switched_off, overflowing_scale,
    residual_in_full_precision, decorated, asking_for_the_mode, attention_in_half,
    double_and_single, switched_by_an_argument,
)  # fmt: skip
# AOTAutograd adds up gradients in another order than eager, or draws where eager does not.
AS_TRACED: tuple[Make, ...] = (
    nested_regions, nested_regions_in_half, scaled_loss, own_function_in_full_precision,
    own_function_in_the_precision_around, mode_around_the_call,
)  # fmt: skip
UNMEASURED: tuple[Make, ...] = ()
OPEN: tuple[Make, ...] = ()
REFUSED: tuple[Make, ...] = ()
