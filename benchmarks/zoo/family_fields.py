"""What families of transformers have in common: fields of small configurations, and how a family
is written down. benchmarks/zoo/family_batches.py has the families."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

VOCABULARY, HIDDEN, HEADS, LAYERS, CLASSES = 64, 32, 8, 2, 8

Kind = (
    Literal["text", "padded", "image", "mel", "wave", "pairs"]
    | Literal[
        "classes", "tags", "spans", "choices", "next", "segments", "speech", "frames", "video"
    ]
)


@dataclass(frozen=True)
class Family:
    """model, config: class names in transformers; fields: of the configuration. kind: of batch.
    No config: benchmarks/zoo/family_small.py makes it."""

    name: str
    model: str
    config: str
    fields: Mapping[str, Any]
    kind: Kind = "text"
    pixels: int = 16


TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT = {**TOKENS, "use_cache": False}
LAYER = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": HEADS,
}
DECODER = {**LAYER, "num_key_value_heads": 4, "max_position_embeddings": 16, **TEXT}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = {
    **LAYER,
    **NO_DROPOUT,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
GPT = {
    "n_layer": LAYERS,
    "n_embd": HIDDEN,
    "n_head": HEADS,
    "n_positions": 16,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    **TEXT,
}
PLAIN = {"dropout": 0.0, "attention_dropout": 0.0}
BART = {
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "d_model": HIDDEN,
    "encoder_ffn_dim": 2 * HIDDEN,
    "decoder_ffn_dim": 2 * HIDDEN,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "activation_dropout": 0.0,
    "decoder_start_token_id": 2,
    **PLAIN,
    **TEXT,
}
T5 = {
    "num_layers": LAYERS,
    "d_model": HIDDEN,
    "d_kv": 4,
    "d_ff": 2 * HIDDEN,
    "num_heads": HEADS,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    **TEXT,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 4}
PATCHES = {"image_size": 16, "patch_size": 4, "num_channels": 4}
VIT = {**LAYER, **NO_DROPOUT, **PATCHES, "num_labels": CLASSES}
TOWER = {**LAYER, "attention_dropout": 0.0}
TEXT_TOWER = {**TOWER, **TOKENS, "max_position_embeddings": 16}


def decoder(name: str, prefix: str, **fields: Any) -> Family:
    return Family(name, f"{prefix}ForCausalLM", f"{prefix}Config", {**DECODER, **fields})


def masked(name: str, prefix: str, **fields: Any) -> Family:
    return Family(name, f"{prefix}ForMaskedLM", f"{prefix}Config", {**ENCODER, **fields})


def image(name: str, prefix: str, fields: Mapping[str, Any], pixels: int = 16) -> Family:
    model, config = f"{prefix}ForImageClassification", f"{prefix}Config"
    return Family(name, model, config, fields, "image", pixels)
