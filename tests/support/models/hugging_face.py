"""Tiny unmodified Hugging Face models of the six families, with a batch for each.

Sizes are even and divisible by 4 (hidden, heads, vocabulary, sequence, batch), so that every test
mesh divides them; labels hold some -100 where the family ignores them; GPT-2, T5 and BERT tie
their embeddings. Dropout is 0 and the models are in eval mode.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

FAMILIES = ("gpt2", "llama", "bert", "t5", "vit", "mixtral")


def families(*quick: str, without: tuple[str, ...] = ()) -> list[Any]:
    """All families but some as parameters of a test; those not named are marked slow."""
    assert set(quick) | set(without) <= set(FAMILIES)
    chosen = [f for f in FAMILIES if f not in without]
    return [f if f in quick else pytest.param(f, marks=slow(f)) for f in chosen]


def slow(family: str) -> pytest.MarkDecorator:
    """The mark of a slow test of a family. T5 of few layers has regions that are larger, and do
    not repeat."""
    return pytest.mark.slow(10) if family == "t5" else pytest.mark.slow


BATCH = 4
SEQUENCE = 8
VOCABULARY = 64
HIDDEN = 32
HEADS = 8
IGNORED = -100

_TEXT = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}


def _gpt2(layers: int, **other: Any) -> nn.Module:
    sizes = {"n_layer": layers, "n_embd": HIDDEN, "n_head": HEADS, "n_positions": SEQUENCE}
    dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes | dropout | _TEXT | other)
    return transformers.GPT2LMHeadModel(config)


def _llama_sizes(layers: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 4,  # grouped-query attention
        "max_position_embeddings": SEQUENCE,
        "tie_word_embeddings": False,
        **_TEXT,
    }


def _llama(layers: int) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_llama_sizes(layers)))


def _uneven(layers: int) -> nn.Module:
    """A Llama with no dim that four ranks divide."""
    sizes = _llama_sizes(layers) | {
        "vocab_size": 67,
        "hidden_size": 30,
        "intermediate_size": 26,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def _odd_gpt2(layers: int) -> nn.Module:
    """Tied, with a vocabulary that nothing divides: as GPT-2's 50,257."""
    return _gpt2(layers, vocab_size=67)


def _three_gpt2(layers: int) -> nn.Module:
    """Three heads, in a projection to q, k and v together: as GPT-2 XL's 25."""
    return _gpt2(layers, n_embd=24, n_head=3)


def _three_llama(layers: int) -> nn.Module:
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_llama_sizes(layers) | heads))


def _odd_gemma2(layers: int) -> nn.Module:
    """The same with logits that are capped: scaled, tanh, scaled."""
    sizes = _llama_sizes(layers) | {"vocab_size": 67, "tie_word_embeddings": True, "head_dim": 4}
    config = transformers.Gemma2Config(**sizes, final_logit_softcapping=2.0, sliding_window=4)
    config._attn_implementation = "eager"
    return transformers.Gemma2ForCausalLM(config)


def _heavy_ends(layers: int) -> nn.Module:
    """A Llama whose embedding weighs, and whose head works, as much as many of its layers."""
    sizes = _llama_sizes(layers) | {"vocab_size": 4096}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def _mixtral(layers: int) -> nn.Module:
    config = transformers.MixtralConfig(
        **_llama_sizes(layers), num_local_experts=4, num_experts_per_tok=2
    )
    model = transformers.MixtralForCausalLM(config)
    # The default, grouped_mm, has no float64 kernel.
    model.config._experts_implementation = "eager"
    return model


def _gpt_oss(layers: int) -> nn.Module:
    """Experts with biases, transposed weights, gates and inputs interleaved."""
    config = transformers.GptOssConfig(
        **_llama_sizes(layers),
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        head_dim=4,
        attention_dropout=0.0,
    )
    model = transformers.GptOssForCausalLM(config)
    model.config._experts_implementation = "eager"
    return model


def _bert(layers: int) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_attention_heads=HEADS,
        max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def _t5(layers: int, heads: int = HEADS) -> nn.Module:
    config = transformers.T5Config(
        num_layers=layers,
        d_model=HIDDEN,
        d_kv=4,
        d_ff=64,
        num_heads=heads,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        **_TEXT,
    )
    return transformers.T5ForConditionalGeneration(config)


def _vit(layers: int, heads: int = HEADS, hidden: int = HIDDEN) -> nn.Module:
    config = transformers.ViTConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=64,
        num_attention_heads=heads,
        image_size=12,
        patch_size=4,
        num_channels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=8,
    )
    return transformers.ViTForImageClassification(config)


_BUILDERS: dict[str, Callable[[int], nn.Module]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "mixtral": _mixtral,
    "uneven": _uneven,
    "odd_gpt2": _odd_gpt2,
    "odd_gemma2": _odd_gemma2,
    "three_gpt2": _three_gpt2,
    "three_llama": _three_llama,
    "three_vit": lambda layers: _vit(layers, heads=3, hidden=24),
    "three_t5": lambda layers: _t5(layers, heads=3),
    "gpt_oss": _gpt_oss,
    "heavy_ends": _heavy_ends,
}


def tiny_model(
    family: str, *, layers: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, dict[str, Any]]:
    """A model of `family` with `layers` layers (T5: per stack) and keyword arguments for it.

    The loss of an HF model is `.loss` of what it returns; it upcasts logits to float32, see
    meshfold.validation.float64_mode.float64_everywhere for exact comparisons.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _BUILDERS[family](layers).to(dtype).eval()
    # Default initial values leave biases 0 and norms 1, which would hide a wrong gradient.
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=dtype)
            parameter.add_(0.1 * noise)
    return model, _batch(family, generator, dtype)


def _batch(family: str, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    if family.endswith("vit"):
        pixels = torch.randn((BATCH, 4, 12, 12), generator=generator, dtype=dtype)
        return {
            "pixel_values": pixels,
            "labels": torch.randint(0, 8, (BATCH,), generator=generator),
        }
    shape = (BATCH, SEQUENCE)
    tokens = torch.randint(1, VOCABULARY, shape, generator=generator)
    labels = torch.randint(1, VOCABULARY, shape, generator=generator)
    # Uneven over rows: a wrong mean over ranks shows.
    labels[0, : SEQUENCE // 2] = IGNORED
    labels[-1, -1] = IGNORED
    return {"input_ids": tokens, "labels": labels}


def with_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """`batch` without the last token of every text, so that attention has a mask. Where it has
    none it is causal: a rank with the last rows has most to do, and heads are traded for rows."""
    padding = torch.ones_like(batch["input_ids"])
    padding[:, -1] = 0
    return {**batch, "attention_mask": padding}


def meta_llama(
    sequence: int, batch: int, *, hidden: int = 1024, layers: int = 2
) -> tuple[nn.Module, dict[str, Any]]:
    """A Llama without values in bfloat16, large enough for bytes to count more than launches."""
    sizes = _llama_sizes(layers) | {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": sequence,
        "vocab_size": 8 * hidden,
    }
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        ids = torch.empty(batch, sequence, dtype=torch.long)
    return model.to(torch.bfloat16), {"input_ids": ids, "labels": ids.clone()}
