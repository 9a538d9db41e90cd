"""Small configurations of stock models, called as their documentation shows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Called = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A model in training mode, with positional and keyword arguments."""


def gpt2() -> Called:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings: dict[str, Any] = {
        "vocab_size": 997,
        "n_positions": 64,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = GPT2Config(**settings)
    ids = torch.randint(0, 997, (2, 64))
    return GPT2LMHeadModel(config).train(), (), {"input_ids": ids, "labels": ids}


def llama() -> Called:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config = LlamaConfig(**settings)
    ids = torch.randint(0, 512, (2, 64))
    return LlamaForCausalLM(config).train(), (), {"input_ids": ids, "labels": ids}


def bert() -> Called:
    from transformers import BertConfig, BertForSequenceClassification

    settings: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 64,
    }
    config = BertConfig(**settings)
    ids = torch.randint(0, 512, (2, 64))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return (
        BertForSequenceClassification(config).train(),
        (),
        {**inputs, "labels": torch.tensor([0, 1])},
    )


def t5() -> Called:
    from transformers import T5Config, T5ForConditionalGeneration

    settings: dict[str, Any] = {
        "vocab_size": 512,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 1,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    }
    config = T5Config(**settings)
    ids = torch.randint(0, 512, (2, 32))
    return T5ForConditionalGeneration(config).train(), (), {"input_ids": ids, "labels": ids}


def vit() -> Called:
    from transformers import ViTConfig, ViTForImageClassification

    settings: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 10,
        "hidden_dropout_prob": 0.1,
    }
    config = ViTConfig(**settings)
    pixels = torch.randn(4, 3, 32, 32)
    labels = torch.randint(0, 10, (4,))
    return ViTForImageClassification(config).train(), (), {"pixel_values": pixels, "labels": labels}


def resnet() -> Called:
    from transformers import ResNetConfig, ResNetForImageClassification

    settings: dict[str, Any] = {
        "embedding_size": 16,
        "hidden_sizes": [16, 32],
        "depths": [2, 2],
        "layer_type": "basic",
        "num_labels": 10,
    }
    config = ResNetConfig(**settings)
    pixels = torch.randn(4, 3, 64, 64)
    labels = torch.randint(0, 10, (4,))
    return (
        ResNetForImageClassification(config).train(),
        (),
        {"pixel_values": pixels, "labels": labels},
    )


def convnext() -> Called:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    settings: dict[str, Any] = {
        "hidden_sizes": [16, 32, 48, 64],
        "depths": [1, 1, 2, 1],
        "num_labels": 10,
        "drop_path_rate": 0.1,
        "image_size": 64,
    }
    config = ConvNextConfig(**settings)
    pixels = torch.randn(4, 3, 64, 64)
    labels = torch.randint(0, 10, (4,))
    return (
        ConvNextForImageClassification(config).train(),
        (),
        {"pixel_values": pixels, "labels": labels},
    )


def unet() -> Called:
    from diffusers import UNet2DModel

    model: Any = UNet2DModel(  # type: ignore[no-untyped-call]
        sample_size=32, in_channels=3, out_channels=3, layers_per_block=1,
        block_out_channels=(32, 64), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=8,
    )  # fmt: skip
    return model.train(), (torch.randn(2, 3, 32, 32), torch.tensor([3, 7])), {}


MODELS: dict[str, Callable[[], Called]] = {
    made.__name__: made for made in (gpt2, llama, bert, t5, vit, resnet, convnext, unet)
}


def made(name: str) -> Called:
    """A model and its arguments, the same ones each time."""
    torch.manual_seed(0)
    return MODELS[name]()
