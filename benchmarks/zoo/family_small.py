"""A small configuration for any model of transformers: a field that it has gets a small value.

    small("bloom", "BloomForCausalLM")            two layers of width 32, a vocabulary of 64
    small("gptj", "GPTJForCausalLM", rotary_dim=4)

What one table of fields cannot know is given by name. Dropout is off. A name of the class says what
its batch is.
"""

from collections.abc import Mapping
from typing import Any

import transformers

from zoo.family_fields import CLASSES, HEADS, HIDDEN, LAYERS, VOCABULARY, Family, Kind

_EXPERTS, _CHOSEN = 4, 2
_FIELDS: Mapping[str, Any] = (
    {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    | {"use_cache": False, "type_vocab_size": 2}
    | dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
        + ("encoder_layers", "decoder_layers"),
        LAYERS,
    )
    | dict.fromkeys(
        ("hidden_size", "n_embd", "dim", "d_model", "emb_dim", "embed_dim", "embedding_size")
        + ("word_embed_proj_dim",),
        HIDDEN,
    )
    | dict.fromkeys(
        ("intermediate_size", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim")
        + ("d_inner",),
        2 * HIDDEN,
    )
    | dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
        + ("decoder_attention_heads",),
        HEADS,
    )
    | {"num_key_value_heads": 4}
    | dict.fromkeys(
        ("head_dim", "d_kv", "dim_head", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        HIDDEN // HEADS,
    )
    | dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions"),
        16,
    )
    | dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _EXPERTS
    )
    | dict.fromkeys(("num_experts_per_tok", "moe_k", "n_group"), _CHOSEN)
    | dict.fromkeys(("n_shared_experts", "topk_group", "first_k_dense_replace"), 1)
    | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), HIDDEN)
    | dict.fromkeys(("kv_lora_rank", "q_lora_rank", "state_size", "mamba_d_state"), 8)
    | {"mamba_n_heads": HEADS, "mamba_d_head": 8, "sliding_window": 4}
    | {"image_size": 16, "patch_size": 4, "num_channels": 4}
    | {"num_mel_bins": 8, "max_source_positions": 8, "conv_dim": (16, 16)}
    | {"conv_stride": (4, 2), "conv_kernel": (8, 4), "num_conv_pos_embeddings": 4}
    | {"num_conv_pos_embedding_groups": 4, "apply_spec_augment": False, "classifier_proj_size": 16}
    | dict.fromkeys(
        ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
        + ("activation_dropout", "hidden_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop")
        + ("drop_path_rate", "embedding_dropout", "residual_dropout", "classifier_dropout")
        + ("dropout_rate", "layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mlp_dropout")
        + ("feat_proj_dropout", "final_dropout", "embed_dropout"),
        0.0,
    )
)

_KINDS: tuple[tuple[str, Kind], ...] = (
    ("ForSequenceClassification", "classes"),
    ("ForTokenClassification", "tags"),
    ("ForQuestionAnswering", "spans"),
    ("ForMultipleChoice", "choices"),
    ("ForNextSentencePrediction", "next"),
    ("ForImageClassification", "image"),
    ("ForSemanticSegmentation", "segments"),
    ("ForCTC", "speech"),
)


def small(name: str, model: str, kind: Kind | None = None, **fields: Any) -> Family:
    """A family whose configuration `small_config` makes. fields: what is not of the table."""
    if kind is None:
        kind = next((k for suffix, k in _KINDS if suffix in model), "text")
    return Family(name, model, "", fields, kind, fields.get("image_size", 16))


def small_config(family: Family) -> Any:
    """The small configuration of a family without one of its own."""
    config = getattr(transformers, family.model).config_class
    num_labels = 2 if family.kind == "spans" else CLASSES
    return config(**{"num_labels": num_labels, **_small_fields(config, family.fields)})


def _small_fields(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the table that the class has, and those given; of its parts, too."""
    default = config()
    aliases = getattr(config, "attribute_map", {})
    fields = {
        name: value
        for name, value in _FIELDS.items()
        if name not in given and name not in aliases and _takes(default, name, value)
    }
    kinds = list(dict.fromkeys(vars(default).get("layer_types") or ()))
    if kinds and _is_settable(config, "layer_types"):
        fields["layer_types"] = kinds if len(kinds) > 1 else kinds * LAYERS
        fields["num_hidden_layers"] = len(fields["layer_types"])
    if hasattr(default, "qk_rope_head_dim"):
        fields["num_key_value_heads"] = HEADS
    for name in getattr(config, "sub_configs", {}):
        part = getattr(default, name, None)
        if isinstance(part, transformers.PretrainedConfig):
            own = _small_fields(type(part), given.get(name, {}))
            fields[name] = own | {"model_type": part.model_type}
    return {**fields, **given}


def _takes(default: Any, name: str, value: Any) -> bool:
    """Whether a field is there, can be set, and is of the table's kind."""
    try:
        old = getattr(default, name)
    except AttributeError:
        return False
    if isinstance(old, (list, tuple)) != isinstance(value, tuple) and old is not None:
        return False
    is_whole = isinstance(old, int) and isinstance(value, float)
    return not is_whole and _is_settable(type(default), name)


def _is_settable(config: Any, name: str) -> bool:
    return not isinstance(getattr(config, name, None), property)
