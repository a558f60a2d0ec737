"""Attention block by block against unsharded attention, plain and fused, result and gradients."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshfold.ops import blockwise_attention as attention_blocks
from meshfold.ops.blockwise_attention import (
    Attention,
    Block,
    KeyHeads,
    add_block,
    block_backward,
    block_forward,
    block_ranges,
    empty_result,
    is_fused,
)
from meshfold.ops.ring_attention import blocks_of

HEADS, WIDTH, SCALE = 4, 8, 0.6


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def ranges_of(size: int, bounds: list[int]) -> list[tuple[int, int]]:
    """Ranges (first, number) between bounds."""
    ends = sorted({0, size, *(c for c in bounds if c < size)})
    return [(a, b - a) for a, b in zip(ends, ends[1:], strict=False)]


def mask_of(kind: str, rows: int, keys: int) -> Tensor | None:
    if kind == "flags":
        # Row 0 sees no key at all, row 1 none of the first half.
        mask = random(2, 1, rows, keys, seed=4) > 0
        mask[..., 0, :] = False
        mask[..., min(1, rows - 1), : keys // 2] = False
        return mask
    if kind == "numbers":
        return random(HEADS, rows, keys, seed=4)
    return random(keys, seed=4) if kind == "a row" else None


def in_blocks(
    of: Attention, tensors: list[Tensor], mask: Tensor | None, blocks: list[Block], pulled: Tensor
) -> list[Tensor]:
    """The result, then gradients of query, key and value, and of the mask if it has numbers."""
    query, key, value = tensors
    total = empty_result(query, value.shape[-1])
    for block in blocks:
        add_block(total, block_forward(of, query, key, value, mask, block), block)
    into: list[Any] = [torch.zeros_like(x, dtype=total[0].dtype) for x in tensors]
    has_gradient = mask is not None and mask.dtype != torch.bool and not of.is_fused
    into.append(torch.zeros_like(mask) if has_gradient else None)
    result = total[0].to(query.dtype), total[1]
    for block in blocks:
        block_backward(of, (query, key, value, mask), result, pulled, tuple(into), block)
    return [total[0], *(x for x in into if x is not None)]


def unsharded(
    tensors: list[Tensor], mask: Tensor | None, causal: bool, key_heads: KeyHeads, pulled: Tensor
) -> list[Tensor]:
    """The same by torch. Rows that see nothing give zeros."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    query, key, value = leaves
    if isinstance(key_heads, Tensor):
        key, value = (x.index_select(-3, key_heads) for x in (key, value))
    else:
        key, value = (x.repeat_interleave(key_heads, -3) for x in (key, value))
    scores = query @ key.mT * SCALE
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        weights = scores.masked_fill(~mask, -1e300).softmax(-1).masked_fill(~mask, 0.0)
    else:
        if mask is not None:
            mask = mask.detach().clone().requires_grad_()
            leaves.append(mask)
            scores = scores + mask
        weights = scores.softmax(-1)
    out = weights @ value
    return [out.detach(), *torch.autograd.grad(out, leaves, pulled)]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 12),
    keys=st.integers(1, 12),
    row_bounds=st.lists(st.integers(0, 11), max_size=3),
    key_bounds=st.lists(st.integers(0, 11), max_size=3),
    mask=st.sampled_from(["none", "causal", "flags", "numbers", "a row"]),
    key_heads=st.sampled_from([1, 2, 4, "picked"]),
    fused=st.booleans(),
)
def test_blocks_together_are_unsharded_attention(
    rows: int,
    keys: int,
    row_bounds: list[int],
    key_bounds: list[int],
    mask: str,
    key_heads: Any,
    fused: bool,
) -> None:
    """Also in the order of a ring."""
    shared: KeyHeads = torch.tensor([1, 0, 1, 1]) if key_heads == "picked" else key_heads
    count = 2 if key_heads == "picked" else HEADS // key_heads
    tensors = [random(2, HEADS, rows, WIDTH, seed=1)]
    tensors += [random(2, count, keys, WIDTH, seed=s) for s in (2, 3)]
    given = mask_of(mask, rows, keys)
    pulled = random(2, HEADS, rows, WIDTH, seed=5)
    blocks = blocks_of(ranges_of(rows, row_bounds), ranges_of(keys, key_bounds), mask == "causal")
    expected = unsharded(tensors, given, mask == "causal", shared, pulled)
    of = Attention(SCALE, shared, fused)
    for order in (list(blocks), list(reversed(blocks))):
        found = in_blocks(of, tensors, given, order, pulled)
        for a, b in zip(found, expected, strict=False):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_under_a_causal_mask_blocks_are_full_diagonal_causal_or_left_out() -> None:
    rows = [(0, 4), (8, 4)]
    kinds = [(p.rows[0], p.positions, p.kind) for p in blocks_of(rows, rows, True)]
    assert kinds == [
        (0, (0, 0), "diagonal"),
        (4, (8, 0), "all"),
        (4, (8, 8), "diagonal"),
    ]
    (causal,) = blocks_of([(2, 4)], [(4, 4)], True)
    assert causal.kind == "causal"
    assert blocks_of([(0, 4)], [(4, 4)], True) == ()


@pytest.mark.parametrize("mask", ["none", "causal", "flags"])
def test_sixteen_bits_are_summed_in_thirty_two(mask: str) -> None:
    tensors = [random(2, HEADS, 64, WIDTH, seed=s) for s in (1, 2, 3)]
    narrow = [x.bfloat16() for x in tensors]
    tensors = [x.double() for x in narrow]
    given = mask_of(mask, 64, 64)
    pulled = random(2, HEADS, 64, WIDTH, seed=5).bfloat16()
    assert is_fused(*narrow, given)
    expected = unsharded(tensors, given, mask == "causal", 1, pulled.double())
    halves = [(0, 32), (32, 32)]
    blocks = list(blocks_of(halves, halves, mask == "causal"))
    for fused in (True, False):
        found = in_blocks(Attention(SCALE, 1, fused), narrow, given, blocks, pulled)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == torch.float32
            assert (a - b).norm() < 0.01 * b.norm()


def test_what_kernels_take() -> None:
    x = random(2, HEADS, 64, WIDTH, dtype=torch.float32)
    trained = random(64, 64, dtype=torch.float32).requires_grad_()
    assert is_fused(x, x, x, None) and is_fused(x, x, x, trained.detach())
    assert not is_fused(x, x, x, trained)
    assert not is_fused(*(x.double(),) * 3, None)
    assert not is_fused(*(x[0],) * 3, None)
    assert not is_fused(x, x, x[..., :4], None)
    assert not is_fused(*(x[..., :33, :],) * 3, None)


def test_the_plain_form_goes_in_short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "LONGEST", 4)
    assert block_ranges([(3, 6), (20, 4)], False) == ((3, 4), (7, 2), (20, 4))
    assert block_ranges([(3, 6)], True) == ((3, 6),)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_a_gpu_take_what_they_are_given(dtype: torch.dtype, mask: bool) -> None:
    """Shapes alone, on meta tensors: flash attention, or memory-efficient attention."""
    q = torch.empty(2, HEADS, 64, WIDTH, dtype=dtype, device="meta")
    given = torch.empty(2, 1, 64, 64, dtype=torch.bool, device="meta") if mask else None
    into = tuple(torch.empty_like(q, dtype=torch.float32) for _ in range(3))
    block = Block((0, 64), (0, 64), (0, 0), "all")
    of = Attention(SCALE, 1, True)
    result, norm = block_forward(of, q, q, q, given, block)
    assert (result.shape, result.dtype, norm.shape) == (q.shape, torch.float32, q.shape[:-1])
    local = (q, q, q, given)
    block_backward(of, local, (result.to(dtype), norm), q, (*into, None), block)
