"""Keys of calls, and the inputs that are made up for them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fxremat.passes.costs import OpCall, cost_key, measure_costs
from fxremat.passes.materialise import index_bounds, make_tensor, materialise
from fxremat.passes.opcall import TensorSpec, concrete

aten = torch.ops.aten


def _r(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes)


# Keys


def test_equal_calls_have_equal_keys_and_others_do_not() -> None:
    x, y = _r(3, 5), _r(3, 5)
    key = cost_key(OpCall(aten.add.Tensor, (x, 2.0)))
    assert key == "aten.add.Tensor(float32[3,5]{5,1}:cpu, 2.0)"
    assert key == cost_key(OpCall(aten.add.Tensor, (y, 2.0)))
    others = [
        OpCall(aten.sub.Tensor, (x, 2.0)),
        OpCall(aten.add.Tensor, (x, 3.0)),
        OpCall(aten.add.Tensor, (x, 2)),
        OpCall(aten.add.Tensor, (x.double(), 2.0)),
        OpCall(aten.add.Tensor, (_r(5, 3).t(), 2.0)),
        OpCall(aten.add.Tensor, (_r(3, 7), 2.0)),
        OpCall(aten.add.Tensor, (x.to("meta"), 2.0)),
        OpCall(aten.add.Tensor, (x, 2.0), {"alpha": 2}),
    ]
    keys = {cost_key(call) for call in others}
    assert len(keys) == len(others)
    assert key not in keys


def test_fake_and_real_tensors_have_the_same_key() -> None:
    x = _r(5, 3).t()
    fake = FakeTensorMode().from_tensor(x)
    assert cost_key(OpCall(aten.sin.default, (fake,))) == cost_key(OpCall(aten.sin.default, (x,)))


def test_keyword_order_does_not_matter() -> None:
    x = _r(3)
    one = OpCall(aten.sum.default, (x,), {"a": 1, "dtype": torch.float64})
    two = OpCall(aten.sum.default, (x,), {"dtype": torch.float64, "a": 1})
    assert cost_key(one) == cost_key(two)


# Inputs


def test_inputs_have_the_sizes_strides_and_types_of_the_call() -> None:
    broadcast = TensorSpec((3, 4, 5), (0, 5, 1), torch.bfloat16, torch.device("cpu"))
    tensor = make_tensor(broadcast)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((3, 4, 5), (0, 5, 1), torch.bfloat16)
    assert tensor.untyped_storage().nbytes() == broadcast.size_bytes == 2 * 20
    assert make_tensor(TensorSpec((0, 4), (4, 1), torch.float32, torch.device("cpu"))).numel() == 0
    large = make_tensor(TensorSpec((150_001,), (1,), torch.float32, torch.device("cpu")))
    assert torch.isfinite(large).all()
    assert large.std() == pytest.approx(1.0, rel=0.1)
    for dtype in (torch.bool, torch.complex64, torch.int32, torch.float16, torch.uint8):
        made = make_tensor(TensorSpec((7,), (1,), dtype, torch.device("cpu")))
        assert made.dtype == dtype


@pytest.mark.parametrize(
    ("call", "place", "bound"),
    [
        (OpCall(aten.embedding.default, (_r(11, 3), torch.zeros(400).long())), (1,), 11),
        (OpCall(aten.gather.default, (_r(5, 13), 1, torch.zeros(5, 400).long())), (2,), 13),
        (OpCall(aten.gather.default, (_r(5, 13), -1, torch.zeros(5, 400).long())), (2,), 13),
        (OpCall(aten.index.Tensor, (_r(7, 3), [None, torch.zeros(400).long()])), (1, 1), 3),
        (OpCall(aten.nll_loss_forward.default,
                (_r(400, 17), torch.zeros(400).long(), None, 1, -100)), (1,), 17),
        (OpCall(aten.nll_loss_backward.default,
                (_r(), _r(400, 17), torch.zeros(400).long(), None, 1, -100, _r())), (2,), 17),
        (OpCall(aten.embedding_dense_backward.default,
                (_r(400, 3), torch.zeros(400).long(), 19, -1, False)), (1,), 19),
        (OpCall(aten.scatter_add.default,
                (_r(23), 0, torch.zeros(400).long(), _r(400))), (2,), 23),
        (OpCall(aten.max_pool2d_with_indices_backward.default,
                (_r(1, 2, 4, 4), _r(1, 2, 8, 8), [2, 2], [2, 2], [0, 0], [1, 1], False,
                 torch.zeros(1, 2, 4, 4).long())), (7,), 64),
    ],
)  # fmt: skip
def test_indices_are_valid_and_spread(call: OpCall, place: tuple[int, ...], bound: int) -> None:
    spec = concrete(call.args)
    assert isinstance(spec, tuple)
    bounds = index_bounds(call.target._schema.name, spec)  # type: ignore[attr-defined]
    assert bounds[place] == bound
    made: object = materialise(spec, bounds, positive=False)
    for step in place:
        assert isinstance(made, (list, tuple))
        made = made[step]
    assert isinstance(made, torch.Tensor)
    assert made.min() >= 0
    assert bound > int(made.max()) > bound // 2
    assert not measure_costs([call], limit_s=0.5).guessed


def _put(
    shape: tuple[int, ...], indices: list[torch.Tensor | None], values: torch.Tensor
) -> OpCall:
    return OpCall(aten.index_put.default, (_r(*shape), indices, values))


def _mask(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "place", "trues"),
    [
        (_put((7, 3), [_mask(7)], _r(3)), (1, 0), 7),
        (_put((7, 3), [_mask(7)], _r(1, 3)), (1, 0), 7),
        (_put((7, 3), [_mask(7)], _r(5, 3)), (1, 0), 5),
        (_put((7, 3, 2), [_mask(7, 3)], _r(2)), (1, 0), 21),
        (_put((7, 3, 2), [_mask(7, 3)], _r(11, 2)), (1, 0), 11),
        (_put((7, 3, 2), [None, _mask(3)], _r(2, 2)), (1, 1), 2),
        (_put((7, 3), [torch.zeros(1).long(), _mask(3)], _r()), (1, 1), 3),
        (OpCall(aten.index.Tensor, (_r(7, 3), [_mask(7)])), (1, 0), 7),
        (OpCall(aten.nonzero_static.default, (_mask(7, 3),), {"size": 5}), (0,), 21),
        (OpCall(aten.nonzero_static.default, (torch.zeros(7, 3).int(),), {"size": 5}), (0,), 21),
    ],
)  # fmt: skip
def test_masks_that_become_lists_are_as_true_as_can_be(
    call: OpCall, place: tuple[int, ...], trues: int
) -> None:
    spec = concrete(call.args)
    assert isinstance(spec, tuple)
    bounds = index_bounds(call.target._schema.name, spec)  # type: ignore[attr-defined]
    made: object = materialise(spec, bounds, positive=False)
    for step in place:
        assert isinstance(made, (list, tuple))
        made = made[step]
    assert isinstance(made, torch.Tensor)
    assert int(made.count_nonzero()) == trues
    assert not measure_costs([call], limit_s=0.5).guessed


def test_an_index_behind_a_mask_counts_the_dimensions_behind_it() -> None:
    call = _put((7, 3, 5), [_mask(7, 3), torch.zeros(1).long()], _r())
    spec = concrete(call.args)
    assert isinstance(spec, tuple)
    assert index_bounds("aten::index_put", spec)[(1, 1)] == 5
