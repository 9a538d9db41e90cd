"""What cannot be kept is refused in words."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fxremat
from tests.steps import QUICK, leaf, same_at_every_budget


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))


def sparse_weight() -> Callable[..., Any]:
    words = nn.Embedding(9, 6, sparse=True)
    return lambda ids: words(ids).tanh()


def backward_inside(x: torch.Tensor) -> torch.Tensor:
    x.tanh().sum().backward()
    return x


def printing(x: torch.Tensor) -> torch.Tensor:
    print(x.sum())  # noqa: T201  # why: that is what is refused
    return x.tanh()


IDS = torch.tensor([1, 2, 2])
REFUSED: tuple[tuple[str, Callable[..., Any], Callable[[Callable[..., Any]], Any], str], ...] = (
    (
        "a Hessian", net(), lambda step: torch.autograd.functional.hessian(
            lambda x: step(x).sum(), torch.randn(2, 6)), "create_graph=True",
    ),
    ("sparse gradients", sparse_weight(), lambda step: step(IDS), "sparse_coo"),
    ("sparse inputs", lambda s: s @ torch.ones(6, 2, requires_grad=True),
     lambda step: step(torch.eye(6).to_sparse()), "sparse"),
    ("a backward inside", backward_inside, lambda step: step(leaf(5, 6)), "a backward inside"),
    ("printing", printing, lambda step: step(leaf(5, 6)), "print"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "use", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_is_not_supported_is_named(
    fn: Callable[..., Any], use: Callable[[Callable[..., Any]], Any], words: str
) -> None:
    step = fxremat.optimize(fn, "1GiB", **QUICK)
    with pytest.raises(fxremat.FxrematError, match=words):
        use(step)


def test_module_backward_hooks_are_refused_before_anything_runs() -> None:
    model = net()
    model[0].register_full_backward_hook(lambda module, inner, outer: None)
    fxremat.optimize(model, "1GiB", **QUICK)
    with pytest.raises(fxremat.CaptureError, match="full backward hook"):
        model(leaf(5, 6))


@pytest.mark.parametrize("budget", [1, 1000, "1KiB", "0.1%"])
def test_a_budget_far_below_the_floor_names_the_floor(budget: int | str) -> None:
    model = fxremat.optimize(net(), budget, **QUICK)
    with pytest.raises(fxremat.InfeasibleBudgetError) as caught:
        model(leaf(5, 6))
    floor_bytes = caught.value.floor_bytes
    assert f"{floor_bytes:,}" in str(caught.value)
    fxremat.optimize(model, floor_bytes, **QUICK)
    model(leaf(5, 6)).sum().backward()
    assert fxremat.report(model).predicted_peak_bytes == floor_bytes


COUNTS = torch.tensor([1, 2, 3])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
Step = Callable[..., Any]


def row_by_a_mask(x: torch.Tensor) -> torch.Tensor:
    h = x.sin()
    h[x[:, 0] > 0] = x[1]  # its gradient is chosen by the mask
    return h.exp()


def looped(x: torch.Tensor) -> Any:
    from torch._higher_order_ops import while_loop

    return while_loop(
        lambda i, h: i < 4, lambda i, h: (i + 1, h.sin()), (torch.tensor(0), x.exp())
    )[1].cos()


def scanned(x: torch.Tensor) -> Any:
    from torch._higher_order_ops.scan import scan

    return scan(lambda h, row: (h.sin() + row, h * 2), x[0].exp(), x.exp(), dim=0)[0].cos()


def own_state(x: torch.Tensor) -> Any:
    torch.get_rng_state()
    return x * torch.rand(5, 6)


def put_back(x: torch.Tensor) -> Any:
    with torch.random.fork_rng():
        return x * torch.rand(5, 6)


@torch.compiler.nested_compile_region
def region(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x.sin(), 0.5)


def bags() -> Step:
    words = nn.EmbeddingBag(9, 6, sparse=True, mode="sum")
    return lambda x: (x * words(IDS, torch.tensor([0, 2])).sum()).tanh()


def looked_up(x: torch.Tensor) -> Any:
    return functional.embedding(IDS, x, sparse=True).tanh()


def masked(part: type[nn.Module], **options: Any) -> Step:
    torch.manual_seed(0)
    width: dict[str, Any] = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
    if part is nn.Transformer:
        net: nn.Module = nn.Transformer(8, 2, 1, 1, **width)
        return lambda x: net(x, x.tanh(), **options)
    if part is nn.TransformerEncoder:
        net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, **width), 1)
        return lambda x: net(x, **options)
    net = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, **width), 1)
    return lambda x: net(x, x.tanh(), **options)


def ctc(lengths: Callable[[list[int]], Any]) -> Step:
    spoken, said = lengths([20, 20]), lengths([4, 3])
    return lambda x: functional.ctc_loss(
        x.log_softmax(-1), torch.ones(2, 4, dtype=torch.long), spoken, said
    )


SEQUENCE = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
BATCH = (2, 5, 8)
IN_ITS_WORDS: dict[str, tuple[Step, tuple[int, ...], str, str]] = {
    "nonzero": (lambda x: x[torch.nonzero(x[:, 0] > 0)].sum(), (5, 6), "nonzero", "torch.where"),
    "argwhere": (lambda x: x[torch.argwhere(x[:, 0] > 0)].sum(), (5, 6), "nonzero", "torch.where"),
    "mask": (lambda x: x[x[:, 0] > 0].sum(), (5, 6), "boolean mask", "torch.where"),
    "mask, returned": (lambda x: x[x > 0].sin(), (5, 6), "boolean mask", "multiply by the mask"),
    "gradient of a mask": (row_by_a_mask, (5, 6), "boolean mask", "torch.where"),
    "masked_select": (lambda x: x.masked_select(x > 0).sum(), (5,), "masked_select", "torch.where"),
    "repeats": (lambda x: x.repeat_interleave(COUNTS, 0).sum(), (3, 6), "repeats", "output_size="),
    "unique": (lambda x: x[torch.unique(IDS)].sum(), (5, 6), "torch.unique", "before the call"),
    "while_loop": (looped, (5, 6), "while_loop", "a scan or a Python loop"),
    "ctc of tensors": (ctc(torch.tensor), (20, 2, 5), "CTC loss", "outside of the optimised"),
    "ctc of tuples": (ctc(tuple), (20, 2, 5), "CTC loss", "outside of the optimised"),
    "ctc of lists": (ctc(list), (20, 2, 5), "CTC loss", "outside of the optimised"),
    "checkpoint_sequential": (
        lambda x: checkpoint_sequential(SEQUENCE, 2, x, use_reentrant=False), (5, 6),
        "checkpoint_sequential", "each part with torch.utils.checkpoint.checkpoint(",
    ),
    "random.random": (lambda x: x * random.random(), (5, 6), "Python's random", "with torch"),
    "random.gauss": (lambda x: x * random.gauss(0, 1), (5, 6), "Python's random", "with torch"),
    "random.choice": (lambda x: x * random.choice([2, 3]), (5, 6), "Python's random", "with torch"),
    "generators' states": (own_state, (5, 6), "state of torch's generators", "before the call"),
    "fork_rng": (put_back, (5, 6), "state of torch's generators", "leave it out"),
    "default generator": (
        lambda x: x * torch.rand(5, 6, generator=torch.default_generator), (5, 6),
        "given a generator", "leave out generator=",
    ),
    "marked regions": (
        lambda x: region(region(x)), (5, 6), "nested_compile_region", "take the mark away"
    ),
    "number read": (lambda x: x[: int(x.max().item())], (5, 6), "an operator", "a fixed size"),
    "sparse bags": (bags(), (5, 6), "gradient of an embedding", "sparse=False"),
    "sparse rows": (looked_up, (9, 6), "gradient of an embedding", "sparse=False"),
    "causal target": (
        masked(nn.Transformer, tgt_mask=CAUSAL), BATCH, "whether it is causal", "tgt_is_causal=True"
    ),
    "causal source": (
        masked(nn.Transformer, src_mask=CAUSAL), BATCH, "whether it is causal", "src_is_causal="
    ),
    "causal encoder": (
        masked(nn.TransformerEncoder, mask=CAUSAL), BATCH, "whether it is causal", "is_causal="
    ),
    "causal decoder": (
        masked(nn.TransformerDecoder, tgt_mask=CAUSAL), BATCH, "whether it is", "tgt_is_causal=True"
    ),
}  # fmt: skip
INTERNAL = ("u0", "aten.", "invoke_subgraph", "stack_output", "marked as skipped", "getitem")


@pytest.mark.filterwarnings("ignore:.*prototype", "ignore:invoke_subgraph traced multiple")
@pytest.mark.parametrize("name", IN_ITS_WORDS)
def test_a_refusal_speaks_of_what_the_user_wrote(name: str) -> None:
    fn, shape, cause, remedy = IN_ITS_WORDS[name]
    with pytest.raises((fxremat.CaptureError, fxremat.UnsupportedGraphError)) as refused:
        fxremat.optimize(fn, "1GiB", **QUICK)(leaf(*shape))
    what, _, advice = str(refused.value).partition("Remedy: ")
    assert cause in what
    assert remedy in advice
    assert ".py:" in what
    assert not [word for word in INTERNAL if word in str(refused.value)]


def each_checkpointed(x: torch.Tensor) -> Any:
    for part in SEQUENCE:
        x = checkpoint(part, x, use_reentrant=False)
    return x


REMEDIES: dict[str, tuple[Step, tuple[int, ...]]] = {
    "output_size": (lambda x: x.repeat_interleave(COUNTS, 0, output_size=6).exp(), (3, 6)),
    "nonzero_static": (
        lambda x: x[torch.nonzero_static(x[:, 0] > 9, size=2, fill_value=0)[:, 0]].exp(), (5, 6)
    ),
    "scan": (scanned, (5, 6)),
    "checkpoint": (each_checkpointed, (5, 6)),
    "is_causal": (masked(nn.TransformerEncoder, mask=CAUSAL, is_causal=True), BATCH),
    "tgt_is_causal": (masked(nn.TransformerDecoder, tgt_mask=CAUSAL, tgt_is_causal=True), BATCH),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REMEDIES)
def test_what_a_remedy_names_is_planned(name: str) -> None:
    fn, shape = REMEDIES[name]
    same_at_every_budget(lambda: (fn, (leaf(*shape),)), (0,))
