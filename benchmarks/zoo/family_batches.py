"""All families of transformers in the zoo, and how one of them and its batch are made.

Two layers (per stack), hidden size 32, eight heads: small enough to train in float64 in a second,
large enough that data, tensor and sequence parallelism over four processes cut every kind of
layer. Parameters get noise, since initial values leave biases 0 and norms 1, which would hide a
wrong gradient. Dropout is off and the models are in eval mode, so that one process is comparable.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from zoo import family_models, family_more
from zoo.family_fields import CLASSES, VOCABULARY, Family, Kind
from zoo.family_small import small_config

BATCH, SEQUENCE, IGNORED = 4, 8, -100

FAMILIES: tuple[Family, ...] = (*family_models.FAMILIES, *family_more.FAMILIES)


def find(name: str) -> Family:
    """Raises KeyError for a family that is not in the table."""
    return {family.name: family for family in FAMILIES}[name]


def make(family: Family) -> tuple[nn.Module, dict[str, Any]]:
    """The float64 model and keyword arguments for one call of it; the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = _config(family)
        model = getattr(transformers, family.model)(config).double().eval()
        if hasattr(model.config, "_experts_implementation"):
            # The default, grouped_mm, has no float64 kernel.
            model.config._experts_implementation = "eager"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, dtype=parameter.dtype))
        return model, _batch(family)


def _config(family: Family) -> Any:
    if family.config:
        return getattr(transformers, family.config)(**family.fields)
    return small_config(family)


def _batch(family: Family) -> dict[str, Any]:
    tokens = torch.randint(4, VOCABULARY, (BATCH, SEQUENCE))
    labels = torch.randint(1, VOCABULARY, (BATCH, SEQUENCE))
    # Uneven over rows: a wrong mean over ranks shows.
    labels[0, : SEQUENCE // 2] = IGNORED
    labels[-1, -1] = IGNORED
    classes = torch.randint(0, CLASSES, (BATCH,))
    batches: dict[Kind, Callable[[], dict[str, Any]]] = {
        "text": lambda: {"input_ids": tokens, "labels": labels},
        "padded": lambda: {"input_ids": tokens, "labels": labels, "attention_mask": _mask()},
        "image": lambda: {"pixel_values": _pixels(family), "labels": classes},
        "mel": lambda: {"input_features": _noise(8, 16), "labels": labels.clamp(min=1)},
        "wave": lambda: {"input_values": _noise(256), "labels": classes},
        "pairs": lambda: {
            "input_ids": torch.cat([tokens[:, :-1], torch.full((BATCH, 1), 2)], 1),
            "pixel_values": _pixels(family),
            "return_loss": True,
        },
        "classes": lambda: {"input_ids": tokens * _mask(), "labels": classes},
        "tags": lambda: {"input_ids": tokens, "labels": labels.clamp(max=CLASSES - 1)},
        "spans": lambda: {
            "input_ids": tokens,
            "start_positions": torch.randint(0, SEQUENCE, (BATCH,)),
            "end_positions": torch.randint(0, SEQUENCE, (BATCH,)),
        },
        "choices": lambda: {
            "input_ids": torch.randint(4, VOCABULARY, (BATCH, 2, SEQUENCE)),
            "labels": classes % 2,
        },
        "next": lambda: {"input_ids": tokens, "labels": classes % 2},
        "segments": lambda: {
            "pixel_values": _pixels(family),
            "labels": torch.randint(0, CLASSES, (BATCH, family.pixels, family.pixels)),
        },
        "speech": lambda: {"input_values": _noise(256), "labels": labels[:, -3:-1]},
    }
    return batches[family.kind]()


def _pixels(family: Family) -> Tensor:
    return _noise(4, family.pixels, family.pixels)


def _noise(*shape: int) -> Tensor:
    return torch.randn((BATCH, *shape), dtype=torch.float64)


def _mask() -> Tensor:
    """Padding at the end of the first row."""
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
    mask[0, -2:] = 0
    return mask
