"""The training steps of the planner's benchmark: by name, what to build and how to call it.

Every module returns its loss. The sizes are those that people train, but nothing here is run:
built under torch's ``FakeTensorMode``, as ``planner_problems.py`` does it, a model takes no memory.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peer_models import Sizes
from peer_models import llama as peer_llama
from peer_models import resnet as peer_resnet
from planner_nets import CrossEntropy, Denoising, LossOf, ResidualMLP, Swiglu, UnrolledLSTM
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from densenet import DENSENET_121, DenseNet

CPU = torch.device("cpu")
CLASSES: dict[str, Any] = {"num_labels": 1000}


@dataclass(frozen=True)
class Step:
    """One training step.

    Attributes:
        module: In training mode; its forward returns the loss.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def gpt2(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    batch: int = 4,
    tokens: int = 1024,
    vocabulary: int = 50_257,
) -> Step:
    """A GPT-2 with dropout; by default the one of 124 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=tokens,
        vocab_size=vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _language(GPT2LMHeadModel(config), vocabulary, (batch, tokens))


def t5(layers: int = 6, width: int = 512, batch: int = 8, tokens: int = 512) -> Step:
    """An encoder and a decoder; by default T5 small, with a target a quarter as long."""
    from transformers import T5Config, T5ForConditionalGeneration

    settings: dict[str, Any] = {
        "d_model": width,
        "d_kv": width // 8,
        "d_ff": 4 * width,
        "num_layers": layers,
        "decoder_start_token_id": 0,
        "use_cache": False,
    }
    config = T5Config(**settings)
    given = torch.randint(config.vocab_size, (batch, tokens))
    wanted = torch.randint(config.vocab_size, (batch, tokens // 4))
    model = T5ForConditionalGeneration(config).train()
    return Step(LossOf(model), kwargs={"input_ids": given, "labels": wanted})


def resnet50(batch: int = 32, side: int = 224) -> Step:
    """ResNet-50 with its usual sizes."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return _images(ResNetForImageClassification(ResNetConfig(**CLASSES)), batch, side)


def swin(batch: int = 16, side: int = 224, depths: tuple[int, ...] = (2, 2, 6, 2)) -> Step:
    """A Swin transformer; by default the tiny one (28 million parameters)."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=side, depths=list(depths), **CLASSES)
    return _images(SwinForImageClassification(config), batch, side)


def mobilenet_v2(batch: int = 32, side: int = 224) -> Step:
    """MobileNetV2 with its usual sizes."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(image_size=side, **CLASSES)
    return _images(MobileNetV2ForImageClassification(config), batch, side)


def unet(widths: tuple[int, ...] = (128, 256, 384, 512), batch: int = 8, side: int = 64) -> Step:
    """A denoising UNet with attention in its two deepest levels."""
    from diffusers import UNet2DModel

    plain = len(widths) - 2
    model: Any = UNet2DModel(  # type: ignore[no-untyped-call]
        sample_size=side,
        layers_per_block=2,
        block_out_channels=widths,
        down_block_types=("DownBlock2D",) * plain + ("AttnDownBlock2D",) * 2,
        up_block_types=("AttnUpBlock2D",) * 2 + ("UpBlock2D",) * plain,
    )
    images, noise = torch.randn(batch, 3, side, side), torch.randn(batch, 3, side, side)
    return Step(Denoising(model.train()), (images, torch.randint(1000, (batch,)), noise))


def densenet(layers: tuple[int, ...] = DENSENET_121, batch: int = 16, side: int = 224) -> Step:
    """DenseNet-121."""
    images, labels = torch.randn(batch, 3, side, side), torch.randint(1000, (batch,))
    return Step(CrossEntropy(DenseNet(layers)), (images, labels))


def swiglu(
    layers: int = 128,
    width: int = 256,
    batch: int = 2,
    tokens: int = 256,
    vocabulary: int = 4096,
) -> Step:
    """A very deep decoder, operator by operator."""
    model = Swiglu(layers, width, 4, width * 11 // 4, tokens, vocabulary)
    return Step(model, tuple(torch.randint(vocabulary, (2, batch, tokens)).unbind()))


def lstm(steps: int = 128, width: int = 256, batch: int = 512) -> Step:
    """An unrolled recurrence; its parameters are small beside one step's activations."""
    shape = (steps, batch, width)
    return Step(UnrolledLSTM(width), (torch.randn(shape), torch.randn(batch, width)))


def residual_mlp(blocks: int = 256, width: int = 128, hidden: int = 128, batch: int = 8192) -> Step:
    """Residual blocks; all parameters together are small beside the activations."""
    x = torch.randn(batch, width)
    return Step(ResidualMLP(blocks, width, hidden), (x, torch.randn(batch, width)))


def reference_llama(sizes: Sizes = Sizes()) -> Step:  # noqa: B008 (frozen)
    """The Llama of ``peers.py``."""
    subject = peer_llama(sizes, CPU)
    return Step(LossOf(subject.model), kwargs=subject.batch)


def reference_resnet(sizes: Sizes = Sizes()) -> Step:  # noqa: B008 (frozen)
    """The ResNet of ``peers.py``."""
    subject = peer_resnet(sizes, CPU)
    return Step(LossOf(subject.model), kwargs=subject.batch)


def _language(model: nn.Module, vocabulary: int, shape: tuple[int, int]) -> Step:
    tokens = torch.randint(vocabulary, shape)
    return Step(LossOf(model.train()), kwargs={"input_ids": tokens, "labels": tokens})


def _images(model: nn.Module, batch: int, side: int) -> Step:
    batched = {
        "pixel_values": torch.randn(batch, 3, side, side),
        "labels": torch.randint(1000, (batch,)),
    }
    return Step(LossOf(model.train()), kwargs=batched)


MODELS: dict[str, Callable[[], Step]] = {
    "gpt2-12": gpt2,
    "resnet50": resnet50,
    "residual-mlp-256": residual_mlp,
    "lstm-128": lstm,
    "reference-llama-12": reference_llama,
    "reference-resnet": reference_resnet,
    "gpt2-48": partial(gpt2, 48, 384, 6, 4, 256, 8192),
    "t5-small": t5,
    "unet": unet,
    "densenet121": densenet,
    "swin-tiny": swin,
    "mobilenet-v2": mobilenet_v2,
    "swiglu-128": swiglu,
}
"""Name -> what builds the step."""

REAL = frozenset({"reference-llama-12", "reference-resnet"})
"""Those built of real tensors, which are few: ``Module.to`` does not take fake ones."""
