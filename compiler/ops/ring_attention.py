"""Ring attention: every rank keeps its query rows, keys and values go round (Liu et al. 2023,
arXiv:2310.01889).

On an axis of n ranks, each with its shard of the rows of query, key and value:

    forward     compute with the keys and values here, meanwhile pass them to the next rank; n
                times, n - 1 of them with a pass
    backward    the same once more. The gradients of keys and values follow one step behind them,
                every rank adds its summand, and after n passes they are back

Only a rank's own rows are saved for the backward: query, key, value, result and log-sum-exp.
With a causal mask a rank leaves out what its rows do not see; the last rank leaves out nothing, and
the step takes as long as it does. The rows are not dealt out in another order to even that out.

Over several axes the ranks are visited like the digits of a number, the last axis fastest.
Collectives are the same on all ranks, whatever a rank computes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshfold.distributed.rank_mesh import Axes, RankMesh
from meshfold.distributed.step_context import StepContext
from meshfold.ops.blockwise_attention import (
    Attention,
    Block,
    KeyHeads,
    Kind,
    add_block,
    block_backward,
    block_forward,
    block_ranges,
    empty_result,
    is_fused,
    wide,
)
from meshfold.sharding.indices import ShardDigits, key_heads_of, shard_indices_of
from meshfold.sharding.slicing import ShardIndices, local_runs


@dataclass(frozen=True, slots=True)
class _Ring:
    """One op on one rank. mesh: None for a probe of memory, to which nothing comes; axes: that keys
    go round on; visits: the blocks at each; passes: between a visit and the next, the axes on which
    keys are passed on.
    """

    mesh: RankMesh | None
    axes: Axes
    visits: tuple[tuple[Block, ...], ...]
    passes: tuple[Axes, ...]
    attention: Attention


def ring_attention(
    context: StepContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    shape: tuple[int, ...],
    digits: tuple[ShardDigits, ...],
    key_digits: ShardDigits,
    key_heads: tuple[int, ShardDigits],
) -> Tensor:
    """Attention of some batches, heads and query rows; each rank has a shard of the keys.

    query [..., h, s, e], key and value [..., g, t, e] and mask, which broadcasts to [..., h, s, all
    keys], are local. shape, digits, key_heads: as in meshfold.ops.local_implementations.attention.
    key_digits: of the rows of key and value; the same axes shard the rows of the query. Raises
    ValueError if key and value have different rows.
    """
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key {list(key.shape)} and value {list(value.shape)} have different rows")
    axes = tuple(axis for axis, *_ in key_digits)
    sizes = tuple(context.mesh.size((axis,)) for axis in axes)
    fused = is_fused(query, key, value, mask)
    rows = block_ranges(local_runs(shape[-2], shard_indices_of(context.mesh, digits[-2])), fused)
    visits = []
    for visit in range(math.prod(sizes)):
        steps = zip(key_digits, sizes, _digits_of(visit, sizes), strict=True)
        indices: ShardIndices = tuple(
            (blocks, size, (context.mesh.coord(axis) - passed) % size, granularity)
            for (axis, blocks, granularity), size, passed in steps
        )
        visits.append(
            blocks_of(rows, block_ranges(local_runs(shape[-1], indices), fused), is_causal)
        )
    attention = Attention(
        query.shape[-1] ** -0.5 if scale is None else scale,
        _key_heads(context.mesh, shape, digits, key_heads, query, key),
        fused,
    )
    ring = _Ring(context.mesh, axes, tuple(visits), _passes(axes, sizes), attention)
    out: Tensor = _RingAttention.apply(ring, query, key, value, mask)  # type: ignore[no-untyped-call]
    return out


def _key_heads(
    mesh: RankMesh,
    shape: tuple[int, ...],
    digits: tuple[ShardDigits, ...],
    key_heads: tuple[int, ShardDigits],
    query: Tensor,
    key: Tensor,
) -> KeyHeads:
    count, key_digits = key_heads
    if len(shape) < 4 or shape[-3] == count:
        return 1
    # Padded query heads have a granularity of those that share a key head.
    if [d[:2] for d in digits[-3]] == [d[:2] for d in key_digits]:
        return query.shape[-3] // key.shape[-3]
    return key_heads_of(mesh, shape[-3], digits[-3], count, key_digits)


def blocks_of(
    rows: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]], is_causal: bool
) -> tuple[Block, ...]:
    """The blocks in which rows see keys, both ranges of global positions."""
    found = []
    first_row = 0
    for row, num_rows in rows:
        first_key = 0
        for key, num_keys in keys:
            local = (first_row, num_rows), (first_key, num_keys), (row, key)
            if not is_causal or key + num_keys <= row + 1:
                found.append(Block(*local, "all"))
            elif (row, num_rows) == (key, num_keys):
                found.append(Block(*local, "diagonal"))
            elif key < row + num_rows:
                found.append(Block(*local, "causal"))
            first_key += num_keys
        first_row += num_rows
    return tuple(found)


def _passes(axes: Axes, sizes: Sequence[int]) -> tuple[Axes, ...]:
    """The axes whose digit changes, between each two visits: the last always, others when all those
    behind have gone round."""
    behind = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
    return tuple(
        tuple(axis for axis, n in zip(axes, behind, strict=True) if visit % n == 0)
        for visit in range(1, math.prod(sizes))
    )


def _digits_of(visit: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """How often keys have been passed on along every axis before a visit."""
    return tuple(visit // math.prod(sizes[k + 1 :]) for k in range(len(sizes)))


class _RingAttention(torch.autograd.Function):
    """See the module docstring."""

    @staticmethod
    def forward(
        ctx: Any, ring: _Ring, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        total = empty_result(query, value.shape[-1])
        flat = _begun(ring, key, value)
        for visit, blocks in enumerate(ring.visits):
            on_its_way = _pass_on(ring, flat, visit)
            here = _unpacked(flat, key, value)
            for block in blocks:
                add_block(total, block_forward(ring.attention, query, *here, mask, block), block)
            if on_its_way is not None:
                flat = _waited(ring, on_its_way)
        out = total[0].to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, total[1])
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ring: _Ring = ctx.ring
        query, key, value, mask, out, norm = ctx.saved_tensors
        into_query = torch.zeros_like(query, dtype=wide(query.dtype))
        into_mask = None
        if ctx.needs_input_grad[4]:
            into_mask = torch.zeros_like(mask, dtype=wide(mask.dtype))
        flat = _begun(ring, key, value)
        # Gradients of the last visit: what is sent, alive until it has left, and what arrives.
        behind: tuple[Tensor, Tensor] | None = None
        for visit, blocks in enumerate(ring.visits):
            on_its_way = _pass_on(ring, flat, visit)
            here = _unpacked(flat, key, value)
            summand = torch.zeros_like(flat, dtype=wide(flat.dtype))
            into = (into_query, *_unpacked(summand, key, value), into_mask)
            for block in blocks:
                operands = (query, *here, mask)
                block_backward(ring.attention, operands, (out, norm), gradient, into, block)
            if behind is not None:
                summand += _waited(ring, behind[1])
            if on_its_way is not None:
                flat = _waited(ring, on_its_way)
            is_last = visit == len(ring.passes)
            # One more pass on every axis takes them back.
            axes = ring.axes if is_last else ring.passes[visit]
            behind = summand, _passed(ring, summand, axes)
        assert behind is not None
        dkey, dvalue = _unpacked(_waited(ring, behind[1]), key, value)
        gradients = (into_query, query), (dkey, key), (dvalue, value), (into_mask, mask)
        return None, *(None if g is None else g.to(x.dtype) for g, x in gradients)


def _begun(ring: _Ring, key: Tensor, value: Tensor) -> Tensor:
    """Begins a round; key and value in one flat tensor, so that one message carries them."""
    if ring.mesh is not None:
        ring.mesh.begin_ring()
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpacked(flat: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the flat tensor, in the shapes of key and value."""
    count = key.numel()
    return flat[:count].view(key.shape), flat[count:].view(value.shape)


def _pass_on(ring: _Ring, flat: Tensor, visit: int) -> Tensor | None:
    """Start the pass that follows a visit."""
    return _passed(ring, flat, ring.passes[visit]) if visit < len(ring.passes) else None


def _passed(ring: _Ring, x: Tensor, axes: Axes) -> Tensor:
    """x goes to the next rank along each axis, one after the other; the last pass is in flight."""
    if ring.mesh is None:
        return torch.empty_like(x)
    *first, last = axes
    for axis in first:
        x = ring.mesh.wait(ring.mesh.start_shift(x, axis))
    return ring.mesh.start_shift(x, last)


def _waited(ring: _Ring, in_flight: Tensor) -> Tensor:
    return in_flight if ring.mesh is None else ring.mesh.wait(in_flight)


def _probed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    num_ranks: int,
) -> Tensor:
    """What a probe of memory runs: local tensors, of an axis of `num_ranks`. One block of a
    visit tells: they follow each other, and the first is the largest.
    """
    num_rows, num_keys = query.shape[-2], key.shape[-2]
    fused = is_fused(query, key, value, mask)
    rows = block_ranges([(num_keys * num_ranks, num_rows)], fused)
    visits = [
        blocks_of(
            rows[:1], block_ranges([(number * num_keys, num_keys)], fused)[:1], is_causal=False
        )
        for number in range(num_ranks)
    ]
    if is_causal:
        own: Kind = "diagonal" if num_rows == num_keys else "causal"
        visits[0] = tuple(replace(block, kind=own) for block in visits[0])
    grouped = query.dim() > 3 and query.shape[-3] // key.shape[-3]
    attention = Attention(1.0, grouped or 1, fused)
    passes = _passes(("cp",), (num_ranks,))
    ring = _Ring(None, ("cp",), tuple(visits), passes, attention)
    out: Tensor = _RingAttention.apply(ring, query, key, value, mask)  # type: ignore[no-untyped-call]
    return out


torch.library.define(
    "meshfold::ring_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, int num_ranks)"
    " -> Tensor",
)
torch.library.impl("meshfold::ring_attention", "CompositeImplicitAutograd", _probed)
