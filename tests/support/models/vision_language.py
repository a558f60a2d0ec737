"""Tiny vision-language models of transformers, unmodified, with a batch for each: features of
images take the places of their tokens, which models check by counting them."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

BATCH, TOKENS, VOCABULARY, HIDDEN, IMAGE = 4, 24, 64, 32, 3

_LAYERS = {"num_hidden_layers": 2, "hidden_size": HIDDEN, "intermediate_size": 64}
_TEXT = {
    **_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}
_IMAGES = {"image_size": 16, "patch_size": 4, "num_channels": 4}
_VISION = {**_LAYERS, **_IMAGES, "num_attention_heads": 8, "attention_dropout": 0.0}
_TOKEN = {"image_token_id": IMAGE, "image_token_index": IMAGE}
_CLIP = {"model_type": "clip_vision_model", "projection_dim": HIDDEN, **_VISION}
_SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False, **_VISION}


def _batch(tokens_per_image: int, *shape: int) -> dict[str, Tensor]:
    """An image a row, and its tokens; labels without those, and some more without."""
    ids = torch.randint(4, VOCABULARY, (BATCH, TOKENS))
    ids[:, 2 : 2 + tokens_per_image] = IMAGE
    labels = ids.masked_fill(ids == IMAGE, -100)
    labels[0, -3:] = -100
    pixels = torch.randn(BATCH, *shape, dtype=torch.float64)
    return {"input_ids": ids, "pixel_values": pixels, "labels": labels}


def _llava() -> tuple[Any, dict[str, Tensor]]:
    text = {"model_type": "llama", **_TEXT}
    fields = {"vision_config": _CLIP, "text_config": text, "vision_feature_layer": -1, **_TOKEN}
    config = transformers.LlavaConfig(**fields)
    return transformers.LlavaForConditionalGeneration(config), _batch(16, 4, 16, 16)


def _paligemma() -> tuple[Any, dict[str, Tensor]]:
    text = {"model_type": "gemma", "head_dim": 4, **_TEXT}
    vision = {**_SIGLIP, "projection_dim": HIDDEN}
    config = transformers.PaliGemmaConfig(
        vision_config=vision, text_config=text, projection_dim=HIDDEN, **_TOKEN
    )
    batch = _batch(16, 4, 16, 16)
    kinds = (torch.arange(TOKENS) > 18).long().expand(BATCH, TOKENS).clone()
    batch |= {"token_type_ids": kinds, "attention_mask": torch.ones_like(kinds)}
    return transformers.PaliGemmaForConditionalGeneration(config), batch


def _gemma3() -> tuple[Any, dict[str, Tensor]]:
    text = {"model_type": "gemma3_text", "head_dim": 4, "sliding_window": 8, **_TEXT}
    fields = {"vision_config": _SIGLIP, "text_config": text, "mm_tokens_per_image": 4, **_TOKEN}
    batch = _batch(4, 4, 16, 16)
    kinds = (batch["input_ids"] == IMAGE).long()
    batch |= {"token_type_ids": kinds, "attention_mask": torch.ones_like(kinds)}
    return transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(**fields)), batch


def _internvl() -> tuple[Any, dict[str, Tensor]]:
    vision = {
        **_VISION,
        "model_type": "internvl_vision",
        "image_size": [16, 16],
        "patch_size": [4, 4],
        "use_mask_token": False,
    }
    config = transformers.InternVLConfig(
        vision_config=vision,
        text_config={"model_type": "qwen2", **_TEXT},
        image_seq_length=4,
        downsample_ratio=0.5,
        **_TOKEN,
    )
    return transformers.InternVLForConditionalGeneration(config), _batch(4, 4, 16, 16)


def _idefics3() -> tuple[Any, dict[str, Tensor]]:
    config = transformers.Idefics3Config(
        vision_config={**_VISION, "model_type": "idefics3_vision"},
        text_config={"model_type": "llama", **_TEXT},
        scale_factor=2,
        image_token_id=IMAGE,
        pad_token_id=0,
    )
    return transformers.Idefics3ForConditionalGeneration(config), _batch(4, 1, 4, 16, 16)


def _qwen2_5_vl() -> tuple[Any, dict[str, Tensor]]:
    vision = {
        "depth": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_heads": 4,
        "in_channels": 4,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN,
        "window_size": 8,
        "fullatt_block_indexes": [1],
    }
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    config = transformers.Qwen2_5_VLConfig(
        vision_config=vision,
        text_config={**_TEXT, "rope_parameters": rope},
        image_token_id=IMAGE,
        vision_start_token_id=4,
        vision_end_token_id=5,
    )
    batch = _batch(4, 1)
    batch["pixel_values"] = torch.randn(BATCH * 16, 4 * 2 * 16, dtype=torch.float64)
    batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * BATCH)
    return transformers.Qwen2_5_VLForConditionalGeneration(config), batch


_MODELS: dict[str, Callable[[], tuple[Any, dict[str, Tensor]]]] = {
    "llava": _llava,
    "paligemma": _paligemma,
    "gemma3": _gemma3,
    "internvl": _internvl,
    "idefics3": _idefics3,
    "qwen2_5_vl": _qwen2_5_vl,
}


def vision_language_model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in float64 and eval mode, with noise on its parameters, and a batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch = _MODELS[name]()
        model = model.double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model, batch
