"""The ops meshfold::uniform and meshfold::normal: a tensor of random numbers by its size alone.

Capture writes every random op of a model with them (meshfold.capture.rewrites.draws). A program of
ranks runs local_draw in their place: element i of the unsharded tensor is a function of (seed,
step, instance, op, i), as in meshfold.ops.counter_rng, so a rank makes its shard of the numbers
that one process would draw. Importing this defines the ops.
"""

import math

import torch
from torch import Tensor

from meshfold.distributed.step_context import StepContext
from meshfold.ops.counter_rng import normal_numbers, stream_key, uniform_numbers
from meshfold.sharding.indices import ShardDigits, shard_indices_of, shard_indices_of_microbatch
from meshfold.sharding.slicing import local_indices

_NUMBERS = {"uniform": uniform_numbers, "normal": normal_numbers}
_ALIKE = stream_key(1, 1, 1, 1)
"""The key of draws that are alike."""

BatchSlice = tuple[int, int, int]
"""(dim, blocks, number of microbatches): the slices of the batch of which a draw makes one."""


@torch.library.custom_op(
    "meshfold::uniform", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded]
)
def uniform(
    size: list[int], dtype: torch.dtype, device: torch.device, alike: bool = False
) -> Tensor:
    """Numbers from 0 to below 1. alike: the same in every step and op, so that a model in one
    process can be given them, too."""
    if alike:
        return alike_draw("uniform", size, dtype, device)
    return torch.rand(size, dtype=dtype, device=device)


@torch.library.custom_op(
    "meshfold::normal", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded]
)
def normal(
    size: list[int], dtype: torch.dtype, device: torch.device, alike: bool = False
) -> Tensor:
    """Normal numbers of mean 0 and variance 1. alike: as in uniform."""
    if alike:
        return alike_draw("normal", size, dtype, device)
    return torch.randn(size, dtype=dtype, device=device)


def _shape(
    size: list[int], dtype: torch.dtype, device: torch.device, alike: bool = False
) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


uniform.register_fake(_shape)
normal.register_fake(_shape)


def alike_draw(
    kind: str, size: list[int] | torch.Size, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """What ops of `kind`, "uniform" or "normal", draw where all draw alike."""
    index = torch.arange(math.prod(size), device=device).reshape(size)
    return _NUMBERS[kind](index, _ALIKE, dtype, index.numel())


def local_draw(
    context: StepContext,
    kind: str,
    dtype: torch.dtype,
    site: tuple[int, int],
    shape: tuple[int, ...],
    digits: tuple[ShardDigits, ...],
    batch_slice: BatchSlice,
    alike: bool = False,
) -> Tensor:
    """This rank's shard, in this microbatch, of a tensor of random numbers. site: (instance, op),
    so that no two ops of a step draw the same; shape: on all ranks together; digits: per dim."""
    index = global_indices(context, shape, digits, batch_slice)
    key = _ALIKE if alike else stream_key(*context.rng, *site)
    return _NUMBERS[kind](index, key, dtype, num_elements(shape, batch_slice))


def num_elements(shape: tuple[int, ...], batch_slice: BatchSlice) -> int:
    """Of the tensor of the full batch. shape: of a microbatch on all ranks."""
    return math.prod(shape) * batch_slice[2]


def global_indices(
    context: StepContext,
    shape: tuple[int, ...],
    digits: tuple[ShardDigits, ...],
    batch_slice: BatchSlice,
) -> Tensor:
    """Linear indices, in the tensor of the full batch, of the elements of this rank's shard in this
    microbatch. shape: of a microbatch on all ranks."""
    index = torch.zeros((), dtype=torch.int64, device=context.device)
    for summand in index_summands(context, shape, digits, batch_slice):
        index = index + summand
    return index


def index_summands(
    context: StepContext,
    shape: tuple[int, ...],
    digits: tuple[ShardDigits, ...],
    batch_slice: BatchSlice,
) -> list[Tensor]:
    """The same as what each dim adds to an index: one tensor per dim, 1 long in all others."""
    dim, blocks, num_microbatches = batch_slice
    full = [size * num_microbatches if d == dim else size for d, size in enumerate(shape)]
    found = []
    for d, size in enumerate(full):
        indices = shard_indices_of(context.mesh, digits[d])
        if d == dim and num_microbatches > 1:
            indices = shard_indices_of_microbatch(context, digits[d], blocks, num_microbatches)
        local = local_indices(size, indices, context.device) * math.prod(full[d + 1 :])
        found.append(local.reshape(-1, *[1] * (len(full) - d - 1)))
    return found
