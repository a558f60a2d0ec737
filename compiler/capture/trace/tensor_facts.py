"""Shape, strides and dtype of tensors as plain data, and tensors that have them."""

from collections.abc import Sequence

import torch

from meshfold.torch_compat.dtypes import dtype_name, torch_dtype

TensorFacts = tuple[tuple[int, ...], tuple[int, ...], str]
"""Shape, strides and dtype name."""


def tensor_facts(tensor: torch.Tensor) -> TensorFacts:
    return tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype)


def empty_results(facts: Sequence[TensorFacts]) -> list[torch.Tensor]:
    return [torch.empty_strided(s, t, dtype=torch_dtype(name)) for s, t, name in facts]
