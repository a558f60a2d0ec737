"""Small models of many families of transformers, made from configuration, and a batch for each.

Two layers (per stack), hidden size 32, eight heads: small enough to train in float64 in a second,
large enough that data, tensor and sequence parallelism over four processes cut every kind of
layer. Parameters get noise, since initial values leave biases 0 and norms 1, which would hide a
wrong gradient. Dropout is off and the models are in eval mode, so that one process is comparable.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

BATCH, SEQUENCE, VOCABULARY, HIDDEN, HEADS, LAYERS, CLASSES = 4, 8, 64, 32, 8, 2, 8
IGNORED = -100

Kind = Literal["text", "image", "mel", "wave", "pairs"]


@dataclass(frozen=True)
class Family:
    """model, config: class names in transformers; fields: of the configuration. kind: of batch."""

    name: str
    model: str
    config: str
    fields: Mapping[str, Any]
    kind: Kind = "text"
    pixels: int = 16


_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_TEXT = {**_TOKENS, "use_cache": False}
_LAYER = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": HEADS,
}
_DECODER = {**_LAYER, "num_key_value_heads": 4, "max_position_embeddings": 16, **_TEXT}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER = {
    **_LAYER,
    **_NO_DROPOUT,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
_GPT = {
    "n_layer": LAYERS,
    "n_embd": HIDDEN,
    "n_head": HEADS,
    "n_positions": 16,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    **_TEXT,
}
_PLAIN = {"dropout": 0.0, "attention_dropout": 0.0}
_BART = {
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "d_model": HIDDEN,
    "encoder_ffn_dim": 2 * HIDDEN,
    "decoder_ffn_dim": 2 * HIDDEN,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "activation_dropout": 0.0,
    "decoder_start_token_id": 2,
    **_PLAIN,
    **_TEXT,
}
_T5 = {
    "num_layers": LAYERS,
    "d_model": HIDDEN,
    "d_kv": 4,
    "d_ff": 2 * HIDDEN,
    "num_heads": HEADS,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    **_TEXT,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 4}
_PATCHES = {"image_size": 16, "patch_size": 4, "num_channels": 4}
_VIT = {**_LAYER, **_NO_DROPOUT, **_PATCHES, "num_labels": CLASSES}
_TOWER = {**_LAYER, "attention_dropout": 0.0}
_TEXT_TOWER = {**_TOWER, **_TOKENS, "max_position_embeddings": 16}


def _decoder(name: str, prefix: str, **fields: Any) -> Family:
    return Family(name, f"{prefix}ForCausalLM", f"{prefix}Config", {**_DECODER, **fields})


def _masked(name: str, prefix: str, **fields: Any) -> Family:
    return Family(name, f"{prefix}ForMaskedLM", f"{prefix}Config", {**_ENCODER, **fields})


def _image(name: str, prefix: str, fields: Mapping[str, Any], pixels: int = 16) -> Family:
    model, config = f"{prefix}ForImageClassification", f"{prefix}Config"
    return Family(name, model, config, fields, "image", pixels)


FAMILIES: tuple[Family, ...] = (
    _decoder("llama", "Llama"),
    _decoder("mistral", "Mistral"),
    _decoder("qwen2", "Qwen2"),
    _decoder("qwen3", "Qwen3", head_dim=4),
    _decoder("gemma", "Gemma", head_dim=4),
    _decoder("gemma2", "Gemma2", head_dim=4),
    Family(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_DECODER, "head_dim": 4, "sliding_window": 4},
    ),
    _decoder("phi3", "Phi3"),
    _decoder("olmo2", "Olmo2"),
    _decoder("granite", "Granite"),
    _decoder("starcoder2", "Starcoder2", residual_dropout=0.0, embedding_dropout=0.0),
    _decoder("stablelm", "StableLm"),
    _decoder("cohere", "Cohere"),
    _decoder("glm", "Glm", head_dim=4),
    _decoder("glm4", "Glm4", head_dim=4),
    _decoder("phi", "Phi", resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0),
    _decoder("olmo", "Olmo"),
    _decoder("nemotron", "Nemotron", hidden_dropout=0.0),
    _decoder("cohere2", "Cohere2", sliding_window=4),
    _decoder("persimmon", "Persimmon", hidden_dropout=0.0),
    _decoder("lfm2", "Lfm2", layer_types=["conv", "full_attention"]),
    _decoder("smollm3", "SmolLM3"),
    Family("gpt2", "GPT2LMHeadModel", "GPT2Config", _GPT),
    Family("gptj", "GPTJForCausalLM", "GPTJConfig", {**_GPT, "rotary_dim": 4}),
    Family("codegen", "CodeGenForCausalLM", "CodeGenConfig", {**_GPT, "rotary_dim": 4}),
    _decoder("gpt_neox", "GPTNeoX", hidden_dropout=0.0, attention_dropout=0.0),
    Family(
        "gpt_neo",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "num_heads": HEADS,
            "intermediate_size": 2 * HIDDEN,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 16,
            "embed_dropout": 0.0,
            "resid_dropout": 0.0,
            "attention_dropout": 0.0,
            **_TEXT,
        },
    ),
    _decoder("opt", "OPT", ffn_dim=64, word_embed_proj_dim=HIDDEN, **_PLAIN),
    _decoder("falcon", "Falcon", hidden_dropout=0.0, attention_dropout=0.0),
    Family(
        "mpt",
        "MptForCausalLM",
        "MptConfig",
        {"n_layers": LAYERS, "d_model": HIDDEN, "n_heads": HEADS, "max_seq_len": 16, **_TEXT},
    ),
    Family(
        "xglm",
        "XGLMForCausalLM",
        "XGLMConfig",
        {"num_layers": LAYERS, "d_model": HIDDEN, "ffn_dim": 64, "attention_heads": HEADS}
        | {"max_position_embeddings": 16, **_PLAIN, **_TEXT},
    ),
    _decoder("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2),
    _decoder("qwen3_moe", "Qwen3Moe", num_experts=4, **_EXPERTS),
    _decoder("olmoe", "Olmoe", num_experts=4, num_experts_per_tok=2),
    _decoder(
        "gpt_oss",
        "GptOss",
        num_local_experts=4,
        sliding_window=4,
        head_dim=4,
        num_experts_per_tok=2,
    ),
    _decoder(
        "deepseek_v3",
        "DeepseekV3",
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        num_key_value_heads=HEADS,
    ),
    _masked("bert", "Bert"),
    _masked("roberta", "Roberta"),
    _masked("deberta", "Deberta", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _masked("roformer", "RoFormer", embedding_size=HIDDEN),
    _masked("big_bird", "BigBird", attention_type="original_full"),
    _masked("electra", "Electra", embedding_size=HIDDEN),
    Family(
        "distilbert",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "n_layers": LAYERS, "dim": HIDDEN, "hidden_dim": 64}
        | {"n_heads": HEADS, "max_position_embeddings": 16, **_PLAIN},
    ),
    _masked("albert", "Albert", embedding_size=16),
    _masked("deberta_v2", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _masked(
        "modernbert",
        "ModernBert",
        num_hidden_layers=3,
        global_attn_every_n_layers=2,
        local_attention=4,
        attention_dropout=0.0,
        embedding_dropout=0.0,
        mlp_dropout=0.0,
        classifier_dropout=0.0,
    ),
    Family("t5", "T5ForConditionalGeneration", "T5Config", _T5),
    Family("mt5", "MT5ForConditionalGeneration", "MT5Config", _T5),
    *(
        Family(
            name,
            f"{prefix}ForConditionalGeneration",
            f"{prefix}Config",
            {**_BART, "max_position_embeddings": 16, "forced_eos_token_id": 2},
        )
        for name, prefix in (("bart", "Bart"), ("mbart", "MBart"), ("pegasus", "Pegasus"))
    ),
    Family(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**_BART, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
        "mel",
    ),
    Family(
        "wav2vec2",
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        {
            **_LAYER,
            "conv_dim": (16, 16),
            "conv_stride": (4, 2),
            "conv_kernel": (8, 4),
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "feat_proj_dropout": 0.0,
            "final_dropout": 0.0,
            "layerdrop": 0.0,
            "apply_spec_augment": False,
            "num_labels": CLASSES,
            "classifier_proj_size": 16,
        },
        "wave",
    ),
    _image("vit", "ViT", _VIT),
    _image("deit", "DeiT", _VIT),
    _image("dinov2", "Dinov2", {**_VIT, "mlp_ratio": 2, "drop_path_rate": 0.0}),
    _image("beit", "Beit", {**_VIT, "drop_path_rate": 0.0}),
    _image(
        "swin",
        "Swin",
        {"image_size": 32, "patch_size": 4, "num_channels": 4, "num_labels": CLASSES}
        | {"embed_dim": 16, "depths": [2, 2], "num_heads": [4, 8], "window_size": 4}
        | {"drop_path_rate": 0.0, **_NO_DROPOUT},
        pixels=32,
    ),
    _image(
        "convnext",
        "ConvNext",
        {"num_channels": 4, "hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2}
        | {"patch_size": 4, "image_size": 16, "drop_path_rate": 0.0, "num_labels": CLASSES},
    ),
    _image(
        "resnet",
        "ResNet",
        {"num_channels": 4, "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]}
        | {"layer_type": "bottleneck", "num_labels": CLASSES},
    ),
    _image(
        "segformer",
        "Segformer",
        {
            "num_channels": 4,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2],
            "classifier_dropout_prob": 0.0,
            "drop_path_rate": 0.0,
            "num_labels": CLASSES,
            **_NO_DROPOUT,
        },
    ),
    *(
        Family(
            name,
            f"{prefix}Model",
            f"{prefix}Config",
            {"text_config": _TEXT_TOWER, "vision_config": {**_TOWER, **_PATCHES}},
            "pairs",
        )
        for name, prefix in (("clip", "CLIP"), ("siglip", "Siglip"))
    ),
)


def find(name: str) -> Family:
    """Raises KeyError for a family that is not in the table."""
    return {family.name: family for family in FAMILIES}[name]


def make(family: Family) -> tuple[nn.Module, dict[str, Any]]:
    """The float64 model and keyword arguments for one call of it; the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, family.config)(**family.fields)
        model = getattr(transformers, family.model)(config).double().eval()
        if hasattr(model.config, "_experts_implementation"):
            # The default, grouped_mm, has no float64 kernel.
            model.config._experts_implementation = "eager"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, dtype=parameter.dtype))
        return model, _batch(family)


def _batch(family: Family) -> dict[str, Any]:
    tokens = torch.randint(4, VOCABULARY, (BATCH, SEQUENCE))
    labels = torch.randint(1, VOCABULARY, (BATCH, SEQUENCE))
    # Uneven over rows: a wrong mean over ranks shows.
    labels[0, : SEQUENCE // 2] = IGNORED
    labels[-1, -1] = IGNORED
    classes = torch.randint(0, CLASSES, (BATCH,))
    batches: dict[Kind, dict[str, Any]] = {
        "text": {"input_ids": tokens, "labels": labels},
        "image": {"pixel_values": _noise(4, family.pixels, family.pixels), "labels": classes},
        "mel": {"input_features": _noise(8, 16), "labels": labels.clamp(min=1)},
        "wave": {"input_values": _noise(256), "labels": classes},
        "pairs": {
            "input_ids": torch.cat([tokens[:, :-1], torch.full((BATCH, 1), 2)], 1),
            "pixel_values": _noise(4, family.pixels, family.pixels),
            "return_loss": True,
        },
    }
    return batches[family.kind]


def _noise(*shape: int) -> Tensor:
    return torch.randn((BATCH, *shape), dtype=torch.float64)
