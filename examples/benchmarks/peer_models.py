"""The models of the benchmark: GPT-2, Llama and ResNet from transformers, without dropout.

Without dropout, because torch's ``activation_memory_budget`` draws new random numbers in the
backward and its gradients would be wrong. Without running statistics in the ResNet's batch norms,
because torch's partition replays the norms from statistics that the step has overwritten, and
autograd refuses.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

SEED = 11


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the models are.

    Attributes:
        layers: Blocks of the language models; each stage of the ResNet has a quarter of them.
        width: Of the language models; the ResNet's stages have 1/16 to 1/2 of it.
        batch: Sequences; the ResNet gets four times as many images.
        tokens: Length of a sequence; images are a quarter of it high and wide.
        vocabulary: Of GPT-2; Llama has a quarter of it.
    """

    layers: int = 12
    width: int = 256
    batch: int = 4
    tokens: int = 256
    vocabulary: int = 8192


@dataclass(frozen=True)
class Subject:
    """A model with a batch, and the blocks that a user would checkpoint.

    Attributes:
        name: For the tables.
        model: In training mode; its output has ``loss`` and ``logits``.
        batch: Its keyword arguments.
        blocks: What ``torch.utils.checkpoint`` is put around.
    """

    name: str
    model: nn.Module
    batch: dict[str, torch.Tensor]
    blocks: tuple[nn.Module, ...]

    @contextmanager
    def checkpointed(self) -> Iterator[None]:
        """Each block under ``torch.utils.checkpoint`` meanwhile."""
        for block in self.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        try:
            yield
        finally:
            for block in self.blocks:
                del block.forward  # the class has the real one


def gpt2(sizes: Sizes, device: torch.device) -> Subject:
    """A GPT-2 without dropout."""
    config = GPT2Config(
        n_layer=sizes.layers,
        n_embd=sizes.width,
        n_head=4,
        n_positions=sizes.tokens,
        vocab_size=sizes.vocabulary,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    torch.manual_seed(SEED)
    model = GPT2LMHeadModel(config).train().to(device)
    batch = _tokens(sizes, sizes.vocabulary, device)
    return Subject("GPT-2", model, batch, tuple(model.transformer.h))


def llama(sizes: Sizes, device: torch.device) -> Subject:
    """A Llama."""
    config = LlamaConfig(
        num_hidden_layers=sizes.layers,
        hidden_size=sizes.width,
        intermediate_size=sizes.width * 11 // 4,
        num_attention_heads=4,
        max_position_embeddings=sizes.tokens,
        vocab_size=sizes.vocabulary // 4,
        use_cache=False,
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config).train().to(device)
    batch = _tokens(sizes, sizes.vocabulary // 4, device)
    return Subject("Llama", model, batch, tuple(model.model.layers))


def resnet(sizes: Sizes, device: torch.device) -> Subject:
    """A ResNet of basic layers in four stages."""
    depth = max(1, sizes.layers // 3)
    config = ResNetConfig(
        embedding_size=sizes.width // 8,
        hidden_sizes=[sizes.width // 8 * 2**stage for stage in range(4)],
        depths=[depth] * 4,
        layer_type="basic",
    )
    torch.manual_seed(SEED)
    model = ResNetForImageClassification(config).train().to(device)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    side = max(32, sizes.tokens // 4)
    batch = {
        "pixel_values": torch.randn(4 * sizes.batch, 3, side, side, device=device),
        "labels": torch.randint(2, (4 * sizes.batch,), device=device),
    }
    blocks = [layer for stage in model.resnet.encoder.stages for layer in stage.layers]
    return Subject("ResNet", model, batch, tuple(blocks))


def _tokens(sizes: Sizes, vocabulary: int, device: torch.device) -> dict[str, torch.Tensor]:
    tokens = torch.randint(vocabulary, (sizes.batch, sizes.tokens), device=device)
    return {"input_ids": tokens, "labels": tokens}


MODELS: dict[str, Callable[[Sizes, torch.device], Subject]] = {
    "gpt2": gpt2,
    "llama": llama,
    "resnet": resnet,
}
