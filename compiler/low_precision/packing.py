"""Numbers of optimizer states in 16 and in 8 bits, and back.

    bf16   stochastic rounding: of the two nearest bfloat16 numbers the nearer one is the likelier,
           so that moving averages whose steps are below half a unit go on (with beta 0.999 a step is
           1/1000, half a unit of bfloat16 1/512). The draw is a hash of the number's own bits and
           the count of steps: it does not depend on where a number is stored
    int8   block-wise dynamic quantization (Dettmers et al. 2022, arXiv:2110.02861, section 2):
           blocks of 256 numbers in the order of memory, divided by their largest magnitude, each
           to the nearest of 256 codes, which are dense near 0 over seven decades. Signed codes are
           for first moments. Second moments have no sign to store, so twice as many codes; of these
           a number that is not 0 gets none that is 0, since it divides (not in the paper)

An 8-bit number is off by at most MOST_ERROR of its block's largest magnitude.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from meshfold.cost_models.op_costs.optimizers import BLOCK_NUMBERS

DECADES = 7
"""Of the codes."""

MOST_ERROR: Mapping[bool, float] = MappingProxyType({True: 0.9 / 128, False: 0.9 / 256})
"""By whether codes are signed: half the distance of the codes of the uppermost decade."""

_BITS, _STEPS = 0x2C1B3C6D, 0x297A2D39
"""Odd factors of the hash (of Mueller's and Wellons' searched integer hashes)."""


def code_values(*, is_signed: bool) -> Tensor:
    """The numbers that the 256 codes stand for, of a block whose largest magnitude is 1, ascending.

    Decade k of 0..6 has the middles of 2^k equal steps from 0.1 to 1, times 10^(k - 6), with both
    signs; or of 2^(k + 1) steps with one. 0 and 1 make them 256."""
    found = [torch.zeros(1), torch.ones(1)]
    for k in range(DECADES):
        ends = torch.linspace(0.1, 1, 2 ** (k + (not is_signed)) + 1, dtype=torch.float64)
        middles = ((ends[:-1] + ends[1:]) / 2 * 10.0 ** (k + 1 - DECADES)).float()
        found += [middles, -middles] if is_signed else [middles]
    return torch.cat(found).sort().values


def to_codes(x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(codes as uint8, largest magnitudes as float32, one per block) of numbers of one dim.
    values: of the codes, on the same device. Numbers that are not finite leave a block that is not.
    """
    is_signed = bool(values.numel() and float(values[0]) < 0)
    padded = _in_blocks(x)
    largest = torch.linalg.vector_norm(padded, torch.inf, dim=1, dtype=torch.float32)
    scaled = padded / torch.where(largest > 0, largest, 1).unsqueeze(1)
    codes = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2, out_int32=True)
    if not is_signed:
        codes += (codes == 0) & (scaled > 0)
    return codes.to(torch.uint8).flatten()[: x.numel()], largest


def of_codes(codes: Tensor, largest: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that codes of one dim stand for."""
    found = values[_in_blocks(codes).int()].mul_(largest.unsqueeze(1))
    return found.flatten()[: codes.numel()].to(dtype)


def to_bfloat16(x: Tensor, step: Tensor) -> Tensor:
    """Stochastically rounded numbers. step: one number, which changes from step to step."""
    bits = x.to(torch.float32).view(torch.int32)
    drawn = bits.mul(_BITS).add_(step.to(x.device, torch.int32) * _STEPS)
    drawn.bitwise_right_shift_(16).bitwise_and_(0xFFFF).add_(bits).bitwise_and_(-0x10000)
    return drawn.view(torch.float32).to(torch.bfloat16)


def _in_blocks(x: Tensor) -> Tensor:
    """Numbers of one dim as rows of blocks, the last one filled up with zeros."""
    missing = -x.numel() % BLOCK_NUMBERS
    if missing:
        x = torch.cat([x, x.new_zeros(missing)])
    return x.view(-1, BLOCK_NUMBERS)
