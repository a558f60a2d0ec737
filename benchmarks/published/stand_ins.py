"""Models as frameworks with fused kernels run them: what a kernel does in one pass over its
operands stands in the captured graph as one op of as many bytes."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

FORCE_GQA = "TRANSFORMERS_SDPA_FORCE_GQA"
"""Has attention of transformers take keys and values of fewer heads than queries as they are."""


@contextmanager
def fused_kernels(fields: Mapping[str, Any]) -> Iterator[None]:
    """Models of transformers that are built and captured inside have one op for the rotary
    embedding of queries, one for that of keys, and no copies of keys and values. fields: of the
    configuration; a model without rotary embeddings is as it is."""
    kind = fields["model_type"]
    modeling = import_module(f"transformers.models.{kind}.modeling_{kind}")
    with patch.dict(os.environ, {FORCE_GQA: "1"}):
        if hasattr(modeling, "apply_rotary_pos_emb"):
            with patch.object(modeling, "apply_rotary_pos_emb", _one_pass):
                yield
        else:
            yield


def _one_pass(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads and writes q and k once."""
    scale = cos.unsqueeze(unsqueeze_dim)[..., :1]
    return q * scale, k * scale
