"""flex_attention in dense form, which a graph can hold and a CPU can differentiate.

torch's own runs what score_mod and mask_mod compute inside of a compiled kernel; without one it has
no backward on a CPU, and torch.export keeps neither. Here

    without score_mod   scaled_dot_product_attention under the mask as flags [b, h, s, t]
    with                product, score_mod of all scores, softmax over what the mask leaves, product

score_mod and mask_mod are mapped over all indices of the full tensors, so that whatever they read
of a head or a row is right on every shard. The one file that knows torch's modules of it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as torch_flex
from torch.overrides import TorchFunctionMode

_FUNCTIONS = ("flex_attention", "create_block_mask")


@contextmanager
def dense_flex_attention() -> Iterator[None]:
    """A context in which flex_attention and create_block_mask are the dense ones, wherever a model
    has imported them, and compiled functions run as they are; not for threads side by side."""
    functions = [getattr(torch_flex, name) for name in _FUNCTIONS]
    before = [function.__code__ for function in functions]
    names = vars(torch_flex)
    names.update(_meshfold_attention=_attention, _meshfold_block_mask=_block_mask)
    try:
        for function, stand_in in zip(functions, (_call_attention, _call_block_mask), strict=True):
            function.__code__ = stand_in.__code__
        yield
    finally:
        for function, code in zip(functions, before, strict=True):
            function.__code__ = code
        for name in ("_meshfold_attention", "_meshfold_block_mask"):
            names.pop(name, None)  # what puts a model's globals back may have been there


def _call_attention(*args: Any, **kwargs: Any) -> Any:
    return _meshfold_attention(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def _call_block_mask(*args: Any, **kwargs: Any) -> Any:
    return _meshfold_block_mask(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def _block_mask(
    mask_mod: Callable[..., Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    **_: Any,
) -> Any:
    """A BlockMask that knows its mask_mod and no blocks."""
    none = torch.zeros((B or 1, H or 1, 1), dtype=torch.int32)
    return torch_flex.BlockMask.from_kv_blocks(
        none,
        none.unsqueeze(-1),
        BLOCK_SIZE=(Q_LEN, KV_LEN),
        mask_mod=mask_mod,
        seq_lengths=(Q_LEN, KV_LEN),
        compute_q_blocks=False,
    )


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Tensor:
    """Arguments as of torch's flex_attention. Raises NotImplementedError for statistics of the
    softmax, and for blocks without a mask_mod."""
    if return_lse or return_aux is not None:
        raise NotImplementedError("flex_attention returns no statistics here")
    shape = (*query.shape[:3], key.shape[2])
    mask = None if block_mask is None else _mask(block_mask, shape)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if score_mod is not None:
        groups = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        scores = query.to(wide) @ keys.to(wide).transpose(-2, -1) * scale
        changed = _mapped(score_mod, shape, scores)
        if changed is not None:
            return (_weights(changed, mask).to(query.dtype) @ values).to(query.dtype)
    return functional.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=enable_gqa
    )


def _weights(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The softmax over what the mask leaves; zeros where it leaves nothing."""
    if mask is None:
        return scores.softmax(-1)
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(~mask, lowest).softmax(-1).masked_fill(~mask, 0.0)


def _mask(block_mask: Any, shape: tuple[int, ...]) -> Tensor:
    """Flags [b, h, s, t]; b and h are 1 where the mask has but one."""
    if block_mask.mask_mod is torch_flex.noop_mask:
        raise NotImplementedError("a block mask has no mask_mod, so only blocks that skip")
    sizes = (*block_mask.kv_num_blocks.shape[:2], *shape[2:])
    found = _mapped(block_mask.mask_mod, sizes)
    assert found is not None
    return found


class _IndexByTensor(TorchFunctionMode):
    """Lets x[i] take a mapped index, which is no number of Python's."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            indices = list(args[1]) if isinstance(args[1], tuple) else [args[1]]
            if all(isinstance(index, Tensor) for index in indices):
                return torch.ops.aten.index(args[0], indices)
        return func(*args, **(kwargs or {}))


def _mapped(
    function: Callable[..., Tensor], shape: tuple[int, ...], scores: Tensor | None = None
) -> Tensor | None:
    """`function` of every place of `shape`, and of the score there; None if that is the score."""
    is_same = False

    def watched(*args: Tensor) -> Tensor:
        nonlocal is_same
        result = function(*args)
        is_same = result is args[0] and scores is not None
        return result

    mapped: Callable[..., Tensor] = watched
    for dim in reversed(range(4)):
        dims = tuple(0 if d == dim else None for d in range(4))
        mapped = torch.vmap(mapped, in_dims=dims if scores is None else (0, *dims))
    indices = [torch.arange(size) for size in shape]
    with _IndexByTensor():
        found = mapped(*([] if scores is None else [scores]), *indices)
    return None if is_same else found
