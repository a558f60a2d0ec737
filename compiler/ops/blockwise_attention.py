"""Attention of some query rows to some keys, forward and backward, in pieces that are put together.

A piece is made as if its keys were all there are. With o, l its result and the log-sum-exp of its
scores, and O, L those of the pieces before, the pieces together have (Liu et al. 2023,
arXiv:2310.01889; Dao et al. 2022, arXiv:2205.14135)

    L' = log(exp L + exp l)        O' = exp(L - L') O + exp(l - L') o

Backward needs no order. With the L and O of all keys, and S the scores of a piece,

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


Kind = Literal["all", "diagonal", "cut"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Query rows and keys, each a range on the local tensors: (first, number). place: the global
    positions of their firsts. kind: all rows see all keys, row i the keys up to i, or (cut) those
    whose position is not beyond its own."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    place: tuple[int, int]
    kind: Kind


LONGEST = 2048
"""Rows, and keys, of a piece in the plain form."""


@dataclass(frozen=True, slots=True)
class Attention:
    """What pieces of one op have in common. scale: of the scores."""

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


def in_parts(runs: Sequence[tuple[int, int]], fused: bool) -> tuple[tuple[int, int], ...]:
    """Ranges (first, number) as pieces are made of them: short ones for the plain form."""
    if fused:
        return tuple(runs)
    return tuple(
        (first + k, min(LONGEST, count - k))
        for first, count in runs
        for k in range(0, count, LONGEST)
    )


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over pieces are kept in."""
    return dtype if dtype.itemsize >= 4 else torch.float32


def nothing_yet(query: Tensor, width: int) -> Result:
    """The result of no pieces; width: of a value."""
    made = query.new_zeros((*query.shape[:-1], width), dtype=wide(query.dtype))
    return made, made.new_full(query.shape[:-1], -torch.inf)


def add_block(total: Result, part: Result, piece: Piece) -> None:
    """Put the result of a piece together with those before, in place."""
    out, norm = (x.narrow(d, *piece.rows) for x, d in zip(total, (-2, -1), strict=True))
    both = torch.logaddexp(norm, part[1])
    base = finite(both)
    out *= (norm - base).exp_().unsqueeze(-1)
    out += part[0] * (part[1] - base).exp_().unsqueeze(-1)
    norm.copy_(both)


def finite(norm: Tensor) -> Tensor:
    """Rows that see no key have no scores to set off: -inf becomes 0."""
    return norm.masked_fill(norm == -torch.inf, 0.0)


def block_forward(
    of: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, piece: Piece
) -> Result:
    """Result of a piece of query [..., h, s, e], key [..., g, t, e], value [..., g, t, f]. mask
    broadcasts to [..., h, s, all keys]."""
    q, k, v = _operands(of, query, key, value, piece)
    if of.is_fused:
        bias = _bias(q, mask, piece)
        out, norm = _fused_forward(q, k, v, bias, piece.kind == "diagonal", of.scale)
        if piece.kind == "cut" or (mask is not None and mask.dtype == torch.bool):
            norm = norm.masked_fill(norm < torch.finfo(q.dtype).min / 2, -torch.inf)
        return out.to(wide(q.dtype)), norm
    scores = _scores(of, q, k, mask, piece)
    norm = scores.logsumexp(-1)
    weights = (scores - finite(norm).unsqueeze(-1)).exp_()
    return weights.to(v.dtype) @ v, norm


def block_backward(
    of: Attention,
    local: tuple[Tensor, Tensor, Tensor, Tensor | None],
    made: Result,
    gradient: Tensor,
    into: tuple[Tensor, Tensor, Tensor, Tensor | None],
    piece: Piece,
) -> None:
    """Add the gradients of a piece. local: operands as of block_forward; made: of all pieces, in
    the dtype of the operands; gradient: of that; into: of query, key, value, mask, in their shapes.
    """
    query, key, value, mask = local
    q, k, v = _operands(of, query, key, value, piece)
    out, norm = (x.narrow(d, *piece.rows) for x, d in zip(made, (-2, -1), strict=True))
    dout = gradient.narrow(-2, *piece.rows)
    if of.is_fused:
        bias, causal = _bias(q, mask, piece), piece.kind == "diagonal"
        operands = (dout, q, k, v, bias, out, finite(norm))
        dq, dk, dv = _fused_backward(operands, causal, of.scale)
    else:
        weights = (_scores(of, q, k, mask, piece) - finite(norm).unsqueeze(-1)).exp_()
        dv = weights.to(dout.dtype).mT @ dout
        inner = (dout * out).sum(-1, dtype=weights.dtype, keepdim=True)
        dscores = weights.mul_((dout @ v.mT).to(weights.dtype) - inner)
        if into[3] is not None:
            part = _part_of_mask(into[3], piece)
            part += dscores.sum_to_size(part.shape)
        dscores = (dscores * of.scale).to(q.dtype)
        dq, dk = dscores @ k, dscores.mT @ q
    into[0].narrow(-2, *piece.rows).add_(dq)
    for whole, part in ((into[1], dk), (into[2], dv)):
        _add_to_key_heads(whole.narrow(-2, *piece.keys), part, of.key_heads)


def _operands(
    of: Attention, query: Tensor, key: Tensor, value: Tensor, piece: Piece
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and keys of a piece, a key and a value head for every query head."""
    k, v = (_per_query_head(x.narrow(-2, *piece.keys), of.key_heads) for x in (key, value))
    return query.narrow(-2, *piece.rows), k, v


def _per_query_head(x: Tensor, key_heads: KeyHeads) -> Tensor:
    if isinstance(key_heads, Tensor):
        return x.index_select(-3, key_heads)
    return x if key_heads == 1 else x.repeat_interleave(key_heads, -3)


def _add_to_key_heads(whole: Tensor, part: Tensor, key_heads: KeyHeads) -> None:
    """The reverse, for gradients."""
    if isinstance(key_heads, Tensor):
        whole.index_add_(-3, key_heads, part.to(whole.dtype))
    elif key_heads == 1:
        whole.add_(part)
    else:
        groups = torch.unflatten(part, -3, (-1, key_heads))
        whole.add_(groups.sum(-3, dtype=whole.dtype))


def _scores(of: Attention, q: Tensor, k: Tensor, mask: Tensor | None, piece: Piece) -> Tensor:
    scores = (q @ k.mT).to(wide(q.dtype)) * of.scale
    if piece.kind != "all":
        return scores.masked_fill_(~_seen(piece, q.device), -torch.inf)
    if mask is None:
        return scores
    mask = _part_of_mask(mask, piece)
    if mask.dtype == torch.bool:
        return scores.masked_fill_(~mask, -torch.inf)
    return scores.add_(mask)


def _bias(q: Tensor, mask: Tensor | None, piece: Piece) -> Tensor | None:
    """What the kernels add to the scores [b, h, rows, keys]."""
    if piece.kind == "diagonal" or (piece.kind == "all" and mask is None):
        return None
    seen = _seen(piece, q.device) if mask is None else _part_of_mask(mask, piece)
    lowest = torch.finfo(q.dtype).min
    if seen.dtype == torch.bool:
        bias = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, lowest)
    else:
        bias = seen.to(q.dtype).clamp_min(lowest)
    return bias.expand(*q.shape[:-1], piece.keys[1])


def _seen(piece: Piece, device: torch.device) -> Tensor:
    """[rows, keys]: no key is beyond its row."""
    rows, keys = (
        first + torch.arange(count, device=device)
        for first, count in zip(piece.place, (piece.rows[1], piece.keys[1]), strict=True)
    )
    return rows.unsqueeze(1) >= keys


def _part_of_mask(mask: Tensor, piece: Piece) -> Tensor:
    """What a piece sees of a mask, whose rows are local and whose keys are all keys. A view."""
    if mask.dim() > 1 and mask.shape[-2] != 1:
        mask = mask.narrow(-2, *piece.rows)
    return mask if mask.shape[-1] == 1 else mask.narrow(-1, piece.place[1], piece.keys[1])


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
    pieces, the kernels give this piece's gradients."""
    gradient, q, k, v, bias, out, norm = operands
    given = gradient, q, k, v
    made = out, norm
    # Nothing is dropped: the state of the generator, which they take, is not read.
    if q.device.type == "cpu":
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, *made, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif _is_flash(q, bias):
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        lengths = None, None, q.shape[-2], k.shape[-2]
        found = _aten._scaled_dot_product_flash_attention_backward(
            *given, *made, *lengths, 0.0, causal, state, state, scale=scale
        )
    else:
        state = torch.empty((), dtype=torch.int64, device=q.device)
        wanted = [True, True, True, False]
        found = _aten._scaled_dot_product_efficient_attention_backward(
            *given, bias, *made, state, state, 0.0, wanted, causal, scale=scale
        )
    return tuple(found[:3])


def _is_flash(q: Tensor, bias: Tensor | None) -> bool:
    return bias is None and q.dtype.itemsize == 2


_aten: Any = torch.ops.aten
