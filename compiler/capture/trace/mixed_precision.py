"""Which tensors of a model a narrow precision casts: parameters and float inputs, not buffers.

Parameters are stored in float32 and read in 16 bits, as FullyShardedDataParallel's mixed precision
does it (Micikevicius et al. 2018, arXiv:1710.03740). Two kinds are read in float32, too:

    batch norm                  its statistics would lose the batch (torch keeps it wide, too)
    what the model keeps wide   `_keep_in_fp32_modules` of a Hugging Face model, for fp16, and
                                `_keep_in_fp32_modules_strict`, for both
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from meshfold.ir.options import COMPUTE_DTYPES, Precision
from meshfold.torch_compat.dtypes import torch_dtype

MASTER_DTYPE = "float32"

_CAST = (torch.float32, torch.bfloat16, torch.float16)


def narrow_dtype(dtype: torch.dtype, precision: Precision) -> torch.dtype:
    """What a tensor of `dtype` is computed with; float64 is nobody's accident and stays."""
    if precision == "model" or dtype not in _CAST:
        return dtype
    return torch_dtype(COMPUTE_DTYPES[precision])


def parameter_casts(model: nn.Module, precision: Precision) -> dict[int, torch.dtype]:
    """The dtype that ops read a parameter in, by its id, for those that precision casts."""
    if precision == "model":
        return {}
    wide = set(_stored_wide(model, precision))
    return {
        id(p): torch.float32 if id(p) in wide else narrow_dtype(p.dtype, precision)
        for p in model.parameters()
        if p.dtype in _CAST
    }


def _stored_wide(model: nn.Module, precision: Precision) -> Iterable[int]:
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            yield from map(id, module.parameters(recurse=False))
    wide = _named_wide(model, "_keep_in_fp32_modules_strict")
    if precision == "fp16":
        wide |= _named_wide(model, "_keep_in_fp32_modules")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if wide & set(name.split(".")):
            yield id(parameter)


def _named_wide(model: Any, attribute: str) -> set[str]:
    found = getattr(model, attribute, None)
    return set(found) if isinstance(found, (list, tuple, set)) else set()
