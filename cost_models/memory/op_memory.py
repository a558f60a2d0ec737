"""What memory one op takes, as data. meshfold.memory_probe.prober fills it in by running the op on
fake tensors.

A probe is asked for by a ProbeKey, which names everything that memory can depend on: the op, its
constants, and shape, strides, dtype and need for a gradient of every operand. Equal keys have equal
answers, so a model of any depth needs a few dozen probes.
"""

import math
from dataclasses import dataclass

from meshfold.ir.custom_ops import CustomOp
from meshfold.ir.op_graph import ITEM_BYTES, Arg

NO_GRADIENT = -1
NEW_STORAGE = -1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A local tensor: shape and strides in elements, dtype name, whether a gradient flows."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements (an expanded tensor's storage is smaller)."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def dense_spec(shape: tuple[int, ...], dtype: str, requires_grad: bool) -> TensorSpec:
    """The spec of a contiguous tensor."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return TensorSpec(shape, tuple(reversed(strides)), dtype, requires_grad)


def is_dense(spec: TensorSpec) -> bool:
    """Whether a tensor is contiguous."""
    return spec == dense_spec(spec.shape, spec.dtype, spec.requires_grad)


@dataclass(frozen=True, slots=True)
class ProbeKey:
    """One distinct op on local tensors. Ref(k) in `args` and `kwargs` is `operands[k]`, the k-th
    operand in argument order; a value that is read twice is two operands."""

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    operands: tuple[TensorSpec, ...]
    custom: CustomOp | None = None
    """Of an op of the user's, what is known of it."""


@dataclass(frozen=True, slots=True)
class ProbedOutput:
    """A result. `storage`: the operand whose storage it shares, or NEW_STORAGE. `num_bytes`: of a
    new storage, 0 for a shared one."""

    spec: TensorSpec
    storage: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OpProbe:
    """What one op allocates and what autograd keeps. All sizes in bytes.

    saved_operands, saved_outputs: whose storage the backward needs. saved_bytes: storages kept that
    are neither. forward_scratch_bytes: alive at the forward's worst moment beyond operands, results
    and what is kept. gradients[k]: where operand k's gradient lives: NO_GRADIENT, the storage of
    the incoming gradient of output j (j), or the new storage f (num outputs + f), whose size is
    fresh_gradient_bytes[f]. backward_scratch_bytes: likewise beyond incoming and new gradients.
    """

    outputs: tuple[ProbedOutput, ...]
    saved_operands: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    saved_bytes: int = 0
    forward_scratch_bytes: int = 0
    gradients: tuple[int, ...] = ()
    fresh_gradient_bytes: tuple[int, ...] = ()
    backward_scratch_bytes: int = 0
