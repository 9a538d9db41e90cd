"""CUDA: what can be decided without a GPU, and, marked ``cuda``, what only one can show."""

import operator
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812

import fxremat
from fxremat.passes.calls import FROM_MASK, NATIVE_DROPOUT, has_mask, mask_arguments, state_bytes
from fxremat.passes.costs import OpCall, cost_key, measure_costs
from fxremat.passes.effects import _is_transposed_convolution
from fxremat.passes.opcall import TensorSpec
from fxremat.passes.storages import round_up
from fxremat.passes.workbench import make_job

ATEN = torch.ops.aten
GPU = torch.device("cuda", 0)


def dropout_node(value: Tensor, p: float) -> fx.Node:
    """A dropout in a graph of its own, with both parts read."""
    graph = fx.Graph()
    given = graph.placeholder("x")
    node = graph.call_function(NATIVE_DROPOUT, (given, p, True))
    given.meta["val"] = value
    node.meta["val"] = (value, value)
    for part in (0, 1):
        graph.call_function(operator.getitem, (node, part))
    return node


def fake(*shape: int, device: torch.device = GPU, dtype: torch.dtype = torch.float32) -> Tensor:
    """A fake tensor; no device is needed."""
    with FakeTensorMode():
        return torch.empty(shape, device=device, dtype=dtype)


def scale_of(value: Tensor, p: float) -> float:
    return mask_arguments(dropout_node(value, p), None, None)[2]


def test_the_scale_of_a_dropout_is_that_of_its_own_kernel() -> None:
    keep = torch.tensor(1 - 0.15, dtype=torch.float32).double().item()
    assert scale_of(fake(2), 0.15) == 1 / keep
    assert scale_of(fake(2, dtype=torch.bfloat16), 0.15) == 1 / keep
    assert scale_of(fake(2, dtype=torch.float64), 0.15) == 1 / (1 - 0.15)
    assert scale_of(fake(2, device=torch.device("cpu")), 0.15) == 1 / (1 - 0.15)
    as_float = torch.tensor([1 / keep, 1 / (1 - 0.15)], dtype=torch.float32)
    assert as_float[0] != as_float[1]  # what this is about


def test_a_dropout_of_everything_has_no_replay_from_its_mask() -> None:
    assert has_mask(dropout_node(fake(2), 0.9))
    assert not has_mask(dropout_node(fake(2), 1.0))


def test_the_state_of_a_cuda_generator_takes_no_device_bytes() -> None:
    assert state_bytes(dropout_node(fake(2), 0.5)) == 0
    assert state_bytes(dropout_node(fake(2, device=torch.device("cpu")), 0.5)) == 5056


@pytest.mark.parametrize(
    ("size_bytes", "rounded"), [(0, 0), (1, 512), (512, 512), (513, 1024), (1 << 20, 1 << 20)]
)
def test_requests_are_rounded_to_blocks(size_bytes: int, rounded: int) -> None:
    assert round_up(size_bytes, GPU) == rounded
    assert round_up(size_bytes, torch.device("cpu")) == size_bytes


def attention_backward(dropout_p: float, device: torch.device = GPU) -> OpCall:
    """The backward of the attention that float32 gets on CUDA, as a trace describes it."""
    q = fake(2, 4, 64, 32, device=device)
    sums = fake(2, 4, 64, device=device)
    seed = fake(device=device, dtype=torch.int64)
    mask = [True, True, True, False]
    args = (q, q, q, q, None, q, sums, seed, seed, dropout_p, mask, True)
    return OpCall(ATEN._scaled_dot_product_efficient_attention_backward.default, args, {})


def test_seeds_that_the_host_reads_are_made_on_the_host() -> None:
    call = attention_backward(0.1)
    job = make_job(cost_key(call), call)
    places = [spec.device.type for spec in job.args if isinstance(spec, TensorSpec)]
    assert places == ["cuda"] * 6 + ["cpu"] * 2
    assert job.cuda_device == GPU


def test_transposed_convolutions_run_once_unless_made_deterministic() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    ones = ([1, 1], [0, 0], [1, 1])
    plain = graph.call_function(ATEN.convolution.default, (x, w, None, *ones, False, [0, 0], 1))
    transposed = graph.call_function(ATEN.convolution.default, (x, w, None, *ones, True, [0, 0], 1))
    assert _is_transposed_convolution(transposed)
    assert not _is_transposed_convolution(plain)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is an error only without a CUDA device")
def test_a_capture_for_an_absent_device_is_refused_before_torch_gives_up() -> None:
    with pytest.raises(fxremat.CaptureError, match="no CUDA device"):
        fxremat.capture(lambda x: x.sum(), (fake(3),), costs="roofline", cache_dir=False)


# What follows needs a GPU.


class Block(nn.Module):
    """Attention and a perceptron, with dropout in both."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.p = p
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.norm1(x)).split(width, dim=-1)
        q, k, v = (part.view(batch, length, 4, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)
        x = x + F.dropout(self.project(y.transpose(1, 2).reshape(x.shape)), self.p)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.p)


class Loss(nn.Module):
    def __init__(self, width: int, depth: int, p: float) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, p) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mean(self.blocks(x).float().square())


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 48), (48, 64), (64, 64)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.mean(self.layers(x).square())


@pytest.fixture
def repeatable() -> Iterator[None]:
    """Kernels that give the same bits in every run, and blocks cut to size."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(False)


def floor_bytes(problem: fxremat.RematProblem) -> int:
    with pytest.raises(fxremat.InfeasibleBudgetError) as caught:
        fxremat.plan(problem, 1, time_limit_s=5.0)
    return caught.value.floor_bytes


def check_budgets(model: nn.Module, x: Tensor) -> None:
    """Half way down and at the floor: the same bits, and no byte more than predicted."""
    problem = fxremat.capture(model, (x,), cache_dir=False, progress=False)
    assert problem.costs == "measured"
    least_bytes, top_bytes = floor_bytes(problem), fxremat.plan(problem, "100%").peak_bytes
    assert least_bytes < top_bytes
    for budget_bytes in ((least_bytes + top_bytes) // 2, least_bytes):
        check = fxremat.verify(
            model, (x,), budget=budget_bytes, repeats=2, cache_dir=False, progress=False,
            time_limit_s=5.0,
        )  # fmt: skip
        assert check.ok, str(check)
        assert check.measured_peak_bytes <= check.predicted_peak_bytes
        assert check.measured_peak_bytes > 0.9 * check.predicted_peak_bytes
        assert check.measured_reserved_bytes >= check.measured_peak_bytes


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.15])
def test_a_transformer_keeps_its_bits_and_its_budget(dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(0)
    model = Loss(256, 3, p).to("cuda", dtype)
    check_budgets(model, torch.randn(8, 512, 256, device="cuda", dtype=dtype))


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("repeatable")
def test_convolutions_keep_their_bits_and_their_budget() -> None:
    torch.manual_seed(0)
    check_budgets(Convolutions().cuda(), torch.randn(8, 3, 96, 96, device="cuda"))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.15, 0.3, 0.5, 0.87])
def test_a_dropout_comes_back_from_its_mask_bit_for_bit(dtype: torch.dtype, p: float) -> None:
    x = torch.randn(100_003, device="cuda", dtype=dtype)
    result, mask = NATIVE_DROPOUT(x, p, True)
    again = FROM_MASK(*mask_arguments(dropout_node(x, p), x, mask))
    assert torch.equal(result.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.cuda
def test_the_backward_of_attention_with_dropout_can_be_measured() -> None:
    call = attention_backward(0.1)
    table = measure_costs([call], cache_dir=None)
    assert not table.guessed
    assert table[cost_key(call)].cost_ns > 0


@pytest.mark.cuda
@pytest.mark.parametrize("size_bytes", [1, 512, 513, 70_001, 1 << 20])
def test_blocks_of_the_small_pool_are_cut_to_size(size_bytes: int) -> None:
    before_bytes = torch.cuda.memory_allocated()
    held = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before_bytes == round_up(size_bytes, GPU)
    del held


@pytest.mark.cuda
@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("size_bytes", [(1 << 20) + 1, (11 << 20) + 512, 21_000_001])
def test_expandable_segments_cut_large_blocks_to_size(size_bytes: int) -> None:
    before_bytes = torch.cuda.memory_allocated()
    held = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before_bytes == round_up(size_bytes, GPU)
    del held
