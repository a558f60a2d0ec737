"""A tiny unmodified Switch Transformers, whose experts are modules of their own with a capacity."""

from typing import Any

import torch
import transformers
from torch import nn

from support.models.hugging_face import HEADS, HIDDEN, tiny_model, with_padding

EXPERTS = 4


def tiny_switch(**fields: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The float64 model in eval mode, two layers per stack of which one has experts, and keyword
    arguments for it, with padding. fields: of the configuration, in place of its own. An expert has
    room for two of the eight tokens of a row, so that some are dropped."""
    # Batch and noise as of T5, which has the same stacks without experts.
    _, batch = tiny_model("t5")
    sizes = {
        "vocab_size": 64,
        "d_model": HIDDEN,
        "d_kv": HIDDEN // HEADS,
        "d_ff": 64,
        "num_heads": HEADS,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "num_experts": EXPERTS,
        "expert_capacity": 2,
        "dropout_rate": 0.0,
        "use_cache": False,
        "decoder_start_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.SwitchTransformersConfig(**sizes | fields)
        model = transformers.SwitchTransformersForConditionalGeneration(config).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            # Of two that are equal the first is chosen, so that nobody chooses the last.
            for name, weight in model.named_parameters():
                if name.endswith("router.classifier.weight"):
                    weight[-1] = weight[0]
    return model, with_padding(batch)
