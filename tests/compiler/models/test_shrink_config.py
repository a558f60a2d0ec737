"""Smaller sizes for configurations: what the table keeps, and that the models still run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.models.config_file import Configuration, read_configuration
from meshfold.models.from_argument import build_model, fields_with_defaults
from meshfold.models.shrink_config import changed, shrink

CONFIGS = Path(__file__).resolve().parents[3] / "examples" / "configs"
DEFAULTS = (
    "deepseek_v3",
    "falcon",
    "gemma3_text",
    "gpt_neo",
    "gptj",
    "gpt_oss",
    "modernbert",
    "phi3",
    "swin",
)
"""Model types whose own default sizes are shrunk."""


def new_fields(fields: dict[str, Any], sequence: int | None = 2048) -> dict[str, Any]:
    return changed(fields, shrink(fields, sequence=sequence, new_sequence=16))


def test_grouped_heads_keep_their_ratio_and_widths_theirs() -> None:
    fields = json.loads((CONFIGS / "llama-3-8b.json").read_text())
    assert new_fields(fields) == fields | {
        "hidden_size": 128,
        "intermediate_size": 448,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": 512,
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # What does not divide by two still does not.
        (
            {"n_embd": 1600, "n_head": 25, "vocab_size": 50257, "n_layer": 48},
            {"n_embd": 24, "n_head": 3, "vocab_size": 511, "n_layer": 4},
        ),
        # One key-value head stays one; heads are narrower than the model.
        (
            {"hidden_size": 3072, "num_attention_heads": 8, "num_key_value_heads": 1}
            | {"head_dim": 256},
            {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8},
        ),
        # A layer of each kind, wherever it is.
        (
            {"num_hidden_layers": 7, "layer_types": ["a", "a", "a", "a", "a", "b", "c"]},
            {"num_hidden_layers": 4, "layer_types": ["a", "a", "b", "c"]},
        ),
        (
            {"num_hidden_layers": 9, "mlp_only_layers": [6], "first_k_dense_replace": 3},
            {"num_hidden_layers": 4, "mlp_only_layers": [3], "first_k_dense_replace": 1},
        ),
        # Experts in groups, and more of them than are taken.
        (
            {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
            {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
        ),
        # Heads of every stage stay, and narrow.
        (
            {"embed_dim": 96, "num_heads": [3, 6], "depths": [2, 18], "image_size": 384},
            {"embed_dim": 24, "num_heads": [3, 6], "depths": [2, 2], "image_size": 64},
        ),
        ({"hidden_sizes": [256, 2048]}, {"hidden_sizes": [8, 64]}),
        ({"image_size": 224, "patch_size": 14}, {"image_size": 56, "patch_size": 14}),
        # A window that cuts off something still does.
        ({"sliding_window": 512}, {"sliding_window": 4}),
        ({"sliding_window": 4096}, {"sliding_window": 4096}),
        # Tokens are of the new vocabulary, and rotary factors as many as pairs of a head.
        ({"eos_token_id": [2, 128001]}, {"eos_token_id": [2, 459]}),
        (
            {"head_dim": 96, "rope_scaling": {"long_factor": [1.0] * 48, "type": "longrope"}},
            {"head_dim": 8, "rope_scaling": {"long_factor": [1.0] * 4, "type": "longrope"}},
        ),
        # Components of a model: one with a width of its own, one without.
        (
            {"d_model": 2048, "n_heads": 16, "ffn_config": {"ffn_hidden_size": 4096}}
            | {"vision_config": {"hidden_size": 1024, "num_attention_heads": 16}},
            {"d_model": 32, "n_heads": 4, "ffn_config": {"ffn_hidden_size": 64}}
            | {"vision_config": {"hidden_size": 32, "num_attention_heads": 4}},
        ),
        # Nothing grows, and what the table does not name stays.
        (
            {"hidden_size": 16, "num_attention_heads": 4, "vocab_size": 32, "unheard_of": 9999},
            {"hidden_size": 16, "num_attention_heads": 4, "vocab_size": 32, "unheard_of": 9999},
        ),
    ],
)
def test_sizes(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert new_fields(fields) == expected


def test_changes_are_said() -> None:
    fields = {"hidden_size": 8192, "num_hidden_layers": 6, "layer_types": ["a", "b"] * 3}
    texts = [str(c) for c in shrink(fields, sequence=None, new_sequence=16)]
    assert texts == [
        "hidden_size 8192 -> 64",
        "num_hidden_layers 6 -> 4",
        "layer_types 6 entries -> ['a', 'b', 'a', 'b']",
    ]


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_small_models_of_many_types_have_a_loss(model_type: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type}))
    given = read_configuration(path)
    is_image = model_type == "swin"
    sequence = None if is_image else 2048
    changes = shrink(fields_with_defaults(given), sequence=sequence, new_sequence=16)
    smaller = Configuration(path, changed(given.fields, changes))
    built = build_model(smaller, batch=2, sequence=None if is_image else 16, device="cpu")
    if hasattr(built.model.config, "_experts_implementation"):
        built.model.config._experts_implementation = "eager"
    assert sum(p.numel() for p in built.model.parameters()) < 2e6
    with torch.no_grad():
        assert built.model(**built.example_inputs).loss.isfinite()
