"""Representative calls of products in ring order, for the rule table (see support.graphs.samples).
With one rank they are products of what they are given."""

from typing import Any

from support.graphs.calls import Sample
from support.graphs.ops import SingleOp
from support.graphs.tensors import real


def _ring(name: str, *args: Any) -> Sample:
    target = f"meshfold.{name}.default"
    return target, lambda: SingleOp(target, *args, 1)


def _gather(x: Any, weights: list[Any], biases: list[Any], *place: Any) -> Sample:
    return _ring("all_gather_matmul", x, weights, biases, *place)


RING: tuple[Sample, ...] = (
    _gather(real(4, 12, 24), [real(12, 24)], [None], 1, [1, 1], False),
    _gather(real(2, 12, 24), [real(12, 24), real(36, 24)], [real(12), None], 1, [1, 1, 1], False),
    _gather(real(12, 24), [real(24, 12)], [real(12)], 0, [1, 1], True),
    # Rows in two blocks, weights in three; rows of samples; frozen weights.
    _gather(real(2, 24, 12), [real(36, 12)], [real(36)], 1, [2, 3], False),
    _gather(real(12, 3, 24), [real(24, 24), real(24, 12)], [None, real(12)], 0, [1, 2, 1], True),
    _gather(real(4, 12, 24), [real(12, 24, grad=False)], [None], 1, [1, 1], False),
    _ring("matmul_reduce_scatter", real(4, 12, 24), real(36, 24), real(36), 1, [1, 1], False),
    _ring("matmul_reduce_scatter", real(12, 24), real(24, 12), None, 0, [1, 1], True),
    _ring("matmul_reduce_scatter", real(2, 24, 36), real(12, 36), real(12), 1, [2, 3], False),
    _ring(
        "matmul_reduce_scatter", real(4, 12, 24), real(36, 24, grad=False), None, 1, [1, 1], False
    ),
)
