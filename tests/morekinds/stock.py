"""Stock models of transformers in tiny configurations, called as their documentation shows."""

from collections.abc import Callable
from typing import Any

import torch

from tests.morekinds.program import Call, Kind, Named, descend, state_of

TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32,
}  # fmt: skip
GROUPED: dict[str, Any] = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
BART: dict[str, Any] = {
    "vocab_size": 97, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "max_position_embeddings": 32,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip


def text(labels: bool = True, size: int = 7) -> dict[str, Any]:
    ids = torch.randint(4, 90, (2, size))
    rest: dict[str, Any] = {"labels": ids.clone()} if labels else {}
    return {"input_ids": ids, **rest}


def padded(**labels: Any) -> dict[str, Any]:
    """Text of two lengths, as a tokenizer pads it."""
    inputs = text(labels=not labels)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 5:] = 0
    return {**inputs, "attention_mask": mask, **labels}


def pixels(size: int = 16, **labels: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, size, size), **labels}


TWO = torch.tensor([0, 1])

STOCK: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "gpt2": ("GPT2LMHeadModel", {
        "vocab_size": 97, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2,
    }, padded),
    "llama": ("LlamaForCausalLM", GROUPED, padded),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 4}, text),
    "qwen2": ("Qwen2ForCausalLM", GROUPED, padded),
    "qwen3": ("Qwen3ForCausalLM", GROUPED, text),
    "gemma": ("GemmaForCausalLM", GROUPED, text),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 3}, text),
    "phi": ("PhiForCausalLM", TEXT, text),
    "opt": ("OPTForCausalLM", {
        "vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "ffn_dim": 24, "max_position_embeddings": 32, "word_embed_proj_dim": 16,
    }, padded),
    "bloom": ("BloomForCausalLM", {
        "vocab_size": 97, "hidden_size": 16, "n_layer": 1, "n_head": 2,
    }, padded),
    "falcon": ("FalconForCausalLM", TEXT, text),
    "gpt_neox": ("GPTNeoXForCausalLM", TEXT, text),
    "mamba": ("MambaForCausalLM", {
        "vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4,
    }, lambda: text(size=4)),
    "bert": ("BertForMaskedLM", TEXT, padded),
    "roberta": ("RobertaForSequenceClassification", TEXT, lambda: padded(labels=TWO)),
    "distilbert": ("DistilBertForTokenClassification", {
        "vocab_size": 97, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24,
    }, lambda: padded(labels=torch.randint(0, 2, (2, 7)))),
    "albert": ("AlbertForSequenceClassification", {**TEXT, "embedding_size": 8},
               lambda: padded(labels=TWO)),
    "electra": ("ElectraForPreTraining", {**TEXT, "embedding_size": 8},
                lambda: {**text(labels=False), "labels": torch.randint(0, 2, (2, 7))}),
    "deberta": ("DebertaV2ForMaskedLM", {
        **TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
    }, padded),
    "t5": ("T5ForConditionalGeneration", {
        "vocab_size": 97, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2,
        "decoder_start_token_id": 0,
    }, padded),
    "bart": ("BartForConditionalGeneration", BART, padded),
    "deit": ("DeiTForImageClassification", VISION, lambda: pixels(labels=TWO)),
    "swin": ("SwinForImageClassification", {
        "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2],
        "window_size": 4,
    }, lambda: pixels(labels=TWO)),
    "clip": ("CLIPModel", {
        "text_config": {**TEXT, "eos_token_id": 2}, "vision_config": VISION, "projection_dim": 8,
    }, lambda: {**text(labels=False), **pixels(), "return_loss": True}),
    "whisper": ("WhisperForConditionalGeneration", {
        **{k: v for k, v in BART.items() if k != "max_position_embeddings"},
        "num_mel_bins": 8, "max_source_positions": 6, "max_target_positions": 16,
        "decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }, lambda: {"input_features": torch.randn(2, 8, 12), "labels": torch.randint(3, 90, (2, 5))}),
}  # fmt: skip


def stock(name: str) -> Callable[[], Kind]:
    """Makes two training steps of a stock model, as its documentation calls it."""

    def make() -> Kind:
        import transformers

        head, settings, inputs = STOCK[name]
        kind = getattr(transformers, head)
        net = kind(kind.config_class(**settings)).train()

        def program(call: Any) -> Named:
            for number in range(2):
                output = call(**inputs())
                yield f"{number} out", list(output.to_tuple())[:2]
                output.loss.backward()
                yield from state_of(net, f"{number} ")
                descend(net)
                del output

        example = None if name in UNMEASURED else Call((), inputs())
        return Kind(net, program, example=example, traced=name in ROUNDED)

    make.__name__ = name
    return make


ROUNDED = frozenset({"mamba"})
"""AOTAutograd's own trace of these rounds otherwise than eager."""

UNMEASURED = frozenset({"albert", "swin"})
"""A forward changes their configuration, so that the second step is traced again."""

CASES = tuple(stock(name) for name in STOCK)
