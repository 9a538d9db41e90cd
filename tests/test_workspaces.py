"""What operators hold inside themselves, to the byte, against the peak of a fresh call."""

from collections.abc import Iterator

import pytest
import torch

from fxremat.costtable import CostTable
from fxremat.passes.costs import OpCall, cost_key, measure_costs
from fxremat.passes.meter import measure_peak

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
