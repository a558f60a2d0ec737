"""Small models of many families of transformers, made from configuration, and a batch for each.

Two layers (per stack), hidden size 32, eight heads: small enough to train in float64 in a second,
large enough that data, tensor and sequence parallelism over four processes cut every kind of
layer. Parameters get noise, since initial values leave biases 0 and norms 1, which would hide a
wrong gradient. Dropout is off and the models are in eval mode, so that one process is comparable.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from zoo.family_fields import (
    BART,
    CLASSES,
    DECODER,
    EXPERTS,
    GPT,
    HEADS,
    HIDDEN,
    LAYER,
    LAYERS,
    NO_DROPOUT,
    PATCHES,
    PLAIN,
    T5,
    TEXT,
    TEXT_TOWER,
    TOWER,
    VIT,
    VOCABULARY,
    Family,
    Kind,
    decoder,
    image,
    masked,
)

BATCH, SEQUENCE, IGNORED = 4, 8, -100

FAMILIES: tuple[Family, ...] = (
    decoder("llama", "Llama"),
    decoder("mistral", "Mistral"),
    decoder("qwen2", "Qwen2"),
    decoder("qwen3", "Qwen3", head_dim=4),
    decoder("gemma", "Gemma", head_dim=4),
    decoder("gemma2", "Gemma2", head_dim=4),
    Family(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**DECODER, "head_dim": 4, "sliding_window": 4},
    ),
    decoder("phi3", "Phi3"),
    decoder("olmo2", "Olmo2"),
    decoder("granite", "Granite"),
    decoder("starcoder2", "Starcoder2", residual_dropout=0.0, embedding_dropout=0.0),
    decoder("stablelm", "StableLm"),
    decoder("cohere", "Cohere"),
    decoder("glm", "Glm", head_dim=4),
    decoder("glm4", "Glm4", head_dim=4),
    decoder("phi", "Phi", resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0),
    decoder("olmo", "Olmo"),
    decoder("nemotron", "Nemotron", hidden_dropout=0.0),
    decoder("cohere2", "Cohere2", sliding_window=4),
    decoder("persimmon", "Persimmon", hidden_dropout=0.0),
    decoder("lfm2", "Lfm2", layer_types=["conv", "full_attention"]),
    decoder("smollm3", "SmolLM3"),
    Family("gpt2", "GPT2LMHeadModel", "GPT2Config", GPT),
    Family("gptj", "GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 4}),
    Family("codegen", "CodeGenForCausalLM", "CodeGenConfig", {**GPT, "rotary_dim": 4}),
    decoder("gpt_neox", "GPTNeoX", hidden_dropout=0.0, attention_dropout=0.0),
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
            **TEXT,
        },
    ),
    decoder("opt", "OPT", ffn_dim=64, word_embed_proj_dim=HIDDEN, **PLAIN),
    decoder("falcon", "Falcon", hidden_dropout=0.0, attention_dropout=0.0),
    Family(
        "mpt",
        "MptForCausalLM",
        "MptConfig",
        {"n_layers": LAYERS, "d_model": HIDDEN, "n_heads": HEADS, "max_seq_len": 16, **TEXT},
    ),
    Family(
        "xglm",
        "XGLMForCausalLM",
        "XGLMConfig",
        {"num_layers": LAYERS, "d_model": HIDDEN, "ffn_dim": 64, "attention_heads": HEADS}
        | {"max_position_embeddings": 16, **PLAIN, **TEXT},
    ),
    decoder("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2),
    decoder("qwen3_moe", "Qwen3Moe", num_experts=4, **EXPERTS),
    decoder("olmoe", "Olmoe", num_experts=4, num_experts_per_tok=2),
    decoder(
        "gpt_oss",
        "GptOss",
        num_local_experts=4,
        sliding_window=4,
        head_dim=4,
        num_experts_per_tok=2,
    ),
    decoder(
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
    masked("bert", "Bert"),
    masked("roberta", "Roberta"),
    masked("deberta", "Deberta", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    masked("roformer", "RoFormer", embedding_size=HIDDEN),
    masked("big_bird", "BigBird", attention_type="original_full"),
    masked("electra", "Electra", embedding_size=HIDDEN),
    Family(
        "distilbert",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "n_layers": LAYERS, "dim": HIDDEN, "hidden_dim": 64}
        | {"n_heads": HEADS, "max_position_embeddings": 16, **PLAIN},
    ),
    masked("albert", "Albert", embedding_size=16),
    masked("deberta_v2", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    masked(
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
    Family("t5", "T5ForConditionalGeneration", "T5Config", T5),
    Family("mt5", "MT5ForConditionalGeneration", "MT5Config", T5),
    *(
        Family(
            name,
            f"{prefix}ForConditionalGeneration",
            f"{prefix}Config",
            {**BART, "max_position_embeddings": 16, "forced_eos_token_id": 2},
        )
        for name, prefix in (("bart", "Bart"), ("mbart", "MBart"), ("pegasus", "Pegasus"))
    ),
    Family(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**BART, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
        "mel",
    ),
    Family(
        "wav2vec2",
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        {
            **LAYER,
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
    image("vit", "ViT", VIT),
    image("deit", "DeiT", VIT),
    image("dinov2", "Dinov2", {**VIT, "mlp_ratio": 2, "drop_path_rate": 0.0}),
    image("beit", "Beit", {**VIT, "drop_path_rate": 0.0}),
    image(
        "swin",
        "Swin",
        {"image_size": 32, "patch_size": 4, "num_channels": 4, "num_labels": CLASSES}
        | {"embed_dim": 16, "depths": [2, 2], "num_heads": [4, 8], "window_size": 4}
        | {"drop_path_rate": 0.0, **NO_DROPOUT},
        pixels=32,
    ),
    image(
        "convnext",
        "ConvNext",
        {"num_channels": 4, "hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2}
        | {"patch_size": 4, "image_size": 16, "drop_path_rate": 0.0, "num_labels": CLASSES},
    ),
    image(
        "resnet",
        "ResNet",
        {"num_channels": 4, "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]}
        | {"layer_type": "bottleneck", "num_labels": CLASSES},
    ),
    image(
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
            **NO_DROPOUT,
        },
    ),
    *(
        Family(
            name,
            f"{prefix}Model",
            f"{prefix}Config",
            {"text_config": TEXT_TOWER, "vision_config": {**TOWER, **PATCHES}},
            "pairs",
        )
        for name, prefix in (("clip", "CLIP"), ("siglip", "Siglip"))
    ),
    *(
        decoder(name, prefix, **fields)
        for name, prefix, fields in (
            ("olmo3", "Olmo3", {"sliding_window": 4}),
            ("exaone4", "Exaone4", {"sliding_window": 4, "sliding_window_pattern": 2}),
            ("helium", "Helium", {"head_dim": 4}),
            ("diffllama", "DiffLlama", {"lambda_std_dev": 0.1}),
            ("apertus", "Apertus", {}),
            ("ministral", "Ministral", {"sliding_window": 4, "head_dim": 4}),
            ("phimoe", "Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
            ("granitemoe", "GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
            ("minimax", "MiniMax", {"num_local_experts": 4, "head_dim": 4, "block_size": 4}),
        )
    ),
    decoder("qwen2_moe", "Qwen2Moe", num_experts=4, shared_expert_intermediate_size=32, **EXPERTS),
    Family(
        "llama4",
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**DECODER, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 1}
        | {"intermediate_size_mlp": 64, "attention_chunk_size": 4, "moe_layers": [1]},
    ),
    decoder("glm4_moe", "Glm4Moe", n_routed_experts=4, n_shared_experts=1, **EXPERTS),
    Family("gpt_bigcode", "GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT),
    Family("openai_gpt", "OpenAIGPTLMHeadModel", "OpenAIGPTConfig", GPT),
    Family("ctrl", "CTRLLMHeadModel", "CTRLConfig", {**GPT, "dff": 64}),
    Family(
        "xlnet",
        "XLNetLMHeadModel",
        "XLNetConfig",
        {"vocab_size": VOCABULARY, "d_model": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}
        | {"d_inner": 64, "dropout": 0.0},
    ),
    Family(
        "funnel",
        "FunnelForMaskedLM",
        "FunnelConfig",
        {"vocab_size": VOCABULARY, "block_sizes": [1, 1], "num_decoder_layers": 1}
        | {"d_model": HIDDEN, "n_head": HEADS, "d_head": 4, "d_inner": 64}
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
    ),
    masked("mpnet", "MPNet"),
    masked("fnet", "FNet"),
    masked("megatron_bert", "MegatronBert"),
    masked("squeezebert", "SqueezeBert", embedding_size=HIDDEN),
    masked("esm", "Esm", position_embedding_type="rotary", mask_token_id=3, token_dropout=False),
    masked("convbert", "ConvBert", embedding_size=32, head_ratio=2, conv_kernel_size=3),
    Family("umt5", "UMT5ForConditionalGeneration", "UMT5Config", T5),
    Family(
        "longt5",
        "LongT5ForConditionalGeneration",
        "LongT5Config",
        {**T5, "local_radius": 3},
        "padded",
    ),
    *(
        Family(name, model, config, {**BART, "max_position_embeddings": 16})
        for name, model, config in (
            ("blenderbot", "BlenderbotForConditionalGeneration", "BlenderbotConfig"),
            ("marian", "MarianMTModel", "MarianConfig"),
            ("plbart", "PLBartForConditionalGeneration", "PLBartConfig"),
        )
    ),
    Family(
        "m2m_100",
        "M2M100ForConditionalGeneration",
        "M2M100Config",
        {**BART, "max_position_embeddings": 16, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    ),
    Family(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        # Of the 8 tokens of a row an expert takes two: some are dropped. The factor makes a router
        # that uses all experts: torch's AdamW skips one without a gradient, decay and all.
        {**T5, "num_decoder_layers": LAYERS}
        | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
        | {"num_experts": 4, "expert_capacity": 2, "initializer_factor": 0.5},
        "padded",
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
        "padded": {"input_ids": tokens, "labels": labels, "attention_mask": _mask()},
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


def _mask() -> Tensor:
    """Padding at the end of the first row."""
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
    mask[0, -2:] = 0
    return mask
