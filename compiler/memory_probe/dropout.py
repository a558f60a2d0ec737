"""Dropout as a program runs it: its masks come from the counter-based generator, and attention that
drops weights has them whole (meshfold.ops.local_implementations). That holds other memory than
torch's own ops, which the functions here stand for, with their arguments."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import single_mesh
from meshfold.distributed.step_context import StepContext
from meshfold.ir.mesh import Mesh
from meshfold.ops import local_implementations as local_ops
from meshfold.passes.graph.without_dropout import ATTENTION

_SITE, _WHOLE_BATCH = (0, 0), (0, 1, 1)


def emitted_dropout(target: str, device: torch.device) -> Callable[..., Any] | None:
    """What runs in place of the op `target`; None for an op that never drops anything."""
    function = _FORMS.get(target)
    return function and partial(function, StepContext(single_mesh(Mesh(()), device)))


def _attention(
    context: StepContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p == 0.0 or query.dim() < 4:
        plain: Tensor = torch.ops.aten.scaled_dot_product_attention.default(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return plain
    scores = (*query.shape[:-1], key.shape[-2])
    return local_ops.attention(
        context,
        query,
        key,
        value,
        attn_mask,
        is_causal=is_causal,
        scale=scale,
        probability=dropout_p,
        site=_SITE,
        shape=scores,
        digits=((),) * len(scores),
        batch_slice=_WHOLE_BATCH,
        key_heads=(key.shape[-3], ()),
    )


def _dropout(context: StepContext, x: Tensor, p: float, train: bool) -> Tensor:
    if p == 0.0 or not train:
        return torch.dropout(x, p, train)
    return local_ops.dropout(context, x, p, *_where(x))


def _native_dropout(
    context: StepContext, x: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    if p == 0.0 or train is False:
        plain: tuple[Tensor, Tensor] = torch.ops.aten.native_dropout.default(x, p, train)
        return plain
    return local_ops.native_dropout(context, x, p, *_where(x))


def _where(x: Tensor) -> tuple[Any, ...]:
    return _SITE, tuple(x.shape), ((),) * x.dim(), _WHOLE_BATCH


_FORMS: dict[str, Callable[..., Any]] = {
    ATTENTION: _attention,
    "aten.dropout.default": _dropout,
    "aten.native_dropout.default": _native_dropout,
}
