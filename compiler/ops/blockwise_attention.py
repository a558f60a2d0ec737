"""Attention of some query rows to some keys, forward and backward, block by block.

A block is computed as if its keys were all there are. With o, l its result and the log-sum-exp of
its scores, and O, L those of the blocks before, the blocks together have (Liu et al. 2023,
arXiv:2310.01889; Dao et al. 2022, arXiv:2205.14135)

    L' = log(exp L + exp l)        O' = exp(L - L') O + exp(l - L') o

Backward needs no order. With the L and O of all keys, and S the scores of a block,

    P = exp(S - L)    dv = P' do    dS = P (do v' - rowsum(do O))    dq = dS k    dk = dS' q

Two forms. Fused, torch's kernels that return the log-sum-exp (is_fused): flash attention where
all rows see all keys, or the keys up to their own; memory-efficient attention under a mask, which
is added to the scores as numbers, the lowest for what is not seen. Plain, with scores of at most
2,048 x 2,048 a head at once: float64, gradients of masks, odd sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

KeyHeads = int | Tensor
"""How query heads share key heads: so many in a row each, or the key head of every query head."""


Kind = Literal["all", "diagonal", "causal"]


@dataclass(frozen=True, slots=True)
class Block:
    """Query rows and keys, each a range on the local tensors: (first, number). positions: the
    global ones of their firsts. kind: all rows see all keys, row i the keys up to i (diagonal), or
    those whose position is not beyond its own (causal)."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    positions: tuple[int, int]
    kind: Kind


LONGEST = 2048
"""Most rows, and most keys, of a block in the plain form."""


@dataclass(frozen=True, slots=True)
class Attention:
    """What blocks of one op have in common. scale: of the scores."""

    scale: float
    key_heads: KeyHeads
    is_fused: bool


Result = tuple[Tensor, Tensor]
"""Rows of the result [..., s, e], and the log-sum-exp of their scores [..., s], -inf of none."""


def is_fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether torch has kernels for it: at most 32 bits, heads and rows of sizes that they take, a
    mask that is not trained."""
    widths = {x.shape[-1] for x in (query, key, value)}
    return (
        query.dtype.itemsize <= 4
        and all(x.dim() == 4 for x in (query, key, value))
        and len(widths) == 1
        and max(widths) <= 256
        and max(widths) % 8 == 0
        and query.shape[-2] % 32 == 0
        and key.shape[-2] % 32 == 0
        and not (mask is not None and mask.requires_grad)
    )


def block_ranges(runs: Sequence[tuple[int, int]], fused: bool) -> tuple[tuple[int, int], ...]:
    """Ranges (first, number) split as blocks take them: short ones for the plain form."""
    if fused:
        return tuple(runs)
    return tuple(
        (first + k, min(LONGEST, count - k))
        for first, count in runs
        for k in range(0, count, LONGEST)
    )


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over blocks."""
    return dtype if dtype.itemsize >= 4 else torch.float32


def empty_result(query: Tensor, width: int) -> Result:
    """The result of no block; width: of a value."""
    out = query.new_zeros((*query.shape[:-1], width), dtype=wide(query.dtype))
    return out, out.new_full(query.shape[:-1], -torch.inf)


def add_block(total: Result, added: Result, block: Block) -> None:
    """Add the result of a block to that of those before, in positions."""
    out, norm = (x.narrow(d, *block.rows) for x, d in zip(total, (-2, -1), strict=True))
    both = torch.logaddexp(norm, added[1])
    base = finite(both)
    out *= (norm - base).exp_().unsqueeze(-1)
    out += added[0] * (added[1] - base).exp_().unsqueeze(-1)
    norm.copy_(both)


def finite(norm: Tensor) -> Tensor:
    """Rows that see no key have no scores to set off: -inf becomes 0."""
    return norm.masked_fill(norm == -torch.inf, 0.0)


def block_forward(
    of: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, block: Block
) -> Result:
    """The result of a block of query [..., h, s, e], key [..., g, t, e], value [..., g, t, f]. mask
    broadcasts to [..., h, s, all keys]."""
    q, k, v = _operands(of, query, key, value, block)
    if of.is_fused:
        bias = _bias(q, mask, block)
        out, norm = _fused_forward(q, k, v, bias, block.kind == "diagonal", of.scale)
        if block.kind == "causal" or (mask is not None and mask.dtype == torch.bool):
            norm = norm.masked_fill(norm < torch.finfo(q.dtype).min / 2, -torch.inf)
        return out.to(wide(q.dtype)), norm
    scores = _scores(of, q, k, mask, block)
    norm = scores.logsumexp(-1)
    weights = (scores - finite(norm).unsqueeze(-1)).exp_()
    return weights.to(v.dtype) @ v, norm


def block_backward(
    of: Attention,
    local: tuple[Tensor, Tensor, Tensor, Tensor | None],
    result: Result,
    gradient: Tensor,
    into: tuple[Tensor, Tensor, Tensor, Tensor | None],
    block: Block,
) -> None:
    """Add the gradients of a block. local: operands as of block_forward; result: of all blocks, in
    the dtype of the operands; gradient: of that; into: of query, key, value, mask, in their shapes.
    """
    query, key, value, mask = local
    q, k, v = _operands(of, query, key, value, block)
    out, norm = (x.narrow(d, *block.rows) for x, d in zip(result, (-2, -1), strict=True))
    dout = gradient.narrow(-2, *block.rows)
    if of.is_fused:
        bias, causal = _bias(q, mask, block), block.kind == "diagonal"
        operands = (dout, q, k, v, bias, out, finite(norm))
        dq, dk, dv = _fused_backward(operands, causal, of.scale)
    else:
        weights = (_scores(of, q, k, mask, block) - finite(norm).unsqueeze(-1)).exp_()
        dv = weights.to(dout.dtype).mT @ dout
        inner = (dout * out).sum(-1, dtype=weights.dtype, keepdim=True)
        dscores = weights.mul_((dout @ v.mT).to(weights.dtype) - inner)
        if into[3] is not None:
            dmask = _block_of_mask(into[3], block)
            dmask += dscores.sum_to_size(dmask.shape)
        dscores = (dscores * of.scale).to(q.dtype)
        dq, dk = dscores @ k, dscores.mT @ q
    into[0].narrow(-2, *block.rows).add_(dq)
    for total, added in ((into[1], dk), (into[2], dv)):
        _add_to_key_heads(total.narrow(-2, *block.keys), added, of.key_heads)


def _operands(
    of: Attention, query: Tensor, key: Tensor, value: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and keys of a block, a key and a value head for every query head."""
    k, v = (_per_query_head(x.narrow(-2, *block.keys), of.key_heads) for x in (key, value))
    return query.narrow(-2, *block.rows), k, v


def _per_query_head(x: Tensor, key_heads: KeyHeads) -> Tensor:
    if isinstance(key_heads, Tensor):
        return x.index_select(-3, key_heads)
    return x if key_heads == 1 else x.repeat_interleave(key_heads, -3)


def _add_to_key_heads(total: Tensor, added: Tensor, key_heads: KeyHeads) -> None:
    """The reverse, for gradients."""
    if isinstance(key_heads, Tensor):
        total.index_add_(-3, key_heads, added.to(total.dtype))
    elif key_heads == 1:
        total.add_(added)
    else:
        groups = torch.unflatten(added, -3, (-1, key_heads))
        total.add_(groups.sum(-3, dtype=total.dtype))


def _scores(of: Attention, q: Tensor, k: Tensor, mask: Tensor | None, block: Block) -> Tensor:
    scores = (q @ k.mT).to(wide(q.dtype)) * of.scale
    if block.kind != "all":
        return scores.masked_fill_(~_seen(block, q.device), -torch.inf)
    if mask is None:
        return scores
    mask = _block_of_mask(mask, block)
    if mask.dtype == torch.bool:
        return scores.masked_fill_(~mask, -torch.inf)
    return scores.add_(mask)


def _bias(q: Tensor, mask: Tensor | None, block: Block) -> Tensor | None:
    """What the kernels add to the scores [b, h, rows, keys]."""
    if block.kind == "diagonal" or (block.kind == "all" and mask is None):
        return None
    seen = _seen(block, q.device) if mask is None else _block_of_mask(mask, block)
    lowest = torch.finfo(q.dtype).min
    if seen.dtype == torch.bool:
        bias = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, lowest)
    else:
        bias = seen.to(q.dtype).clamp_min(lowest)
    return bias.expand(*q.shape[:-1], block.keys[1])


def _seen(block: Block, device: torch.device) -> Tensor:
    """[rows, keys]: no key is beyond its row."""
    rows, keys = (
        first + torch.arange(count, device=device)
        for first, count in zip(block.positions, (block.rows[1], block.keys[1]), strict=True)
    )
    return rows.unsqueeze(1) >= keys


def _block_of_mask(mask: Tensor, block: Block) -> Tensor:
    """What a block sees of a mask, whose rows are local and whose keys are all keys. A view."""
    if mask.dim() > 1 and mask.shape[-2] != 1:
        mask = mask.narrow(-2, *block.rows)
    return mask if mask.shape[-1] == 1 else mask.narrow(-1, block.positions[1], block.keys[1])


def _fused_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> Result:
    if q.device.type == "cpu":
        found = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif _is_flash(q, bias):
        found = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    else:
        found = _aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, causal, scale=scale
        )
    return found[0], found[1]


def _fused_backward(operands: tuple[Any, ...], causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Gradients of q, k, v. operands: gradient, q, k, v, bias, out, norm: given the results of all
    blocks, the kernels give this block's gradients."""
    gradient, q, k, v, bias, out, norm = operands
    given, result = (gradient, q, k, v), (out, norm)
    # Nothing is dropped: the state of the generator, which they take, is not read.
    if q.device.type == "cpu":
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, *result, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif _is_flash(q, bias):
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        lengths = None, None, q.shape[-2], k.shape[-2]
        found = _aten._scaled_dot_product_flash_attention_backward(
            *given, *result, *lengths, 0.0, causal, state, state, scale=scale
        )
    else:
        state = torch.empty((), dtype=torch.int64, device=q.device)
        wanted = [True, True, True, False]
        found = _aten._scaled_dot_product_efficient_attention_backward(
            *given, bias, *result, state, state, 0.0, wanted, causal, scale=scale
        )
    return tuple(found[:3])


def _is_flash(q: Tensor, bias: Tensor | None) -> bool:
    return bias is None and q.dtype.itemsize == 2


_aten: Any = torch.ops.aten
