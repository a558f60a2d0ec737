"""Exact comparisons: compute in float64 where a model's code asks for a narrower float.

Norms, rotary tables and losses of most models compute in float32 on purpose. Two correct programs
then differ by 1e-7, and a wrong gradient can hide in that noise. Under `float64_everywhere` the
same unmodified code computes in float64, in an eager run and while it is captured alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshfold.validation.function_bodies import SeeingMode

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


def in_float64(model: nn.Module) -> nn.Module:
    """`model` itself, its parameters and buffers in float64, or complex128."""
    model.double()
    for module in model.modules():
        # Not module.parameters(), which a class may have replaced by one without arguments.
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_complex():
                parameter.data = parameter.data.to(torch.complex128)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_complex():
                module._buffers[name] = buffer.to(torch.complex128)
    return model


def _widen(value: Any) -> Any:
    if not isinstance(value, torch.dtype):
        return value
    if value == torch.complex64:
        return torch.complex128
    return torch.float64 if value in _NARROW else value


class _Float64Mode(SeeingMode):
    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _CASTS and not args[0].is_complex():
            return args[0].to(torch.float64)
        wide = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return self.run(func, tuple(map(_widen, args)), wide)


@contextmanager
def float64_everywhere() -> Iterator[None]:
    """A context in which `.float()`, `.to(torch.float32)`, `dtype=torch.float32` and the like
    (float16 and bfloat16 too) give float64, complex64 gives complex128, and new tensors are float64
    unless told otherwise.

    Tensors that already are in a narrower dtype stay so: convert the model with `in_float64`, and
    its inputs, first. The default dtype is the whole process's: not for threads side by side.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64Mode():
            yield
    finally:
        torch.set_default_dtype(before)
