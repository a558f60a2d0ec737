"""Random numbers from a counter: a hash of where an element is, not of how many were drawn before.

Element i of the unsharded tensor gets a number that depends on (seed, step, instance, op, i) only,
so every sharding of a tensor, and one process, drop the same elements.

The hash is two rounds of multiply and xor-shift on 32 bits (constants found by a public search for
low bias, rounded to 31 bits so that products stay within int64) per half of the index.
"""

from torch import Tensor

_MULTIPLIERS = (0x7FEB352D, 0x2C1B3C6D)
_MASK = 0xFFFFFFFF


def stream_key(seed: int, step: int, instance: int, op: int) -> int:
    """A 32-bit key of one random op in one step."""
    key = 0
    for number in (seed, step, instance, op):
        key = _mixed(key ^ (number & _MASK))
        key = _mixed(key ^ (number >> 32 & _MASK))
    return key


def keep_mask(index: Tensor, key: int, probability: float) -> Tensor:
    """Boolean mask: each element of the unsharded tensor, given by its linear index (int64), is
    kept with `probability`."""
    bits = _mixed_tensor(index >> 32 ^ key)
    bits = _mixed_tensor(bits ^ index & _MASK)
    return bits < round(probability * 2**32)


def _mixed(x: int) -> int:
    for multiplier in _MULTIPLIERS:
        x = (x ^ x >> 16) * multiplier & _MASK
    return x ^ x >> 16


def _mixed_tensor(x: Tensor) -> Tensor:
    for multiplier in _MULTIPLIERS:
        x = (x ^ x >> 16) * multiplier & _MASK
    return x ^ x >> 16
