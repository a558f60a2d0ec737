"""Subclasses of torch.Tensor. The one file that knows what torch keeps about them."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.optim import optimizer
from torch.utils import _foreach_utils

from meshfold.errors import moved

_LISTS = ((optimizer, "_foreach_supported_types"), (_foreach_utils, "_foreach_supported_types"))


def on_plain_tensors() -> AbstractContextManager[None]:
    """Inside, functions of torch take subclasses for plain tensors, and return such."""
    if not hasattr(torch._C, "DisableTorchFunctionSubclass"):  # pragma: no cover
        raise moved("DisableTorchFunctionSubclass")
    return torch._C.DisableTorchFunctionSubclass()


def plain_tensor(x: Tensor) -> Tensor:
    """`x` itself, or a plain tensor in the memory of a subclass; a gradient flows through it."""
    return x if type(x) in (Tensor, nn.Parameter) else x.as_subclass(Tensor)


def let_optimizers_fuse(kind: type[Tensor]) -> None:
    """Optimizers take one kernel for many parameters of this subclass too, as torch has it for
    DTensor."""
    for module, name in _LISTS:
        kinds = getattr(module, name, None)
        if kinds is None:  # pragma: no cover
            raise moved(f"{module.__name__}.{name}")
        if kind not in kinds:
            kinds.append(kind)
