"""The op schemas that torchvision needs while it is imported.

Where its compiled ops are of another release of torch, `import torchvision` fails at a registration
for an op that is not there, although its models are plain Python. Import this module first.
"""

import importlib.util

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _defined() -> torch.library.Library | None:
    """The library with them, which lives as long as it is held; None where it is not needed."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    return library


LIBRARY = _defined()
