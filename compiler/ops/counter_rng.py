"""Random numbers from a counter: a hash of where an element is, not of how many were drawn before.

Element i of the unsharded tensor gets a number that depends on (seed, step, instance, op, i) only,
so every sharding of a tensor, and one process, draw the same.

The hash is two rounds of multiply and xor-shift on 32 bits (constants found by a public search for
low bias, rounded to 31 bits so that products stay within int64) per half of the index.
"""

import math

import torch
from torch import Tensor

_MULTIPLIERS = (0x7FEB352D, 0x2C1B3C6D)
_MASK = 0xFFFFFFFF
_SECOND = 0x9E3779B9
"""Tells the key of the second number of a pair from that of the first."""


def stream_key(seed: int, step: int, instance: int, op: int) -> int:
    """A 32-bit key of one random op in one step."""
    key = 0
    for number in (seed, step, instance, op):
        key = _mixed(key ^ (number & _MASK))
        key = _mixed(key ^ (number >> 32 & _MASK))
    return key


def keep_mask(index: Tensor, key: int, probability: float, size: int) -> Tensor:
    """Boolean mask: each element of the unsharded tensor, given by its linear index (int64), is
    kept with `probability`. size: elements of that tensor."""
    return _bits(index, key, size) < round(probability * 2**32)


def uniform_numbers(index: Tensor, key: int, dtype: torch.dtype, size: int) -> Tensor:
    """A number from 0 to below 1 for each element, of as many of the 32 bits as `dtype` holds.
    size: elements of the unsharded tensor."""
    dropped = max(0, 31 + round(math.log2(torch.finfo(dtype).eps)))
    return (_bits(index, key, size) >> dropped).to(dtype) * 2.0 ** (dropped - 32)


def normal_numbers(index: Tensor, key: int, dtype: torch.dtype, size: int) -> Tensor:
    """A normal number of mean 0 and variance 1 for each element: the Box-Muller transform of two
    uniform ones, made in float32 or float64."""
    wide = torch.promote_types(dtype, torch.float32)
    radius = (-2.0 * torch.log1p(-uniform_numbers(index, key, wide, size))).sqrt()
    angle = 2.0 * math.pi * uniform_numbers(index, _mixed(key ^ _SECOND), wide, size)
    return (radius * angle.cos()).to(dtype)


def _bits(index: Tensor, key: int, size: int) -> Tensor:
    """32 bits per element, as int64. Of a tensor of at most 2^32 elements the upper half of every
    index is 0, and is hashed once."""
    if size <= 1 << 32:
        return _mixed_tensor(index ^ _mixed(key))
    return _mixed_tensor(_mixed_tensor(index >> 32 ^ key) ^ index & _MASK)


def _mixed(x: int) -> int:
    for multiplier in _MULTIPLIERS:
        x = (x ^ x >> 16) * multiplier & _MASK
    return x ^ x >> 16


def _mixed_tensor(x: Tensor) -> Tensor:
    for multiplier in _MULTIPLIERS:
        x = (x ^ x >> 16) * multiplier & _MASK
    return x ^ x >> 16
