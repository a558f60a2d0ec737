"""Numbers of optimizer states in 16 and in 8 bits, and back.

    bf16   stochastic rounding: of the two nearest bfloat16 numbers the nearer one is the likelier,
           so that moving averages whose steps are below half a unit go on (with beta 0.999 a step
           is 1/1000, half a unit of bfloat16 1/512). The draw is a hash of the number's bits and
           of the count of steps: it does not depend on where a number is stored
    int8   block-wise dynamic quantization (Dettmers et al. 2022, arXiv:2110.02861, section 2):
           blocks of 256 numbers in the order of memory, divided by the largest one, each to the
           nearest of 256 codes, which are dense near 0 over seven decades. Signed codes are for
           first moments. Second moments have no sign to store, so twice as many codes. Not in the
           paper: the largest number keeps its sign, so that it has the code of 1 and what was
           packed is packed again as it is; a second moment that is not 0 gets no code that is 0,
           since it divides

An 8-bit number is off by at most MOST_ERROR of its block's largest magnitude.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from meshfold.cost_models.op_costs.optimizers import BLOCK_NUMBERS

DECADES = 7
"""Of the codes."""

MOST_ERROR: Mapping[bool, float] = MappingProxyType({True: 0.9 / 128, False: 0.9 / 256})
"""By whether codes are signed: half the distance of the codes of the uppermost decade."""

_BITS, _STEPS, _AGAIN = 0x2C1B3C6D, 0x3C6EF372 | 1, 0x297A2D39
"""Odd factors of the hash (of Mueller's and Wellons' searched integer hashes)."""


@dataclass(frozen=True, eq=False)
class Code:
    """What 8 bits stand for, of a block whose largest magnitude is 1.

    Decade k of 0..6 has the middles of 2^k equal steps from 0.1 to 1, times 10^(k - 6), with both
    signs; or of 2^(k + 1) steps with one. 0 and 1 make them 256."""

    values: Tensor
    """Ascending."""
    ends: Tensor
    """The largest number that gets each code but the last."""

    @staticmethod
    def of(device: torch.device, *, is_signed: bool) -> "Code":
        """The code of first moments, or of second ones."""
        found = [torch.zeros(1), torch.ones(1)]
        for k in range(DECADES):
            steps = 2 ** (k + (not is_signed))
            ends = torch.linspace(0.1, 1, steps + 1, dtype=torch.float64)
            middles = ((ends[:-1] + ends[1:]) / 2 * 10.0 ** (k + 1 - DECADES)).float()
            found += [middles, -middles] if is_signed else [middles]
        values = torch.cat(found).sort().values
        ends = (values[1:] + values[:-1]) / 2
        if not is_signed:
            ends[0] = 0
        return Code(values.to(device), ends.to(device))


def to_codes(x: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """(uint8 numbers, largest numbers as float32, one per block) of numbers of one dim. A block
    with a number that is not finite comes back as one that is not."""
    padded = _in_blocks(x.float() if x.dtype == torch.float64 else x)
    low, high = torch.aminmax(padded, dim=1)
    largest = torch.where(high >= -low, high, low).float()
    scaled = padded / torch.where(largest == 0, 1, largest).unsqueeze(1)
    codes = torch.bucketize(scaled, code.ends, out_int32=True)
    del scaled
    return codes.to(torch.uint8).flatten()[: x.numel()], largest


def of_codes(codes: Tensor, largest: Tensor, code: Code, dtype: torch.dtype) -> Tensor:
    """The numbers of one dim that were packed so."""
    # Indexing would make a copy of the indices in 64 bits.
    found = code.values.index_select(0, _in_blocks(codes).flatten().int())
    found.view(-1, BLOCK_NUMBERS).mul_(largest.unsqueeze(1))
    return found[: codes.numel()].to(dtype)


def to_bfloat16(x: Tensor, step: Tensor) -> Tensor:
    """Stochastically rounded numbers. step: one number, which changes from step to step."""
    bits = x.to(torch.float32).view(torch.int32)
    drawn = bits.mul(_BITS).add_(step.to(x.device, torch.int32) * _STEPS)
    drawn.bitwise_xor_(drawn >> 15).mul_(_AGAIN)
    drawn.bitwise_right_shift_(16).bitwise_and_(0xFFFF).add_(bits).bitwise_and_(-0x10000)
    return drawn.view(torch.float32).to(torch.bfloat16)


def _in_blocks(x: Tensor) -> Tensor:
    """Numbers of one dim as rows of blocks, the last one filled up with zeros."""
    missing = -x.numel() % BLOCK_NUMBERS
    if missing:
        x = torch.cat([x, x.new_zeros(missing)])
    return x.view(-1, BLOCK_NUMBERS)
