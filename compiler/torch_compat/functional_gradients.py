"""torch.func.grad, value_and_grad, vjp and jacrev by torch.autograd.grad. The one file that knows
how torch.func takes gradients.

They wrap tensors in levels of their own, which torch.export cannot trace. Without them a gradient
of `f(x)` is one of an alias of x.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._functorch import eager_transforms

from meshfold.torch_compat.pytree import map_leaves

GRADIENT_IN_VMAP = "a gradient is taken inside of torch.func.vmap"


@contextmanager
def functional_gradients() -> Iterator[None]:
    """A context in which they know no levels."""
    module: Any = eager_transforms
    others = {
        "grad_increment_nesting": _no_level,
        "_wrap_all_tensors": lambda tensors, _: map_leaves(_alias, tensors),
        "_create_differentiable": lambda tensors, level=0: map_leaves(_marked, tensors),
        # One graph is gone through as often as there are levels.
        "_autograd_grad": partial(module._autograd_grad, retain_graph=True),
        "_undo_create_differentiable": lambda tensors, level: tensors,
    }
    before = {name: getattr(module, name) for name in others}
    vars(module).update(others)
    try:
        yield
    finally:
        vars(module).update(before)


@contextmanager
def _no_level() -> Iterator[int]:
    """Raises RuntimeError inside of vmap, below which tensors of a batch have no gradients."""
    if is_inside_vmap():
        raise RuntimeError(GRADIENT_IN_VMAP)
    yield 0


def _alias(x: Any) -> Any:
    return x.view_as(x) if _is_differentiable(x) else x


def _marked(x: Any) -> Any:
    if _is_differentiable(x) and not x.requires_grad:
        x.requires_grad_()
    return x


def _is_differentiable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def is_inside_vmap() -> bool:
    return torch._C._are_functorch_transforms_active()
