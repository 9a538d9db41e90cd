"""What operators hold inside themselves, to the byte, against the peak of a fresh call."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils import _pytree as pytree

import fxremat
from fxremat.costtable import CostTable
from fxremat.passes.costs import OpCall, cost_key, measure_costs
from fxremat.passes.meter import measure_peak
from tests.steps import CACHE

aten = torch.ops.aten
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CONV = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def _r(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes)


def _last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _calls() -> dict[str, OpCall]:
    """Operators with and without hidden workspaces."""
    q = _r(2, 3, 37, 16)
    heads = _r(2, 37, 3, 16).transpose(1, 2)
    image, weight = _r(2, 5, 17, 19), _r(7, 5, 3, 3)
    rows, stats = _r(67, 31), _r(67, 1)
    return {
        "mm": OpCall(aten.mm.default, (_r(31, 37), _r(37, 29))),
        "mm_transposed": OpCall(aten.mm.default, (_r(37, 31).t(), _r(29, 37).t())),
        "mm_odd_strides": OpCall(aten.mm.default, (_r(31, 74)[:, ::2], _r(74, 29)[::2])),
        "mm_bf16": OpCall(aten.mm.default, (_r(31, 37).bfloat16(), _r(37, 29).bfloat16())),
        "addmm_expanded": OpCall(aten.addmm.default, (_r(29), _r(31, 37), _r(37, 29))),
        "add_scalar": OpCall(aten.add.Tensor, (_r(101), 1)),
        "dropout": OpCall(aten.native_dropout.default, (_r(101, 13), 0.1, True)),
        "softmax": OpCall(aten._softmax.default, (_r(31, 7, 5), 1, False)),
        "conv": OpCall(aten.convolution.default, (image, weight, None, *CONV)),
        "conv_bias": OpCall(aten.convolution.default, (image, weight, _r(7), *CONV)),
        "conv_last": OpCall(aten.convolution.default, (_last(image), _last(weight), None, *CONV)),
        "conv_mixed": OpCall(aten.convolution.default, (_last(image), weight, _r(7), *CONV)),
        "conv_backward": OpCall(
            aten.convolution_backward.default,
            (_r(2, 7, 17, 19), image, weight, [7], *CONV, [True, True, True]),
        ),
        "conv_backward_last": OpCall(
            aten.convolution_backward.default,
            (_last(_r(2, 7, 17, 19)), _last(image), _last(weight), [7], *CONV, [True, True, True]),
        ),
        "conv_backward_weight": OpCall(
            aten.convolution_backward.default,
            (_r(2, 7, 17, 19), image, weight, [0], *CONV, [False, True, False]),
        ),
        "sdpa": OpCall(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q)),
        "sdpa_strided": OpCall(
            aten._scaled_dot_product_flash_attention_for_cpu.default, (heads, heads, heads)
        ),
        "sdpa_backward": OpCall(
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            (q, q, q, q, q, _r(2, 3, 37), 0.0, True),
        ),
        "layer_norm_backward": OpCall(
            aten.native_layer_norm_backward.default,
            (rows, rows, [31], stats, stats.abs(), _r(31), _r(31), [True, True, True]),
        ),
        "group_norm": OpCall(
            aten.native_group_norm.default, (_r(2, 6, 5, 7), _r(6), _r(6), 2, 6, 35, 3, 1e-5)
        ),
        "batch_norm_last": OpCall(
            aten._native_batch_norm_legit_functional.default,
            (_last(_r(3, 5, 7, 11)), _r(5), _r(5), _r(5), _r(5).abs(), True, 0.1, 1e-5),
        ),
        "sum": OpCall(aten.sum.dim_IntList, (_r(31, 37), [0], True)),
        "embedding": OpCall(aten.embedding.default, (_r(13, 5), torch.randint(13, (3, 7)))),
        "view": OpCall(aten.view.default, (_r(6, 5), [5, 6])),
    }


CALLS = _calls()
# Those that are known to hold more than they return, whatever the processor.
HIDDEN = ("dropout", "conv", "conv_backward", "sdpa", "sdpa_backward", "layer_norm_backward")


@pytest.fixture(scope="module")
def measured() -> CostTable:
    return measure_costs(list(CALLS.values()), limit_s=6.0)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)


def _new_bytes(call: OpCall, result: object) -> int:
    """Bytes of the storages that a result has and the arguments have not."""
    old = {t.untyped_storage().data_ptr() for t in _tensors(list(call.args))}
    new = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(result)}
    return sum(size_bytes for address, size_bytes in new.items() if address not in old)


@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_workspace_are_the_peak_of_a_fresh_call(name: str, measured: CostTable) -> None:
    call = CALLS[name]
    results: list[object] = []

    def run() -> None:
        results.append(call.target(*call.args, **call.kwargs))

    with torch.no_grad():
        peak = measure_peak(run, device="cpu")
    cost = measured[cost_key(call)]
    assert cost_key(call) not in measured.guessed
    assert _new_bytes(call, results[0]) + cost.workspace_bytes == peak.peak_bytes
    assert peak.end_bytes == _new_bytes(call, results[0])
    assert 0 < cost.cost_ns < 1_000_000_000


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_workspaces_are_found(name: str, measured: CostTable) -> None:
    assert measured[cost_key(CALLS[name])].workspace_bytes > 0


def test_workspaces_repeat_exactly(measured: CostTable) -> None:
    again = measure_costs([CALLS[name] for name in HIDDEN], limit_s=2.0)
    assert {k: again[k].workspace_bytes for k in again} == {
        k: measured[k].workspace_bytes for k in again
    }


def test_the_table_says_what_it_was_measured_on(measured: CostTable) -> None:
    assert measured.kind == "measured"
    assert measured.torch_version == torch.__version__
    assert measured.threads == torch.get_num_threads()
    assert measured.device
    assert list(measured) == [cost_key(call) for call in CALLS.values()]
    assert not measured.guessed


N = 601
_MASK, _EVERY = torch.zeros(N, dtype=torch.bool), torch.zeros(N, 4, dtype=torch.bool)
_INDEX = torch.zeros(N).long()


def _choosing() -> dict[str, OpCall]:
    """Operators that hold more or less, depending on masks and integers."""
    rows, words = _r(N, 4), _r(N, 8)
    zeros = torch.zeros(N, 4).long()
    return {
        "row by a mask": OpCall(aten.index_put.default, (rows, [_MASK], _r(4))),
        "row added by a mask": OpCall(aten.index_put.default, (rows, [_MASK], _r(4), True)),
        "rows by a mask": OpCall(aten.index_put.default, (rows, [_MASK], _r(599, 4))),
        "half numbers by a mask": OpCall(
            aten.index_put.default, (_r(N).bfloat16(), [_MASK], _r(599).bfloat16())
        ),
        "numbers by a mask": OpCall(aten.index_put.default, (rows, [_EVERY], _r(1))),
        "row by a mask of two dimensions": OpCall(
            aten.index_put.default, (_r(N, 4, 3), [_EVERY], _r(3))
        ),
        "columns by a mask": OpCall(aten.index_put.default, (_r(3, N), [None, _MASK], _r(3, 1))),
        "by an index": OpCall(aten.index_put.default, (rows, [_INDEX], rows, True)),
        "masked_scatter": OpCall(aten.masked_scatter.default, (rows, _EVERY, rows)),
        "masked_fill": OpCall(aten.masked_fill.Scalar, (rows, _EVERY, 0.5)),
        "nonzero_static": OpCall(aten.nonzero_static.default, (_EVERY,), {"size": 7}),
        "nonzero_static of integers": OpCall(aten.nonzero_static.default, (zeros,), {"size": 7}),
        "isin": OpCall(aten.isin.Tensor_Tensor, (zeros, _INDEX)),
        "scatter_add": OpCall(aten.scatter_add.default, (rows, 0, zeros, rows)),
        "scatter_reduce": OpCall(aten.scatter_reduce.two, (rows, 0, zeros, rows, "mean")),
        "index_add": OpCall(aten.index_add.default, (rows, 0, _INDEX, rows)),
        "embedding_dense_backward": OpCall(
            aten.embedding_dense_backward.default, (words, _INDEX, N, 3, True)
        ),
        "embedding_bag with padding": OpCall(
            aten._embedding_bag.default,
            (words, _INDEX, torch.arange(0, N, 5), False, 1, False, None, False, 3),
        ),
        "sort": OpCall(aten.sort.default, (_INDEX,)),
        "kthvalue": OpCall(aten.kthvalue.default, (_INDEX, 5)),
        "bincount": OpCall(aten.bincount.default, (_INDEX, None, N)),
    }


CHOOSING = _choosing()
VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": torch.zeros_like,
    "all alike": lambda t: torch.full_like(t, True if t.dtype == torch.bool else N - 1),
    "all but two": lambda t: (torch.arange(t.numel()).view(t.shape) >= 2).to(t.dtype),
    "sorted": lambda t: (torch.arange(t.numel()) % N).view(t.shape).to(t.dtype),
}


@pytest.fixture(scope="module")
def chosen() -> CostTable:
    return measure_costs(list(CHOOSING.values()), limit_s=6.0)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", CHOOSING)
def test_no_mask_and_no_index_makes_an_operator_hold_more(
    name: str, values: str, chosen: CostTable
) -> None:
    call = CHOOSING[name]
    given = (torch.bool, torch.int64)

    def filled(value: object) -> object:
        wanted = isinstance(value, torch.Tensor) and value.dtype in given and value.numel() >= N
        return VALUES[values](value) if wanted and isinstance(value, torch.Tensor) else value

    args = pytree.tree_map(filled, call.args)
    results: list[object] = []
    with torch.no_grad():
        try:
            peak = measure_peak(
                lambda: results.append(call.target(*args, **call.kwargs)), device="cpu"
            )
        except RuntimeError as error:
            assert "shape mismatch" in str(error)  # noqa: PT017  # why: as many as there are values
            return
    cost = chosen[cost_key(call)]
    assert cost_key(call) not in chosen.guessed
    assert peak.peak_bytes <= _new_bytes(call, results[0]) + cost.workspace_bytes


def rows_by_a_mask(h: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    h[mask] = value
    return h


def columns_by_a_mask(h: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    turned = h.t().contiguous()
    turned[:, mask] = value[:, None]
    return turned


def rows_added_by_a_mask(h: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return h.index_put((mask,), value, accumulate=True)


@pytest.mark.parametrize("put", [rows_by_a_mask, columns_by_a_mask, rows_added_by_a_mask])
@pytest.mark.parametrize("least", [False, True])
def test_a_step_holds_its_budget_whatever_a_mask_says(
    put: Callable[..., torch.Tensor], least: bool
) -> None:
    layer, x, value = torch.nn.Linear(4, 4), _r(4001, 4), _r(4)
    budget: int | str = "100%"

    def loss(mask: torch.Tensor) -> torch.Tensor:
        return put(layer(x).sin() * 1.0, mask, value).exp().sum()

    if least:
        with pytest.raises(fxremat.InfeasibleBudgetError) as refused:
            fxremat.optimize(loss, 1, cache_dir=CACHE)(torch.ones(4001).bool())
        budget = refused.value.floor_bytes
    step = fxremat.optimize(loss, budget, cache_dir=CACHE)
    measured = []
    for mask in (torch.zeros(4001).bool(), torch.ones(4001).bool()):
        step(mask).backward()
        layer.zero_grad()
        peak = measure_peak(lambda mask=mask: step(mask).backward())  # type: ignore[misc]
        layer.zero_grad()
        report = fxremat.report(step)
        measured.append(peak.peak_bytes + report.resident_bytes)
        assert measured[-1] <= report.predicted_peak_bytes <= report.budget_bytes
    assert measured[1] >= measured[0]


@pytest.mark.cuda
@needs_cuda
def test_cuda_costs() -> None:
    def on_gpu(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda")

    calls = [
        OpCall(aten.mm.default, (on_gpu(512, 512), on_gpu(512, 512))),
        OpCall(aten.native_dropout.default, (on_gpu(1024, 13), 0.1, True)),
        OpCall(aten.convolution.default, (on_gpu(2, 5, 17, 19), on_gpu(7, 5, 3, 3), None, *CONV)),
        OpCall(aten.embedding.default, (on_gpu(7, 5), torch.zeros(9, device="cuda").long())),
    ]
    state = torch.cuda.get_rng_state()
    table = measure_costs(calls, limit_s=5.0)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert not table.guessed
    for call in calls:
        call.target(*call.args)
        results: list[object] = []
        peak = measure_peak(lambda: results.append(call.target(*call.args)), device="cuda")  # noqa: B023
        assert peak.peak_bytes == peak.end_bytes + table[cost_key(call)].workspace_bytes
        assert table[cost_key(call)].cost_ns > 0
