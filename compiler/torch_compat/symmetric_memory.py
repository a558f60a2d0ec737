"""Products fused with the gather of their rows, or the scatter of their sums, by torch's operators
over symmetric memory. The one file that knows torch's private module for it.

Ranks read each other's memory there while they compute, without collectives that take turns; it
takes CUDA devices that reach each other's memory, those of one node.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.errors import moved

try:
    from torch.distributed import _symmetric_memory
except ImportError as error:  # pragma: no cover
    raise moved("_symmetric_memory") from error


def enable(group_name: str) -> None:
    """Let the ranks of a process group read each other's memory. Called on all of them."""
    _symmetric_memory.enable_symm_mem_for_group(_name(group_name))


def gathered_products(
    x: Tensor, matrices: Sequence[Tensor], dim: int, group_name: str
) -> tuple[Tensor, list[Tensor]]:
    """(x gathered along `dim`, its products with matrices [k, o])."""
    name = _name(group_name)
    given = x.contiguous(), list(matrices), dim, name
    whole, made = torch.ops.symm_mem.fused_all_gather_matmul(*given)
    return whole, list(made)


def scattered_product(x: Tensor, matrix: Tensor, dim: int, group_name: str) -> Tensor:
    """The sum over the group of x @ matrix [k, o], of which a rank gets its part of `dim`."""
    arguments = x.contiguous(), matrix, "sum", dim, _name(group_name)
    made: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(*arguments)
    return made


def _name(group_name: str) -> Any:
    """A type of its own in newer versions of torch."""
    return group_name
