"""One-op graphs of what meshfold runs by functions of its own: experts, checks, random
ops, and products in ring order, which with one rank are products of what they are given."""

from typing import Any

import torch

from support.graphs.calls import Sample, X, call
from support.graphs.ops import SingleOp
from support.graphs.tensors import flags, real, whole


def _own(*args: Any, op: str = "expert_linear") -> Sample:
    target = f"meshfold.{op}.default"
    return target, lambda: SingleOp(target, *args)


EXPERTS: tuple[Sample, ...] = (
    _own(real(24, 12), real(12, 24, 12), whole(12, 24)),
    _own(real(24, 12), real(12, 24, 12), whole(12, 24), real(12, 24)),
    _own(real(24, 12), real(12, 12, 36), whole(12, 24), real(12, 36), True),
    # Some experts have no row, and some rows no expert.
    _own(real(12, 12), real(24, 12, 12), 2 * whole(13, 12), None, False),
    _own(real(12, 12), real(12, 12, 24, grad=False), whole(12, 12), real(12, 24), True),
    _own(real(24, 12), whole(12, 24), 12, op="dispatch"),
    _own(whole(12, 24), whole(12, 24), 12, op="dispatch"),
    _own(real(24, 12), whole(12, 24), 12, op="combine"),
)

_OFFSETS = torch.tensor([0, 0, 5, 7, 7, 12, 20, 23, 24, 24, 30, 33, 36])

BAGS: tuple[Sample, ...] = (
    *(
        _own(real(24, 12), whole(24, 12, 5), None, None, mode, False, padding, op="embedding_bag")
        for mode in (0, 1, 2)
        for padding in (-1, 3)
    ),
    _own(real(24, 12), whole(24, 12, 5), None, real(12, 5), 0, False, 7, op="embedding_bag"),
    *(
        _own(real(24, 12), whole(24, 36), _OFFSETS, None, mode, last, 3, op="embedding_bag")
        for mode, last in ((0, False), (1, True), (2, False))
    ),
    _own(real(24, 12), whole(24, 36), _OFFSETS, real(36), 0, True, op="embedding_bag"),
    _own(real(24, 12, grad=False), whole(24, 36), _OFFSETS, real(36), op="embedding_bag"),
)

_LABELS = whole(36, 24).masked_fill(whole(3, 24) == 0, -100)

FUSED: tuple[Sample, ...] = (
    _own(real(*X), [24], real(24), 1e-6, op="rms_norm"),
    _own(real(*X), [24], None, 1e-3, op="rms_norm"),
    _own(real(*X), [24], real(24, grad=False), 1e-6, op="rms_norm"),
    *(
        _own(real(*X), real(*X, seed=3), activation, op="gated_product")
        for activation in ("silu", "gelu", "gelu_tanh")
    ),
    _own(real(*X, grad=False), real(*X, seed=3), "silu", op="gated_product"),
    *(
        _own(real(24, 36), _LABELS, *others, op="cross_entropy")
        for others in (
            (),
            (None, 0),
            (real(36, grad=False), 2),
            (real(36, grad=False), 1, -100, 0.3),
        )
    ),
    _own(real(24, 36), whole(36, 24), None, 1, 4, op="cross_entropy"),
    _own(real(12, 24, 4), whole(24, 12, 4), None, 1, -100, 0.3, op="cross_entropy"),
    *(
        _own(real(24, 12), real(36, 12, seed=3), _LABELS, *others, op="linear_cross_entropy")
        for others in (
            (),
            (real(36), None, 0),
            (None, real(36, grad=False), 2),
            (real(36), real(36, grad=False), 1, -100, 0.3),
        )
    ),
)

CHECKS: tuple[Sample, ...] = (
    _own(real(12, 24), flags(1)[0] | True, True, "file.py:1: assert x", op="check"),
    _own(real(), flags(1) & False, False, "file.py:2: if x: raise", op="check"),
)

RANDOM: tuple[Sample, ...] = (
    call("dropout.default", real(*X), 0.3, True),
    call("dropout.default", real(*X), 0.3, False),
    call("native_dropout.default", real(*X), 0.3, True),
    *(
        _own([4, 12, 24], torch.float64, torch.device("cpu"), op=kind)
        for kind in ("uniform", "normal")
    ),
)


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
