"""All models of the zoo, and which package each library is imported as."""

import importlib
from itertools import zip_longest
from typing import Any

from torch import nn

from zoo import diffusion, graphs, plain, plain_more, sequence, timm_models, vision
from zoo.entry import Built, Entry

PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "timm": "timm",
    "torchvision": "torchvision",
    "diffusers": "diffusers",
    "vit-pytorch": "vit_pytorch",
    "x-transformers": "x_transformers",
    "open_clip": "open_clip",
    "torch_geometric": "torch_geometric",
    "peft": "peft",
    "monai": "monai",
    "segmentation-models": "segmentation_models_pytorch",
    "kornia": "kornia",
}


def _families() -> tuple[Entry, ...]:
    """Those of transformers (benchmarks/zoo/family_batches.py), where it is there."""
    try:
        families: Any = importlib.import_module("zoo.family_batches")
    except ImportError:
        return ()

    def entry(family: Any) -> Entry:
        def build() -> Built:
            model, batch = families.make(family)
            single: nn.Module = model.float()
            return single, {
                name: x.float() if hasattr(x, "is_floating_point") and x.is_floating_point() else x
                for name, x in batch.items()
            }

        return Entry("transformers", family.name, build)

    return tuple(entry(family) for family in families.FAMILIES)


def _in_turn(*groups: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """One of each group after the other, so that the first results are of all libraries."""
    rounds = zip_longest(*groups)
    return tuple(entry for entries in rounds for entry in entries if entry is not None)


MODELS = (
    *_in_turn(
        plain.MODELS,
        plain_more.MODELS,
        diffusion.MODELS,
        graphs.GEOMETRIC,
        graphs.PEFT,
        sequence.X_TRANSFORMERS,
        timm_models.TIMM,
        vision.TORCHVISION,
        vision.VIT_PYTORCH,
        vision.SEGMENTATION,
        vision.KORNIA,
        sequence.OPEN_CLIP,
        sequence.MONAI,
    ),
    *_families(),
)
