"""Tiny models with the batches of fine-tuning: padding masks, heads of classification and answers.

Rows of the batch are unequally long, so that microbatches have unequally many targets.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

BATCH, SEQUENCE, VOCABULARY, HIDDEN, CLASSES, CHOICES = 4, 8, 64, 32, 3, 3
LENGTHS = (8, 5, 3, 6)
_TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
Made = tuple[nn.Module, dict[str, Any]]


def mask_of(side: str) -> Tensor:
    """[batch, sequence], 1 where a token is; padding is left or right."""
    right = (torch.arange(SEQUENCE) < torch.tensor(LENGTHS)[:, None]).long()
    return right if side == "right" else right.flip(1)


def text(side: str = "right") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    mask = mask_of(side)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def with_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[0, :3] = -100
    return {**batch, "labels": labels}


def left_padded() -> dict[str, Tensor]:
    """With the positions that follow from the mask."""
    batch = with_labels(text("left"))
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return {**batch, "position_ids": positions}


def _llama(**other: Any) -> transformers.LlamaConfig:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"num_hidden_layers": 3, "hidden_size": HIDDEN, "intermediate_size": 48}
    rest = {"max_position_embeddings": SEQUENCE, "use_cache": False}
    return transformers.LlamaConfig(**sizes, **heads, **rest, **_TEXT, **other)


def _gpt2(**other: Any) -> transformers.GPT2Config:
    sizes = {"n_layer": 3, "n_embd": HIDDEN, "n_head": 4, "n_positions": SEQUENCE}
    dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "use_cache": False}
    return transformers.GPT2Config(**sizes, **dropout, **_TEXT, **other)


def _bert(**other: Any) -> transformers.BertConfig:
    sizes = {"num_hidden_layers": 3, "hidden_size": HIDDEN, "intermediate_size": 48}
    rest = {"num_attention_heads": 4, "max_position_embeddings": SEQUENCE}
    return transformers.BertConfig(**sizes, **rest, **_NO_DROPOUT, **_TEXT, **other)


def _t5() -> transformers.T5Config:
    sizes = {"num_layers": 2, "d_model": HIDDEN, "d_kv": 8, "d_ff": 48, "num_heads": 4}
    rest = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False}
    return transformers.T5Config(**sizes, **rest, **_TEXT)


def _answers() -> dict[str, Tensor]:
    """Two positions are behind the text: they are clamped, and ignored."""
    starts, ends = torch.tensor([0, 2, 1, 50]), torch.tensor([3, 4, 40, 7])
    return {**text(), "start_positions": starts, "end_positions": ends}


def _choices() -> dict[str, Tensor]:
    batch = {n: x[:, None].repeat(1, CHOICES, 1) for n, x in text().items()}
    batch["input_ids"] = (batch["input_ids"] + torch.arange(CHOICES)[:, None]) % VOCABULARY
    return {**batch, "labels": torch.tensor([0, 2, 1, 2])}


def _tags() -> dict[str, Tensor]:
    labels = (text()["input_ids"] % CLASSES).masked_fill(mask_of("right") == 0, -100)
    return {**text(), "labels": labels}


def _classes() -> dict[str, Tensor]:
    return {**text(), "labels": torch.tensor([0, 2, 1, 2])}


class Block(nn.Module):
    """A layer of torchvision's vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 48), nn.GELU(), nn.Linear(48, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.mlp(self.ln_2(x))


class VisionTransformer(nn.Module):
    """As torchvision has it: a class token is expanded and put before the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, 8, 8)
        self.class_token = nn.Parameter(torch.randn(1, 1, HIDDEN))
        self.positions = nn.Parameter(torch.randn(1, 5, HIDDEN))
        self.layers = nn.Sequential(*(Block() for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        x = self.norm(self.layers(x))
        return nn.functional.cross_entropy(self.head(x[:, 0]), labels)


def _images() -> dict[str, Tensor]:
    images = torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return {"images": images.double(), "labels": torch.tensor([0, 2, 1, 2])}


def _clip() -> Made:
    towers = {"num_hidden_layers": 2, "hidden_size": HIDDEN, "intermediate_size": 48}
    towers |= {"num_attention_heads": 4}
    words = {**towers, **_TEXT, "max_position_embeddings": SEQUENCE}
    pixels = {**towers, "image_size": 16, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=words, vision_config=pixels, projection_dim=16)
    batch = {**text(), "pixel_values": _images()["images"], "return_loss": True}
    return transformers.CLIPModel(config), batch


_MODELS: dict[str, Callable[[], Made]] = {
    "llama": lambda: (transformers.LlamaForCausalLM(_llama()), left_padded()),
    "gpt2": lambda: (transformers.GPT2LMHeadModel(_gpt2()), left_padded()),
    "bert": lambda: (transformers.BertForMaskedLM(_bert()), with_labels(text())),
    "t5": lambda: (transformers.T5ForConditionalGeneration(_t5()), with_labels(text())),
    "classes": lambda: (
        transformers.LlamaForSequenceClassification(_llama(num_labels=CLASSES)),
        _classes(),
    ),
    "pooled classes": lambda: (
        transformers.BertForSequenceClassification(_bert(num_labels=CLASSES)),
        _classes(),
    ),
    "answers": lambda: (transformers.BertForQuestionAnswering(_bert()), _answers()),
    "tags": lambda: (transformers.BertForTokenClassification(_bert(num_labels=CLASSES)), _tags()),
    "choices": lambda: (transformers.BertForMultipleChoice(_bert()), _choices()),
    "vit": lambda: (VisionTransformer(), _images()),
    "clip": _clip,
}
PADDED = tuple(name for name in _MODELS if name != "clip")


def padded_model(name: str) -> Made:
    """A model in eval mode, of float64, and its batch."""
    torch.manual_seed(0)
    model, batch = _MODELS[name]()
    return model.double().eval(), batch
