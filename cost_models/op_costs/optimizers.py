"""What optimizers keep for the parameters of one rank, and what their step makes and moves.

    name           optimizer                                    states of n numbers of b bytes
    sgd            torch.optim.SGD                              none
    momentum       torch.optim.SGD(momentum=...)                n b
    adamw          torch.optim.AdamW                            2 n b
    adamw_fused    torch.optim.AdamW(fused=True)                2 n b
    adamw_bf16     LowPrecisionStates(AdamW, "bf16")            2 n 2
    adamw_8bit     LowPrecisionStates(AdamW, "int8")            2 (n + 4 ceil(n / 256))
    adafactor      torch.optim.Adafactor                        r x c: (r + c) b, of every pair of
                                                                last dims; n b without two dims
    muon           torch.optim.Muon for parameters of two       r x c: n b; others as adamw
                   dims, torch.optim.AdamW for the others

(Loshchilov and Hutter 2019, arXiv:1711.05101; Dettmers et al. 2022, arXiv:2110.02861; Shazeer and
Stern 2018, arXiv:1804.04235; Jordan et al. 2024, kellerjordan.github.io/posts/muon;
meshfold.low_precision.states.) Steps in bytes that are read and written:

    AdamW, SGD     as one fused pass over parameter, gradient and states
    the others     op by op, as torch or meshfold.low_precision runs them: no fused one is known

Muon's products are X X', its square and the product with X, five times, in bfloat16.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

BLOCK_NUMBERS = 256
"""Numbers of an 8-bit state that share one maximum."""

TOGETHER_SCALARS_BYTES = 12
"""Of the scalars by which foreach ops divide, on a CPU (measured on torch 2.13)."""

CHUNK_NUMBERS = 1 << 22
"""Numbers of a parameter whose low-precision states are unpacked at once."""


@dataclass(frozen=True, slots=True)
class Update:
    """Of some parameters on one rank. Sums of parameters add up, but for largest_bytes."""

    state_bytes: int = 0
    """Kept from step to step; counts of steps are left out."""
    together_bytes: int = 0
    """Made during a step for all parameters at once (torch's foreach)."""
    largest_bytes: int = 0
    """Made during a step for one parameter after the other: the most."""
    moved_bytes: int = 0
    """Read and written by a step."""
    flops: int = 0

    def __add__(self, other: "Update") -> "Update":
        return Update(
            self.state_bytes + other.state_bytes,
            self.together_bytes + other.together_bytes,
            max(self.largest_bytes, other.largest_bytes),
            self.moved_bytes + other.moved_bytes,
            self.flops + other.flops,
        )

    def times(self, count: int) -> "Update":
        """Of so many equal parameters."""
        return Update(
            self.state_bytes * count,
            self.together_bytes * count,
            self.largest_bytes * (count > 0),
            self.moved_bytes * count,
            self.flops * count,
        )

    def shared_by(self, num_layers: int) -> "Update":
        """What each of the layers that share the parameters bears, rounded up."""
        return Update(
            -(-self.state_bytes // num_layers),
            -(-self.together_bytes // num_layers),
            self.largest_bytes,
            -(-self.moved_bytes // num_layers),
            -(-self.flops // num_layers),
        )

    @property
    def step_bytes(self) -> int:
        """Made during a step."""
        scalars_bytes = TOGETHER_SCALARS_BYTES if self.together_bytes else 0
        return self.together_bytes + scalars_bytes + self.largest_bytes


@dataclass(frozen=True, slots=True)
class _Numberwise:
    """An optimizer that works number by number, in units of the parameters' bytes. together:
    AdamW's denominators of all parameters at once (measured on torch 2.13; the fused one needs
    nothing). moved: AdamW reads parameter, gradient and two moments and writes parameter and
    moments; SGD without momentum reads two and writes one."""

    states: int
    together: int
    moved: int

    def update(self, num_bytes: int) -> Update:
        return Update(
            state_bytes=self.states * num_bytes,
            together_bytes=self.together * num_bytes,
            moved_bytes=self.moved * num_bytes,
        )


_NUMBERWISE: Mapping[str, _Numberwise] = MappingProxyType(
    {
        "adamw": _Numberwise(states=2, together=1, moved=7),
        "adamw_fused": _Numberwise(states=2, together=0, moved=7),
        "momentum": _Numberwise(states=1, together=0, moved=5),
        "sgd": _Numberwise(states=0, together=0, moved=3),
    }
)


def update_of(optimizer: str, shape: Sequence[int], num_bytes: int, item_bytes: int) -> Update:
    """What an optimizer (of meshfold.ir.options.OPTIMIZERS) keeps and does for one parameter of one
    rank. shape: of its local tensor; num_bytes: of it, item_bytes: of a number of it."""
    if optimizer in _NUMBERWISE:
        return _NUMBERWISE[optimizer].update(num_bytes)
    if not num_bytes:
        return Update()
    if optimizer in ("adamw_bf16", "adamw_8bit"):
        return _low_precision(optimizer, num_bytes // item_bytes, item_bytes)
    if optimizer == "adafactor":
        return _adafactor(shape, num_bytes, item_bytes)
    assert optimizer == "muon", optimizer
    if len(shape) != 2:
        return _NUMBERWISE["adamw"].update(num_bytes)
    return _muon(min(shape), num_bytes, item_bytes)


def least_share(optimizer: str) -> float:
    """Bytes of states, and made at once in a step, over those of parameters: no more than that of
    any parameter whose numbers have eight bytes or fewer."""
    if optimizer in _NUMBERWISE:
        return _NUMBERWISE[optimizer].states + _NUMBERWISE[optimizer].together
    return {"adamw_bf16": 4 / 8, "adamw_8bit": 2 / 8, "adafactor": 0.0, "muon": 1.0}[optimizer]


def has_states(optimizer: str) -> bool:
    """Whether it keeps something from step to step."""
    return optimizer != "sgd"


def _low_precision(optimizer: str, numel: int, item_bytes: int) -> Update:
    """Two states, unpacked to the parameter's dtype and packed again chunk by chunk. Bytes of a
    number: 7 b of AdamW, 4 b made by its loop; of each state, as meshfold.low_precision.packing
    runs op by op, with c = 4 + b for a cast where b is not 4,

        bf16   unpacked 2 + b; cast c; a hash of two products, a sum, two shifts and an xor 52,
               mask 8, sum 12, mask 8, cast 6, copy 4. Two words are made, and a cast: 8, or 12
        int8   unpacked: index 5, look up 8, scale 8, cast c; largest b, scaled b + 4, code 8,
               narrowed 5, copy 2. Scaled numbers and codes are made: 8
    """
    b, cast = item_bytes, (4 + item_bytes) * (item_bytes != 4)
    at_once = min(numel, CHUNK_NUMBERS)
    if optimizer == "adamw_bf16":
        return Update(
            state_bytes=2 * 2 * numel,
            largest_bytes=at_once * max(4 * b, 2 * b + (8 if b == 4 else 12)),
            moved_bytes=numel * (7 * b + 2 * (92 + b + cast)),
        )
    blocks = -(-numel // BLOCK_NUMBERS)
    return Update(
        state_bytes=2 * (numel + 4 * blocks),
        largest_bytes=at_once * max(4 * b, 2 * b + 8),
        moved_bytes=numel * (7 * b + 2 * (40 + 2 * b + cast)),
    )


def _adafactor(shape: Sequence[int], num_bytes: int, item_bytes: int) -> Update:
    """Rows and columns of the last two dims. The step reads the gradient for the norms of rows,
    then of columns, writes the estimate of the second moment, divides, clamps and inverts it in
    place, multiplies it with the gradient, takes two norms and adds it to the parameter. The
    estimate of one parameter is there until that of the next one is."""
    states = num_bytes
    if len(shape) > 1:
        numel = math.prod(shape)
        states = (numel // shape[-1] + numel // shape[-2]) * item_bytes
    return Update(states, 0, 2 * num_bytes, 17 * num_bytes)


def _muon(rows: int, num_bytes: int, item_bytes: int) -> Update:
    """One momentum of a matrix whose smaller side is `rows`. Momentum and Nesterov's step read and
    write three tensors each; a copy in bfloat16 is scaled, goes through five iterations of
    Newton-Schulz and is added."""
    numel, square = num_bytes // item_bytes, rows * rows
    return Update(
        state_bytes=num_bytes,
        largest_bytes=num_bytes + 4 * numel + 4 * square,
        moved_bytes=11 * num_bytes + 50 * numel + 50 * square,
        flops=5 * (4 * rows * numel + 2 * rows * square),
    )
