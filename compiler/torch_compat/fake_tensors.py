"""Fake tensors: shapes and dtypes without storage. The one file that knows torch's private modules
for tracing: fake tensors, the flags that make a model take the paths of an export, casts of
modules, lazy graphs.

Fakes live on the CPU whatever device the model is on: a device in the graph means "the rank's
device", and fake CUDA tensors that require gradients abort a CPU-only torch.
"""

import inspect
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedOperatorException
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from meshfold.errors import CaptureError
from meshfold.torch_compat.dtypes import dtype_name
from meshfold.torch_compat.source_lines import user_line

__all__ = [
    "FakeTensorMode",
    "as_exporting",
    "casts_of_nothing",
    "fake_like",
    "fake_mode",
    "is_fake",
    "lacks_fake",
    "lazy_graphs",
    "modes_of",
]


def fake_mode() -> FakeTensorMode:
    """A mode in which real tensors held by a model may meet fake ones."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def modes_of(module: nn.Module) -> list[FakeTensorMode]:
    """Those of its parameters and buffers."""
    tensors = (*module.parameters(), *module.buffers())
    return [x.fake_mode for x in tensors if isinstance(x, FakeTensor)]


def fake_like(
    tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A fake CPU tensor with the shape, strides and dtype of `tensor` (or another `dtype`), a
    Parameter for one."""
    shape, dtype = tensor.shape, dtype or tensor.dtype
    if tensor.layout is torch.strided:
        bare = torch.empty_strided(shape, tensor.stride(), dtype=dtype, device="meta")
    else:
        bare = torch.empty(shape, dtype=dtype, device="meta")
    fake = FakeTensor(mode, bare, torch.device("cpu"))
    if isinstance(tensor, nn.Parameter):
        # What nn.Parameter does with a tensor subclass, without the detach that costs most of it.
        fake.requires_grad_(tensor.requires_grad)
        fake._is_param = True
    return fake


def lacks_fake(error: BaseException) -> bool:
    """Whether an op could not run on fake tensors because nobody said what it returns."""
    is_unknown = isinstance(error, UnsupportedOperatorException)
    return is_unknown or "no fake impl" in str(error)


@contextmanager
def as_exporting() -> Iterator[None]:
    """Make torch.compiler.is_exporting() answer True: models choose other code while traced."""
    flags = torch.compiler
    before = (flags._is_compiling_flag, flags._is_exporting_flag)
    flags._is_compiling_flag = flags._is_exporting_flag = True
    try:
        yield
    finally:
        flags._is_compiling_flag, flags._is_exporting_flag = before


@contextmanager
def casts_of_nothing() -> Iterator[None]:
    """Let a model cast a module to the dtype that it has, as some do with their routers: by itself
    torch would swap parameters for equal ones, which it cannot while they are traced.

    Raises CaptureError for a cast to another dtype, which would change what the model computes.
    """
    cast = nn.Module._apply

    def refuse_changes(module: Any, convert: Any, recurse: bool = True) -> Any:
        for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
            before, after = tensor.dtype, convert(tensor).dtype
            if before != after:
                name = type(module).__name__
                raise CaptureError(
                    f"{name} of {dtype_name(before)} is cast to {dtype_name(after)} while the "
                    "model runs; do it before meshfold.compile, or, with a 16-bit --precision, "
                    "name it in _keep_in_fp32_modules_strict of the model",
                    op=name,
                    source=user_line(traceback.walk_stack(inspect.currentframe())),
                )
        return module

    nn.Module._apply = refuse_changes  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = cast  # type: ignore[method-assign]


def lazy_graphs() -> AbstractContextManager[None]:
    """Let torch write the Python code of a traced graph when it is run, instead of every time that
    an export pass has touched it."""
    context: AbstractContextManager[None] = _use_lazy_graph_module(True)
    return context
